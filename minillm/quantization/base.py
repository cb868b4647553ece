"""The base class of quantisation schemes, and the linear layer that holds a scheme's tensors.

A `Scheme` defines three things: the tensors that represent a weight matrix, how to compute them, and how to multiply
with them (as `create_weights` and `apply` of a vLLM linear method). It holds options but no tensors. A
`QuantizedLinear` holds the tensors of one layer and calls its scheme. A new scheme is one class; a faster product
overrides `apply`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from minillm.errors import CheckpointError, ConfigError
from minillm.ops.linear import linear

WEIGHTS, SCALES, ZERO_POINTS = "weights", "scales", "zero points"
INPUT_SCALES, CODEBOOKS, SPARSE = "input scales", "codebooks", "sparse values"
PARTS = (WEIGHTS, SCALES, ZERO_POINTS, INPUT_SCALES, CODEBOOKS, SPARSE)
"""The purposes of a scheme's tensors, by which bytes are counted."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and purpose of one tensor of a scheme."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: str
    """One of `PARTS`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of such a tensor, in memory and in a file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class LayerStatistics:
    """Calibration statistics of one linear layer; a scheme uses the ones that it `needs`."""

    inputs: Tensor | None = None
    """A sample of the layer's inputs, `[rows, in]`, fp32."""
    mean_abs: Tensor | None = None
    """The mean of |x| per input channel over all calibration tokens, `[in]`, fp32."""
    squared_gradients: Tensor | None = None
    """The diagonal of the empirical Fisher information, `[out, in]`, fp32."""


@dataclass(frozen=True)
class Scheme(ABC):
    """A format for weight matrices with fewer bits. Its fields are its options; they go into `config.json`."""

    bits: int
    """Bits per weight, without scales and other extra tensors."""

    method: ClassVar[str]
    """The scheme's name: `quantization=` of `LLM`, `quant_method` in `config.json`."""
    allowed_bits: ClassVar[tuple[int, ...]]
    needs: ClassVar[str] = ""
    """The calibration statistics it requires: `inputs`, `gradients`, or empty for none.

    A scheme without calibration quantises each row of a matrix independently, so it can be applied while a model loads.
    """

    def __post_init__(self) -> None:
        if self.bits not in self.allowed_bits or type(self.bits) is not int:
            allowed = " or ".join(map(str, self.allowed_bits))
            raise ConfigError(f"bits={self.bits!r}: scheme {self.method!r} stores weights in {allowed} bits")

    @abstractmethod
    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """Return the specs of the tensors that represent an `[out_features, in_features]` matrix, by name."""

    @abstractmethod
    def _quantize(self, weight: Tensor, statistics: LayerStatistics) -> dict[str, Tensor]:
        """Implement `quantize`; `weight` is finite fp32, and the required statistics are present."""

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """Return the matrix that the tensors represent: `[out, in]`, fp32."""

    def quantize(self, weight: Tensor, statistics: LayerStatistics | None = None) -> dict[str, Tensor]:
        """Quantise `weight` (`[out, in]`, any float dtype) to the tensors that `tensors` describes.

        Raises `CheckpointError` for NaN or infinite weights, `ConfigError` if a required statistic is missing.
        """
        weight = weight.detach().float()
        if not torch.isfinite(weight).all():
            raise CheckpointError("a weight is NaN or infinite and cannot be quantised; fetch the checkpoint again")
        statistics = statistics or LayerStatistics()
        available = {"inputs": statistics.inputs, "gradients": statistics.squared_gradients}
        if self.needs and available[self.needs] is None:
            raise ConfigError(
                f"scheme {self.method!r} needs calibration ({self.needs}); collect it with "
                "minillm.models.calibration.calibrate"
            )
        return self._quantize(weight, statistics)

    def apply(self, layer: QuantizedLinear, x: Tensor) -> Tensor:
        """Return x Wᵀ + b: `x`: `[rows, in]` → `[rows, out]`. This default dequantises W, then multiplies."""
        return linear(x, layer.dequantize().to(x.dtype), layer.bias)

    def check(self, tensors: Mapping[str, Tensor], in_features: int) -> None:
        """Raise `CheckpointError` for NaN and infinity. Shapes and dtypes must be correct."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise CheckpointError(f"{name} contains NaN or infinity; quantise the original checkpoint again")


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is stored as a scheme's tensors. They are buffers, in the dtypes of the scheme."""

    def __init__(
        self,
        scheme: Scheme,
        in_features: int,
        out_features: int,
        bias: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.scheme, self.in_features, self.out_features = scheme, in_features, out_features
        self.specs = scheme.tensors(out_features, in_features)
        for name, spec in self.specs.items():
            self.register_buffer(name, torch.empty(spec.shape, dtype=spec.dtype, device=device))
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(device), requires_grad=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that represent the weight, by name."""
        return {name: self.get_buffer(name) for name in self.specs}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor], first_row: int = 0) -> None:
        """Copy `tensors` into the layer, from row `first_row` on if they represent only some of its rows."""
        for name, tensor in tensors.items():
            self.get_buffer(name).narrow(0, first_row, tensor.shape[0]).copy_(tensor)

    def dequantize(self) -> Tensor:
        """Return the dequantised weight: `[out, in]`, fp32."""
        return self.scheme.dequantize(self.tensors, self.in_features)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that nn.Linear gives it)
        """`[rows, in]` → `[rows, out]`."""
        return self.scheme.apply(self, input)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight: packed weights, scales and all further tensors, without the bias."""
        return sum(self.bytes_by_part().values())

    def bytes_by_part(self) -> dict[str, int]:
        """Return `num_bytes` by purpose, in the order of `PARTS`, without empty parts."""
        count = dict.fromkeys(PARTS, 0)
        for name, tensor in self.tensors.items():
            count[self.specs[name].part] += tensor.nbytes
        return {part: num_bytes for part, num_bytes in count.items() if num_bytes}

    def extra_repr(self) -> str:
        """Return the details that `print` shows."""
        return f"{self.scheme.method}, in_features={self.in_features}, out_features={self.out_features}"
