"""What a quantisation scheme is, and the linear layer that holds its tensors.

A `Scheme` knows three things: which tensors stand for a weight matrix, how to make them, and how to multiply with them
(`create_weights` and `apply` of a vLLM linear method). It holds options and no tensors. A `QuantizedLinear` holds the
tensors of one layer and asks its scheme. A new scheme is one class; a faster product is another `apply`.
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
"""What the tensors of a scheme are for, so that bytes can be counted by purpose."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and purpose of one tensor that a scheme keeps."""

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
    """What calibration has seen at one linear layer; a scheme looks at what it `needs`."""

    inputs: Tensor | None = None
    """A sample of the layer's inputs, `[rows, in]`, fp32."""
    mean_abs: Tensor | None = None
    """The mean of |x| per input channel over all calibration tokens, `[in]`, fp32."""
    squared_gradients: Tensor | None = None
    """The diagonal of the empirical Fisher information, `[out, in]`, fp32."""


@dataclass(frozen=True)
class Scheme(ABC):
    """One way of keeping a weight matrix in fewer bits. Its fields are its options; they go into `config.json`."""

    bits: int
    """Bits of one weight, before scales and whatever else comes with it."""

    method: ClassVar[str]
    """Its name: `quantization=` of `LLM`, `quant_method` in `config.json`."""
    allowed_bits: ClassVar[tuple[int, ...]]
    needs: ClassVar[str] = ""
    """The calibration it cannot do without: `inputs`, `gradients`, or empty.

    A scheme that needs none quantises each row of a matrix for itself, so it can be applied while a model loads.
    """

    def __post_init__(self) -> None:
        if self.bits not in self.allowed_bits or isinstance(self.bits, bool):
            able = " or ".join(map(str, self.allowed_bits))
            raise ConfigError(f"bits={self.bits!r}: scheme {self.method!r} keeps weights in {able} bits")

    @abstractmethod
    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """The tensors that stand for an `[out_features, in_features]` matrix, by name."""

    @abstractmethod
    def _quantize(self, weight: Tensor, statistics: LayerStatistics) -> dict[str, Tensor]:
        """As `quantize`; `weight` is finite fp32, and the statistics that the scheme needs are there."""

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """The matrix that the tensors stand for: `[out, in]`, fp32."""

    def quantize(self, weight: Tensor, statistics: LayerStatistics | None = None) -> dict[str, Tensor]:
        """The tensors that stand for `weight` (`[out, in]`, any float dtype), as `tensors` describes them.

        Raises `CheckpointError` for weights that are no numbers, `ConfigError` if the statistics needed are absent.
        """
        weight = weight.detach().float()
        if not torch.isfinite(weight).all():
            raise CheckpointError("a weight is NaN or infinite, which no scale can hold; fetch the checkpoint again")
        found = statistics or LayerStatistics()
        seen = {"inputs": found.inputs, "gradients": found.squared_gradients}
        if self.needs and seen[self.needs] is None:
            raise ConfigError(
                f"scheme {self.method!r} needs calibration ({self.needs}); collect it with "
                "minillm.quantization.calibration.calibrate"
            )
        return self._quantize(weight, found)

    def apply(self, layer: QuantizedLinear, x: Tensor) -> Tensor:
        """x Wᵀ + b: `x`: `[rows, in]` → `[rows, out]`. Here the plain way: make W again, then multiply."""
        return linear(x, layer.dequantize().to(x.dtype), layer.bias)

    def check(self, tensors: Mapping[str, Tensor], in_features: int) -> None:
        """Raise `CheckpointError` for tensors that no `quantize` can have made. Shapes and dtypes are known to fit."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise CheckpointError(f"{name} holds NaN or infinity; quantise the original checkpoint again")


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is kept as the tensors of a scheme. They are buffers, and no dtype changes them."""

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
        """What stands for the weight, by name."""
        return {name: self.get_buffer(name) for name in self.specs}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor], first_row: int = 0) -> None:
        """Copy `tensors` into the layer, from `first_row` on if they stand for some of its rows only."""
        for name, tensor in tensors.items():
            self.get_buffer(name).narrow(0, first_row, tensor.shape[0]).copy_(tensor)

    def dequantize(self) -> Tensor:
        """The weight as it counts: `[out, in]`, fp32."""
        return self.scheme.dequantize(self.tensors, self.in_features)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that nn.Linear gives it)
        """`[rows, in]` → `[rows, out]`."""
        return self.scheme.apply(self, input)

    @property
    def num_bytes(self) -> int:
        """Bytes that stand for the weight: packed weights, scales and all that comes with them. The bias is apart."""
        return sum(self.bytes_by_part().values())

    def bytes_by_part(self) -> dict[str, int]:
        """`num_bytes` by purpose, in the order of `PARTS`, parts without bytes left out."""
        count = dict.fromkeys(PARTS, 0)
        for name, tensor in self.tensors.items():
            count[self.specs[name].part] += tensor.nbytes
        return {part: num_bytes for part, num_bytes in count.items() if num_bytes}

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"{self.scheme.method}, in_features={self.in_features}, out_features={self.out_features}"
