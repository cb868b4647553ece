"""The W8A8 linear layer: activations quantised to INT8 per token, INT8 weights, sums in int32.

    s_x = max|x| / 127      q_x = round(x / s_x)      y = (q_x Qᵀ) · s_x · s_w + b

Two kernels. One quantises a token per program. The other multiplies; its integer sum is exact in any order, so tiles
and splits do not change the result by a bit. Divisions are `div_rn`, and rounding adds and subtracts 1.5 · 2^23, as in
`store_kv`.

Bytes moved: in · out for the weights; rows · in three times for the activations (read, written as bytes, read). Wins:
many rows, on tensor cores that multiply INT8 twice as fast as fp16 (in Triton's code, from sm_80 on); fp32 models,
which use no tensor cores otherwise. Loses: few rows, where it reads as many bytes of weights as `int8_linear` and needs
one launch more; activations with outlier channels, in quality (see `quantization/w8a8.py`).
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import contiguous_last_dims, power_of_two
from minillm.ops.triton.split_sum import split_sum
from minillm.ops.triton.tiles import Tiles, choose

ROUNDING_MAGIC = tl.constexpr(1.5 * 2.0**23)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
INT8_DEPTH = 32
"""Least columns of an INT8 `tl.dot`."""


@triton.jit
def _quantize_tokens(
    x_ptr,  # [rows, columns]
    code_ptr,  # [rows, columns] int8
    scale_ptr,  # [rows] fp32
    columns: int,
    x_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), 127.0), TINY)
    # tl.max ignores NaN, but a row with NaN must not become finite.
    scale = tl.where(tl.max((x != x).to(tl.int32), 0) != 0, float("nan"), scale)
    code = (tl.div_rn(x, scale) + ROUNDING_MAGIC) - ROUNDING_MAGIC
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    tl.store(code_ptr + row * columns + column, code.to(tl.int8), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _w8a8_linear(
    x_ptr,  # [rows, columns] int8
    weight_ptr,  # [outputs, columns] int8
    x_scale_ptr,  # [rows] fp32
    w_scale_ptr,  # [outputs] fp32
    bias_ptr,  # [outputs], if BIAS
    out_ptr,  # [rows, outputs]; with SPLITS > 1: [SPLITS, rows, outputs] int32
    rows: int,
    outputs: int,
    columns: int,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    m = tl.program_id(0) * M + tl.arange(0, M)  # tiles of the same weights run side by side, so they are read once
    n = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    x_row = x_ptr + m.to(tl.int64)[:, None] * columns
    w_row = weight_ptr + n.to(tl.int64)[:, None] * columns
    total = tl.full((M, N), 0, tl.int32)
    for first in range(split * K, columns, SPLITS * K):
        k = first + tl.arange(0, K)[None, :]
        x = tl.load(x_row + k, mask=(m < rows)[:, None] & (k < columns), other=0)
        w = tl.load(w_row + k, mask=(n < outputs)[:, None] & (k < columns), other=0)
        total = tl.dot(x, tl.trans(w), acc=total, out_dtype=tl.int32)
    at = (split.to(tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    if SPLITS == 1:
        y = total.to(tl.float32) * tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)[:, None]
        y *= tl.load(w_scale_ptr + n, mask=n < outputs, other=0.0)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + at, total, mask=inside)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `minillm.ops.quantized_linear.quantize_rows`."""
    x, (rows, columns) = contiguous_last_dims(x), x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = power_of_two(columns)
        warps = min(16, max(1, block // 256))
        _quantize_tokens[(rows,)](x, codes, scales, columns, x.stride(0), BLOCK=block, num_warps=warps)
    return codes, scales


def w8a8_linear(
    x: Tensor, qweight: Tensor, scales: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """As `minillm.ops.quantized_linear.w8a8_linear`."""
    (rows, columns), outputs = x.shape, qweight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    codes, x_scales = quantize_tokens(x)
    tiles = tiles or choose("w8a8", rows, outputs, columns, x.dtype)
    splits = tiles.splits
    part = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.int32, device=x.device)
    _w8a8_linear[(-(-rows // tiles.m), -(-outputs // tiles.n), splits)](
        *(codes, qweight, x_scales, scales, scales if bias is None else bias, part, rows, outputs, columns),
        BIAS=bias is not None,
        M=tiles.m,
        N=tiles.n,
        K=max(tiles.k, INT8_DEPTH),
        SPLITS=splits,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        split_sum(part, out, x_scales, scales, bias)
    return out
