"""Group-wise INT4 weights, each rounded to the nearest of 16 levels (round to nearest, RTN), without calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization.base import SCALES, WEIGHTS, ZERO_POINTS, LayerStatistics, Scheme, TensorSpec
from minillm.quantization.groups import dequantize_groups, quantize_groups
from minillm.quantization.packing import pack, packed_width, unpack

GROUP_MULTIPLE = 8
"""A group size must be a multiple of this, so that each group starts on a byte boundary at every number of bits."""

MAX_GROUP_SIZE = 2**17
"""The largest group size: more than any layer has inputs. A row is padded to whole groups before rounding, so a larger
one would only cost memory."""


@dataclass(frozen=True)
class Int4(Scheme):
    """Weights of 4 bits, two per byte, with a scale and a zero point per `group_size` weights of a row."""

    method: ClassVar[str] = "int4"
    allowed_bits: ClassVar[tuple[int, ...]] = (4,)
    bits: int = 4
    group_size: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.group_size
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if not is_whole or not 0 < size <= MAX_GROUP_SIZE or size % GROUP_MULTIPLE:
            raise ConfigError(
                f"group_size={size!r} must be a multiple of {GROUP_MULTIPLE}, such as 64 or 128, up to {MAX_GROUP_SIZE}"
            )

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """`qweight`: `[out, bytes]`, `scales`: `[out, groups]` fp16, `qzeros`: `[out, bytes]`; bytes as in `pack`."""
        groups = -(-in_features // self.group_size)
        weight_bytes, zero_bytes = packed_width(in_features, self.bits), packed_width(groups, self.bits)
        return {
            "qweight": TensorSpec((out_features, weight_bytes), torch.uint8, WEIGHTS),
            "scales": TensorSpec((out_features, groups), torch.float16, SCALES),
            "qzeros": TensorSpec((out_features, zero_bytes), torch.uint8, ZERO_POINTS),
        }

    def _quantize(self, weight: Tensor, statistics: LayerStatistics) -> dict[str, Tensor]:
        return self.round_to_nearest(weight)

    def round_to_nearest(self, weight: Tensor, shrink: Tensor | float = 1.0) -> dict[str, Tensor]:
        """Quantise `weight` (`[out, in]`, fp32) in groups (see `quantize_groups`) and pack it."""
        codes, scales, zeros = quantize_groups(weight, self.bits, self.group_size, shrink)
        return {"qweight": pack(codes, self.bits), "scales": scales, "qzeros": pack(zeros, self.bits)}

    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """Return (q - z)·s: `[out, in]`, fp32."""
        scales = tensors["scales"]
        codes = unpack(tensors["qweight"], self.bits, in_features)
        zeros = unpack(tensors["qzeros"], self.bits, scales.shape[1])
        return dequantize_groups(codes, scales, zeros, self.group_size)
