"""INT8 weights with one scale per output channel; activations stay as they are.

s = max|row| / 127, q = round(w / s), so no weight is off by more than s / 2. The scale is kept in fp32: 4 bytes per row
are 1% of a row of 384, and of nothing wider. (The compiled step of a CPU with VNNI multiplies bytes: it rounds
activations to two of them, which changes logits by some 10^-5; see `ops/cpu/panels.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.quantization.base import SCALES, WEIGHTS, LayerStatistics, Scheme, TensorSpec

LARGEST = 127
"""-128 is left out, so that a weight and its negative are kept alike."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `x` (`[rows, columns]`, fp32) to INT8: codes `[rows, columns]` and scales `[rows]`, fp32.

    |codes · scales - x| ≤ scales / 2. The smallest normal number stands in for the scale of a row of zeros.
    """
    scales = (x.abs().amax(dim=1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (x / scales[:, None]).round().clamp(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales


@dataclass(frozen=True)
class Int8(Scheme):
    """Weights of 8 bits, products in the dtype of the activations."""

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
        """q · s: `[out, in]`, fp32."""
        return tensors["qweight"] * tensors["scales"][:, None]
