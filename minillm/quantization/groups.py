"""Rounding in groups: every `group_size` weights of a row share one scale and one zero point.

A group spans [min, max], widened to contain 0, in 2^bits - 1 steps: s = (max - min) / (2^bits - 1),
z = round(-min / s), q = round(w / s) + z, and w ≈ (q - z)·s, with |error| ≤ s / 2. Zero stays exactly zero. The last
group of a row may be shorter. Scales are fp16, as in the checkpoints of the field: with a 4-bit zero point 20 bits per
group, which is 0.16 bits per weight in groups of 128 and 0.31 in groups of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.errors import CheckpointError

SMALLEST_SCALE = 2.0**-14
"""The smallest normal fp16. A group whose steps would be finer, zeros among them, gets steps of this size."""


class Groups(NamedTuple):
    """A matrix rounded in groups."""

    codes: Tensor
    """`[rows, columns]` uint8, 0 … 2^bits - 1."""
    scales: Tensor
    """`[rows, num_groups]` fp16."""
    zeros: Tensor
    """`[rows, num_groups]` uint8: the code that stands for 0."""


def quantize_groups(weight: Tensor, bits: int, group_size: int, shrink: Tensor | float = 1.0) -> Groups:
    """Round `weight` (`[rows, columns]`, fp32, finite) to the nearest of 2^`bits` levels in each group.

    `shrink` (a number, or `[rows, num_groups]`) narrows the range of each group: smaller steps for most, and what lies
    outside is cut off, so the bound on the error holds only at 1. Raises `CheckpointError` for weights so large that
    fp16 has no scale for them.
    """
    columns, steps = weight.shape[1], 2**bits - 1
    grouped = in_groups(weight, group_size)
    low, high = grouped.amin(dim=2).clamp_max(0) * shrink, grouped.amax(dim=2).clamp_min(0) * shrink
    scales = half_not_below((high - low) / steps)
    step = scales.float()
    zeros = (-low / step).round().clamp(0, steps)
    codes = ((grouped / step[..., None]).round() + zeros[..., None]).clamp(0, steps)
    return Groups(codes.to(torch.uint8).flatten(1)[:, :columns], scales, zeros.to(torch.uint8))


def dequantize_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """(q - z)·s: the matrix, `[rows, columns]` fp32, that `Groups` of these tensors stand for."""
    signed = in_groups(codes, group_size).to(torch.int8) - zeros.to(torch.int8)[..., None]
    return (signed * scales.float()[..., None]).flatten(1)[:, : codes.shape[1]]


def in_groups(x: Tensor, group_size: int) -> Tensor:
    """`[rows, columns]` → `[rows, num_groups, group_size]`, the last group filled up with zeros."""
    return F.pad(x, (0, -x.shape[1] % group_size)).unflatten(1, (-1, group_size))


def half_not_below(scales: Tensor) -> Tensor:
    """`scales` in fp16, never rounded down: a smaller step would leave the ends of the range out of reach.

    Raises `CheckpointError` if one is over the largest fp16.
    """
    # Rounding to fp16 takes away at most 2^-11 of the value, so 2^-10 more before it keeps the result at or above.
    half = (scales * (1 + 2.0**-10)).clamp_min(SMALLEST_SCALE).half()
    if not torch.isfinite(half).all():
        raise CheckpointError(f"weights of a range of {scales.max():.3g} steps are over what an fp16 scale can hold")
    return half
