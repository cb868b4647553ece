"""INT8 weights with one scale per output channel; activations are not quantised.

s = max|row| / 127, q = round(w / s), so the error of a weight is at most s / 2. The scale is fp32: its 4 bytes are 1%
of a row of 384 weights, and less of a wider one. (On a CPU with VNNI the compiled step multiplies bytes: it rounds each
activation to two bytes, which changes logits by some 10^-5; see `ops/cpu/panels.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.quantization.base import SCALES, WEIGHTS, LayerStatistics, Scheme, TensorSpec

MAX_CODE = 127
"""The largest code. -128 is unused, so that the codes are symmetric."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of `x` (`[rows, columns]`, fp32) to INT8: codes `[rows, columns]` and scales `[rows]`, fp32.

    |codes · scales - x| ≤ scales / 2. A row of zeros gets the smallest normal number as its scale.
    """
    scales = (x.abs().amax(dim=1) / MAX_CODE).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (x / scales[:, None]).round().clamp(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scales


@dataclass(frozen=True)
class Int8(Scheme):
    """Weights of 8 bits; products are in the dtype of the activations."""

    method: ClassVar[str] = "int8"
    allowed_bits: ClassVar[tuple[int, ...]] = (8,)
    bits: int = 8

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """`qweight`: `[out, in]` int8; `scales`: `[out]` fp32."""
        return {
            "qweight": TensorSpec((out_features, in_features), torch.int8, WEIGHTS),
            "scales": TensorSpec((out_features,), torch.float32, SCALES),
        }

    def _quantize(self, weight: Tensor, statistics: LayerStatistics) -> dict[str, Tensor]:
        codes, scales = quantize_rows(weight)
        return {"qweight": codes, "scales": scales}

    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """Return q · s: `[out, in]`, fp32."""
        return tensors["qweight"] * tensors["scales"][:, None]
