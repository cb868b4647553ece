"""The kernels of lesson 08: four reference kernels, and one kernel per planted mistake. Importing this imports Triton.

So it is imported only when a kernel is first launched (`drives/lazy_kernel.py`): Triton decides on import whether it
compiles or interprets. A wrong kernel differs from its reference in one place, and its name says where.
"""

# ruff: noqa: ANN001, ANN202, N803  (Triton evaluates annotations, so pointers have none; constants are in capitals)
from __future__ import annotations

import triton
import triton.language as tl

# --------------------------------------------------------------------------------------------------------------- copy


@triton.jit
def copy_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    """Copy x to out. Program (row, b): columns b · BLOCK … of one row."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x, mask=inside)


@triton.jit
def copy_without_mask(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column)
    tl.store(out_ptr + row * out_stride + column, x)


@triton.jit
def copy_loads_without_mask(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column)
    tl.store(out_ptr + row * out_stride + column, x, mask=column < columns)


@triton.jit
def copy_one_too_many(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column <= columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x, mask=inside)


@triton.jit
def copy_loads_one_too_many(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column <= columns)
    tl.store(out_ptr + row * out_stride + column, x, mask=column < columns)


@triton.jit
def copy_swapped_strides(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * out_stride + column, mask=inside)
    tl.store(out_ptr + row * x_stride + column, x, mask=inside)


@triton.jit
def copy_whole_blocks(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns // BLOCK * BLOCK
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x, mask=inside)


@triton.jit
def copy_first_block(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x, mask=inside)


@triton.jit
def copy_columns_for_stride(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside)
    tl.store(out_ptr + row * columns + column, x, mask=inside)


@triton.jit
def copy_one_stride(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * x_stride + column, x, mask=inside)


@triton.jit
def copy_swapped_ids(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x, mask=inside)


# ------------------------------------------------------------------------------------------------------------ softmax


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
def softmax_without_max(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    e = tl.exp(tl.load(x_ptr + row * columns + column, mask=inside, other=-float("inf")))
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def softmax_counts_padding(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def softmax_max_of_padding(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
    e = tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def softmax_without_mask(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + column)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0))


@triton.jit
def softmax_stores_without_mask(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0))


@triton.jit
def softmax_first_row(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + column, mask=inside, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + tl.program_id(0) * columns + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def softmax_rows_of_block(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * BLOCK + column, mask=inside, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * BLOCK + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def softmax_base_two(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=-float("inf"))
    e = tl.exp2(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)


@triton.jit
def softmax_undivided(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=-float("inf"))
    tl.store(out_ptr + row * columns + column, tl.exp(x - tl.max(x, 0)), mask=inside)


# ----------------------------------------------------------------------------------------------------------- RMSNorm


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
def rms_mean_of_block(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / BLOCK
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)


@triton.jit
def rms_without_eps(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean) * weight, mask=inside)


@triton.jit
def rms_eps_outside(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / (tl.sqrt(mean) + eps) * weight, mask=inside)


@triton.jit
def rms_sum_for_mean(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(tl.sum(x * x, 0) + eps) * weight, mask=inside)


@triton.jit
def rms_without_root(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / (mean + eps) * weight, mask=inside)


@triton.jit
def rms_without_weight(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps), mask=inside)


@triton.jit
def rms_weight_per_row(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)


@triton.jit
def rms_squares_in_half(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    mean = tl.sum((x * x).to(tl.float32), 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)


@triton.jit
def rms_without_mask(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + column).to(tl.float32)
    weight = tl.load(weight_ptr + column).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=column < columns)


@triton.jit
def rms_takes_mean_off(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 0) / columns, 0.0)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)


# --------------------------------------------------------------------------------------------------------- dequantise


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


@triton.jit
def dequantise_per_tensor(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    tl.store(out_ptr + place, codes.to(tl.float32) * tl.load(scale_ptr).to(tl.float32), mask=inside)


@triton.jit
def dequantise_per_tile(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + tl.program_id(0) * ROWS)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32), mask=inside)


@triton.jit
def dequantise_scale_of_program(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + tl.program_id(0))
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32), mask=inside)


@triton.jit
def dequantise_divides(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=1.0)
    tl.store(out_ptr + place, codes.to(tl.float32) / scale.to(tl.float32)[:, None], mask=inside)


@triton.jit
def dequantise_scale_per_column(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + column, mask=column < rows, other=0.0)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[None, :], mask=inside)


@triton.jit
def dequantise_in_int8(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    tl.store(out_ptr + place, (codes * scale.to(tl.int8)[:, None]).to(tl.float32), mask=inside)


@triton.jit
def dequantise_unsigned(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0).to(tl.int32) & 255
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)


@triton.jit
def dequantise_without_row_mask(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row >= 0)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row, mask=row >= 0, other=0.0)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)


@triton.jit
def dequantise_without_column_mask(
    codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column >= 0)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)


@triton.jit
def dequantise_first_tile(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)


@triton.jit
def dequantise_loads_without_mask(
    codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)
