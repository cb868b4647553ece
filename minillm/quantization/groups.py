"""Group-wise quantisation: every `group_size` weights of a row share one scale and one zero point.

A group covers the range [min, max], extended to contain 0, in 2^bits - 1 steps: s = (max - min) / (2^bits - 1),
z = round(-min / s), q = round(w / s) + z, and w ≈ (q - z)·s, with |error| ≤ s / 2. Zero stays exactly zero. The last
group of a row may be shorter. Scales are fp16, as is usual in quantised checkpoints. With a 4-bit zero point a group
needs 20 extra bits, which is 0.16 bits per weight in groups of 128 and 0.31 in groups of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.errors import CheckpointError

SMALLEST_SCALE = 2.0**-14
"""The smallest normal fp16, and the minimum scale of a group (that of a group of zeros, for example)."""


class Groups(NamedTuple):
    """A matrix quantised in groups."""

    codes: Tensor
    """`[rows, columns]` uint8, 0 … 2^bits - 1."""
    scales: Tensor
    """`[rows, num_groups]` fp16."""
    zeros: Tensor
    """`[rows, num_groups]` uint8, the zero points: the code of 0."""


def quantize_groups(weight: Tensor, bits: int, group_size: int, shrink: Tensor | float = 1.0) -> Groups:
    """Round `weight` (`[rows, columns]`, fp32, finite) to the nearest of 2^`bits` levels in each group.

    `shrink` (a number, or `[rows, num_groups]`) scales the range of each group: below 1 the steps are smaller, and
    weights outside the range are clipped, so the error bound holds only at 1. Raises `CheckpointError` if a scale would
    exceed fp16.
    """
    columns, steps = weight.shape[1], 2**bits - 1
    grouped = in_groups(weight, group_size)
    low, high = grouped.amin(dim=2).clamp_max(0) * shrink, grouped.amax(dim=2).clamp_min(0) * shrink
    scales = fp16_round_up((high - low) / steps)
    step = scales.float()
    zeros = (-low / step).round().clamp(0, steps)
    codes = ((grouped / step[..., None]).round() + zeros[..., None]).clamp(0, steps)
    return Groups(codes.to(torch.uint8).flatten(1)[:, :columns], scales, zeros.to(torch.uint8))


def dequantize_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Return (q - z)·s, the matrix that the tensors of `Groups` represent: `[rows, columns]` fp32."""
    signed = in_groups(codes, group_size).to(torch.int8) - zeros.to(torch.int8)[..., None]
    return (signed * scales.float()[..., None]).flatten(1)[:, : codes.shape[1]]


def in_groups(x: Tensor, group_size: int) -> Tensor:
    """`[rows, columns]` → `[rows, num_groups, group_size]`, with zeros as padding in the last group. A group that is
    wider than the matrix is as wide as the matrix."""
    group_size = min(group_size, x.shape[1])
    return F.pad(x, (0, -x.shape[1] % group_size)).unflatten(1, (-1, group_size))


def fp16_round_up(scales: Tensor) -> Tensor:
    """Cast `scales` to fp16, never below their values: smaller steps would not reach the ends of the range.

    Raises `CheckpointError` if a scale exceeds the largest fp16.
    """
    # Rounding to fp16 changes a value by at most 2^-11 of it, so adding 2^-10 first keeps the result at or above it.
    half = (scales * (1 + 2.0**-10)).clamp_min(SMALLEST_SCALE).half()
    if not torch.isfinite(half).all():
        raise CheckpointError(f"the weights need a scale of {scales.max():.3g}, which exceeds the largest fp16 scale")
    return half
