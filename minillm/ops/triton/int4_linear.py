"""The linear layer over INT4 weights in groups: w = (q - z) · s, two codes per byte, the even column in the low bits.

The codes of a byte belong to neighbouring columns. They are not interleaved: the even columns of x are multiplied by
the low halves of the bytes, the odd ones by the high halves, and the two products are added. If the columns of a tile
lie in one group, zero point and scale are applied to the tile's sum, once per output and not once per weight:

    Σ x (q - z) s = (Σ x q - z Σ x) s

Tensor cores take the codes as 16-bit numbers. Instead of a conversion, the four bits of a code are written into the
upper bits of the mantissa of 16, which makes 16 + q, exactly. The 16 is added to the zero point. For groups such as 8
or 24, into which no tile fits, each weight is dequantised before the product. Sums are fp32.

The weights are the first operand: on Hopper its tensor cores read that from registers, so unpacked codes are never
written to shared memory.

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
from minillm.ops.triton.tiles import FEW_ROWS, Tiles, choose

OFFSET = tl.constexpr(16.0)
"""What `_operand` adds to a code in 16 bits."""


@triton.jit
def _operand(code, DOT: tl.constexpr):  # noqa: ANN202
    """Return a code of 0 to 15 in `DOT`: in 16 bits as 16 + code (the code's bits below those of 16), in fp32 as is."""
    if DOT == tl.bfloat16:  # noqa: SIM300  (DOT is a parameter)
        return ((code.to(tl.uint16) << 3) | 0x4180).to(tl.bfloat16, bitcast=True)
    elif DOT == tl.float16:  # noqa: SIM300
        return ((code.to(tl.uint16) << 6) | 0x4C00).to(tl.float16, bitcast=True)
    else:
        return code.to(tl.float32)


@triton.jit
def _dequantized(code, column, columns, scale_row, zero_row, in_n, GROUP: tl.constexpr):  # noqa: ANN202
    """Return (q - z) · s in fp32, with scale and zero point read for every weight."""
    group = column // GROUP
    known = in_n[:, None] & (column < columns)
    zero = tl.load(zero_row[:, None] + group // 2, mask=known, other=0).to(tl.int32)
    zero = (zero >> (4 * (group % 2))) & 15
    scale = tl.load(scale_row[:, None] + group, mask=known, other=0.0)
    return (code.to(tl.int32) - zero).to(tl.float32) * scale.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _int4_linear(
    x_ptr,  # [rows, columns]; if HALVES: [rows, 2 · pairs], the even columns, then the odd ones
    weight_ptr,  # [outputs, pairs] uint8
    scale_ptr,  # [outputs, groups] fp16
    zero_ptr,  # [outputs, ⌈groups / 2⌉] uint8
    bias_ptr,  # [outputs], if BIAS
    out_ptr,  # [rows, outputs]; with SPLITS > 1: [SPLITS, rows, outputs] fp32, before the bias
    rows: int,
    outputs: int,
    columns: int,
    pairs: int,  # ⌈columns / 2⌉
    groups: int,
    x_stride: int,
    w_stride: int,
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether the columns of every tile lie in one group
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
    in_m, in_n = m < rows, n < outputs
    n_64 = n.to(tl.int64)
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_stride
    w_row = weight_ptr + n_64[:, None] * w_stride
    scale_row = scale_ptr + n_64 * groups
    zero_row = zero_ptr + n_64 * ((groups + 1) // 2)
    total = tl.full((N, M), 0.0, tl.float32)
    for first in range(split * (K // 2), pairs, SPLITS * (K // 2)):
        # The mask compares `pair` with an argument and not with a product of it: only then are bytes read 16 at a time.
        pair = first + tl.arange(0, K // 2)[None, :]
        x_mask = in_m[:, None] & (pair < pairs)
        if HALVES:
            even = tl.load(x_row + pair, mask=x_mask, other=0.0).to(DOT)
            odd = tl.load(x_row + pairs + pair, mask=x_mask, other=0.0).to(DOT)
        else:
            even = tl.load(x_row + 2 * pair, mask=x_mask, other=0.0).to(DOT)
            odd = tl.load(x_row + 2 * pair + 1, mask=x_mask, other=0.0).to(DOT)
        both = tl.load(w_row + pair, mask=in_n[:, None] & (pair < pairs), other=0)
        if ALIGNED:
            group = first // (GROUP // 2)
            zero = tl.load(zero_row + group // 2, mask=in_n, other=0).to(tl.int32)
            zero = ((zero >> (4 * (group % 2))) & 15).to(tl.float32)
            if DOT != tl.float32:  # noqa: SIM300
                zero += OFFSET
            scale = tl.load(scale_row + group, mask=in_n, other=0.0).to(tl.float32)
            part = tl.dot(_operand(both & 15, DOT), tl.trans(even), input_precision="ieee")
            part = tl.dot(_operand(both >> 4, DOT), tl.trans(odd), acc=part, input_precision="ieee")
            x_sum = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 1)
            total += (part - zero[:, None] * x_sum[None, :]) * scale[:, None]
        else:
            low = _dequantized(both & 15, 2 * pair, columns, scale_row, zero_row, in_n, GROUP)
            high = _dequantized(both >> 4, 2 * pair + 1, columns, scale_row, zero_row, in_n, GROUP)
            total = tl.dot(low.to(DOT), tl.trans(even), acc=total, input_precision="ieee")
            total = tl.dot(high.to(DOT), tl.trans(odd), acc=total, input_precision="ieee")
    y = tl.trans(total)
    if SPLITS == 1 and BIAS:
        y += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = (split.to(tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


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
    splits, pairs = tiles.splits, -(-columns // 2)
    # Few rows are read with a stride of two. Many are copied first, so that 16 bytes are read at a time.
    halves = rows > FEW_ROWS or columns % 2 == 1
    if halves:
        x = _even_then_odd(x)
    # Most columns per tile that always lie in one group: a power of two that divides the group size.
    aligned = min(tiles.k, group_size & -group_size)
    depth = aligned if aligned >= 2 * MIN_TILE_SIDE else max(tiles.k, 2 * MIN_TILE_SIDE)
    part = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _int4_linear[(-(-rows // tiles.m), -(-outputs // tiles.n), splits)](
        *(x, qweight, scales, qzeros, scales if bias is None else bias, part),
        *(rows, outputs, columns, pairs, groups, x.stride(0), qweight.stride(0)),
        HALVES=halves,
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


def _even_then_odd(x: Tensor) -> Tensor:
    """Return `[rows, 2 · ⌈columns / 2⌉]`: the even columns of each row, then the odd ones; one zero if one lacks."""
    x = torch.nn.functional.pad(x, (0, 1)) if x.shape[1] % 2 else x
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
