"""The second kernel of a split-K product: add the parts, scale, add the bias, round.

    y[m, n] = (Σ_s part[s, m, n]) · x_scale[m] · w_scale[n] + bias[n]

A second kernel is used instead of atomic additions, so that the order of the sum, and so every bit of it, is the same
in each run. Bytes moved: 4 · splits · rows · outputs, written by the product and read here. That is little compared
with the weights if there are few rows; products of many rows are not split.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import power_of_two

BLOCK = 256


@triton.jit(do_not_specialize=["rows"])
def _split_sum(
    part_ptr,  # [SPLITS, rows, outputs], fp32 or int32
    x_scale_ptr,  # [rows] fp32, if X_SCALE
    w_scale_ptr,  # [outputs] fp32, if W_SCALE
    bias_ptr,  # [outputs], if BIAS
    out_ptr,  # [rows, outputs]
    rows: int,
    outputs: int,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    at = row * outputs + column
    total = tl.load(part_ptr + at, mask=inside, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + at + split * rows.to(tl.int64) * outputs, mask=inside, other=0)
    y = total.to(tl.float32)
    if X_SCALE:
        y *= tl.load(x_scale_ptr + row)
    if W_SCALE:
        y *= tl.load(w_scale_ptr + column, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def split_sum(part: Tensor, out: Tensor, x_scale: Tensor | None, w_scale: Tensor | None, bias: Tensor | None) -> None:
    """Sum `part` (`[splits, rows, outputs]`) over its splits into `out` (`[rows, outputs]`)."""
    splits, rows, outputs = part.shape
    block = min(BLOCK, power_of_two(outputs))
    scales = (out if x is None else x for x in (x_scale, w_scale, bias))
    _split_sum[(rows, -(-outputs // block))](
        *(part, *scales, out, rows, outputs),
        X_SCALE=x_scale is not None,
        W_SCALE=w_scale is not None,
        BIAS=bias is not None,
        SPLITS=splits,
        BLOCK=block,
        num_warps=2,
    )
