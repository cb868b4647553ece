"""INT8 weights with one scale per output channel.

s = max|row| / 127, q = round(w / s), so the error of a weight is at most s / 2. The scale is fp32: its 4 bytes are 1%
of a row of 384 weights, and less of a wider one. Activations stay floats, except in the compiled step on a CPU that
multiplies bytes or pairs of 16-bit numbers (`docs/processors.md`): it rounds each activation to 16 bits, which changes
logits by some 10^-5 (`ops/cpu/panels.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.ops.quantized_linear import quantize_rows
from minillm.quantization.base import SCALES, WEIGHTS, LayerStatistics, Scheme, TensorSpec


@dataclass(frozen=True)
class Int8(Scheme):
    """Weights of 8 bits; in PyTorch products are in the dtype of the activations."""

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
