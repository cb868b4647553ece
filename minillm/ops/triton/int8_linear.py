"""The linear layer over INT8 weights and float activations: y = (x Qᵀ) · s + b, with one scale s per output.

A code is an integer of at most 127, exact in fp16 and bfloat16. So the product runs on the codes, and the scale is
applied to the sum: once per output instead of once per weight. Sums are fp32.

One row, the step of plain decoding at batch 1, has a kernel without tensor cores. These work on 16 rows, so 15 would be
padding. Without them a program needs only a few outputs; there are enough programs to keep every SM busy without splits
and without a second kernel. It adds in another order, so its last bits differ from those of the same row in a batch.
Which kernel runs depends only on the number of rows, and so is fixed for each shape of a CUDA graph.

Bytes moved: in · out for the weights, once per tile of rows; the activations once per tile of outputs. Half of fp16's.
Wins: few rows (decode, verification, small batches), which are bound by reading the weights, up to twice as fast as
fp16; on an H100 the four products of an 8B layer take 84 µs with one row, 93 µs with tensor cores. Loses: many rows,
which are bound by arithmetic, to which casting the codes is added; fp32 activations, whose products do not run on
tensor cores; small matrices (a few hundred on a side), where the launch dominates.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import contiguous_last_dims, dot_type
from minillm.ops.triton.split_sum import split_sum
from minillm.ops.triton.tiles import Tiles, choose


@triton.jit(do_not_specialize=["rows"])
def _int8_linear(
    x_ptr,  # [rows, columns]
    weight_ptr,  # [outputs, columns] int8
    scale_ptr,  # [outputs] fp32
    bias_ptr,  # [outputs], if BIAS
    out_ptr,  # [rows, outputs]; with SPLITS > 1: [SPLITS, rows, outputs] fp32, before scale and bias
    rows: int,
    outputs: int,
    columns: int,
    x_stride: int,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    m = tl.program_id(0) * M + tl.arange(0, M)  # tiles of the same weights run side by side, so they are read once
    n = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_stride
    w_row = weight_ptr + n.to(tl.int64)[:, None] * columns
    total = tl.full((M, N), 0.0, tl.float32)
    for first in range(split * K, columns, SPLITS * K):
        k = first + tl.arange(0, K)[None, :]
        x = tl.load(x_row + k, mask=(m < rows)[:, None] & (k < columns), other=0.0)
        w = tl.load(w_row + k, mask=(n < outputs)[:, None] & (k < columns), other=0)
        total = tl.dot(x.to(DOT), tl.trans(w.to(DOT)), acc=total, input_precision="ieee")
    at = (split.to(tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    if SPLITS == 1:
        total *= tl.load(scale_ptr + n, mask=n < outputs, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _int8_linear_row(
    x_ptr,  # [columns]
    weight_ptr,  # [outputs, columns] int8
    scale_ptr,  # [outputs] fp32
    bias_ptr,  # [outputs], if BIAS
    out_ptr,  # [outputs]
    outputs: int,
    columns: int,
    BIAS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    n = tl.program_id(0) * N + tl.arange(0, N)
    w_row = weight_ptr + n.to(tl.int64)[:, None] * columns
    total = tl.full((N, K), 0.0, tl.float32)
    for first in tl.range(0, columns, K, num_stages=STAGES):  # without a dot, loads run ahead only if stages are given
        k = first + tl.arange(0, K)[None, :]
        x = tl.load(x_ptr + k, mask=k < columns, other=0.0)
        w = tl.load(w_row + k, mask=(n < outputs)[:, None] & (k < columns), other=0)
        total += w.to(tl.float32) * x.to(tl.float32)
    y = tl.sum(total, 1) * tl.load(scale_ptr + n, mask=n < outputs, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < outputs)


def int8_linear(
    x: Tensor, qweight: Tensor, scales: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """As `minillm.ops.quantized_linear.int8_linear`. With one row, `m` and `splits` of the tiles are ignored."""
    x, (rows, columns), outputs = contiguous_last_dims(x), x.shape, qweight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = tiles or choose("int8", rows, outputs, columns, x.dtype)
    if rows == 1:
        _int8_linear_row[(-(-outputs // tiles.n),)](
            *(x, qweight, scales, scales if bias is None else bias, out, outputs, columns),
            BIAS=bias is not None,
            N=tiles.n,
            K=tiles.k,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
        )
        return out
    splits = tiles.splits
    part = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _int8_linear[(-(-rows // tiles.m), -(-outputs // tiles.n), splits)](
        *(x, qweight, scales, scales if bias is None else bias, part, rows, outputs, columns, x.stride(0)),
        BIAS=bias is not None,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        SPLITS=splits,
        DOT=dot_type(x.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        split_sum(part, out, None, scales, bias)
    return out
