"""The reference kernels of lesson 08. Importing this imports Triton.

So it is imported only when a kernel is first launched (`drives/lazy_kernel.py`): Triton decides on import whether it
compiles or interprets.
"""

# ruff: noqa: ANN001, ANN202, N803  (Triton evaluates annotations, so pointers have none; constants are in capitals)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    """Copy x to out. Program (row, b): columns b · BLOCK … of one row."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x, mask=inside)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Softmax of each row. Program i: row i, in one block."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    """RMSNorm of each row. Program i: row i, in one block, sums in float32."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)


@triton.jit
def dequantise_kernel(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out = code · scale. Program i: a tile of ROWS rows, each with its own scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)
