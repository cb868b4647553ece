"""The linear layer over INT4 weights in groups: w = (q - z) · s, two codes per byte, the even column in the low bits.

If the columns of a tile lie in one group, the product runs on the integers q - z, which fp16 and bfloat16 hold exactly.
The scale is then applied to the tile's sum: one multiplication per output and tile. The tile's depth (its columns) is
reduced until it fits into a group. For groups such as 8 or 24, into which no tile fits, each weight is dequantised
before the product. Sums are fp32.

Bytes moved: in · out / 2 for the codes, and 2.5 bytes per group and output for scale and zero point; a quarter of
fp16's, and 4% more with groups of 128. Wins: few rows, bound by reading the weights. Loses: many rows, which
are bound by arithmetic, to which unpacking is added; groups below 64, whose tiles are shallow.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import MIN_TILE_SIDE, contiguous_last_dims, dot_type
from minillm.ops.triton.split_sum import split_sum
from minillm.ops.triton.tiles import Tiles, choose


@triton.jit(do_not_specialize=["rows"])
def _int4_linear(
    x_ptr,  # [rows, columns]
    weight_ptr,  # [outputs, ⌈columns / 2⌉] uint8
    scale_ptr,  # [outputs, groups] fp16
    zero_ptr,  # [outputs, ⌈groups / 2⌉] uint8
    bias_ptr,  # [outputs], if BIAS
    out_ptr,  # [rows, outputs]; with SPLITS > 1: [SPLITS, rows, outputs] fp32, before the bias
    rows: int,
    outputs: int,
    columns: int,
    groups: int,
    x_stride: int,
    w_stride: int,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether the columns of every tile lie in one group
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    split = tl.program_id(2)
    in_n = n < outputs
    n_64 = n.to(tl.int64)
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_stride
    w_row = weight_ptr + n_64[:, None] * w_stride
    total = tl.full((M, N), 0.0, tl.float32)
    for first in range(split * K, columns, SPLITS * K):
        k = first + tl.arange(0, K)
        byte = first // 2 + tl.arange(0, K // 2)[None, :]
        x = tl.load(x_row + k[None, :], mask=(m < rows)[:, None] & (k < columns)[None, :], other=0.0)
        both = tl.load(w_row + byte, mask=in_n[:, None] & (2 * byte < columns), other=0)
        codes = tl.interleave(both & 15, both >> 4).to(tl.int8)
        if ALIGNED:
            group = first // GROUP
            zero = tl.load(zero_ptr + n_64 * ((groups + 1) // 2) + group // 2, mask=in_n, other=0)
            zero = ((zero.to(tl.int32) >> (4 * (group % 2))) & 15).to(tl.int8)
            scale = tl.load(scale_ptr + n_64 * groups + group, mask=in_n, other=0.0).to(tl.float32)
            w = (codes - zero[:, None]).to(DOT)
            total += tl.dot(x.to(DOT), tl.trans(w), input_precision="ieee") * scale[None, :]
        else:
            group = k // GROUP
            known = in_n[:, None] & (k < columns)[None, :]
            zero_at = n_64[:, None] * ((groups + 1) // 2) + (group // 2)[None, :]
            zero = tl.load(zero_ptr + zero_at, mask=known, other=0).to(tl.int32)
            zero = ((zero >> (4 * (group % 2))[None, :]) & 15).to(tl.int8)
            scale = tl.load(scale_ptr + n_64[:, None] * groups + group[None, :], mask=known, other=0.0)
            w = ((codes - zero).to(tl.float32) * scale.to(tl.float32)).to(DOT)
            total = tl.dot(x.to(DOT), tl.trans(w), acc=total, input_precision="ieee")
    at = (split.to(tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    if SPLITS == 1 and BIAS:
        total += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & in_n[None, :])


def int4_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor,
    group_size: int,
    bias: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As `minillm.ops.quantized_linear.int4_linear`."""
    x, (rows, columns), (outputs, groups) = contiguous_last_dims(x), x.shape, scales.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = tiles or choose("int4", rows, outputs, columns, x.dtype)
    splits = tiles.splits
    # Most columns per tile that always lie in one group: a power of two that divides the group size.
    aligned = min(tiles.k, group_size & -group_size)
    depth = aligned if aligned >= MIN_TILE_SIDE else tiles.k
    part = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _int4_linear[(-(-outputs // tiles.n), -(-rows // tiles.m), splits)](
        *(x, qweight, scales, qzeros, scales if bias is None else bias, part),
        *(rows, outputs, columns, groups, x.stride(0), qweight.stride(0)),
        GROUP=group_size,
        ALIGNED=depth == aligned,
        BIAS=bias is not None,
        M=tiles.m,
        N=tiles.n,
        K=depth,
        SPLITS=splits,
        DOT=dot_type(x.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        split_sum(part, out, None, None, bias)
    return out
