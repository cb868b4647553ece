"""Rotary position embedding of all heads of a token at once.

    y[i] = x[i] · cos[i] + x[i + h] · s[i]            y[i + h] = x[i + h] · cos[i + h] + x[i] · s[i + h]

for i < h = head_dim / 2, with s the signed sine. Computed in fp32 and rounded once; the PyTorch reference rounds each
product when x is 16 bits wide.

Bytes moved: x is read and written, and a token's cosines and sines are read once for all its heads. PyTorch rolls x
into a copy and writes an intermediate product, so it moves about three times as much, in three launches. Wins: always,
because so small an operation is bound by launches or memory bandwidth. Loses: to fusing the rotation into the
projection before it or the cache write after it, which would save reading and writing x as well.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import contiguous_last_dims, power_of_two

HEADS = 16
"""Heads per program."""


@triton.jit
def _rope(
    x_ptr,  # [tokens, heads, dim]
    cos_ptr,  # [tokens, dim]
    sin_ptr,  # [tokens, dim], signed
    out_ptr,  # [tokens, heads, dim]
    num_heads: int,
    x_stride: int,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # dim / 2, padded to a power of two
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)
    in_table = channel < DIM // 2
    low, high = token * DIM + channel, token * DIM + channel + DIM // 2
    cos_low = tl.load(cos_ptr + low, mask=in_table, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + high, mask=in_table, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + low, mask=in_table, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + high, mask=in_table, other=0.0).to(tl.float32)[None, :]
    inside = (head < num_heads) & in_table[None, :]
    at = head * DIM + channel[None, :]
    x_at = token * x_stride + at
    first = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + x_at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    out_at = token * num_heads * DIM + at
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + out_at, (first * cos_low + second * sin_low).to(dtype), mask=inside)
    tl.store(out_ptr + out_at + DIM // 2, (second * cos_high + first * sin_high).to(dtype), mask=inside)


def rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """As `minillm.ops.rope.rope`. `x` may be a slice of a wider tensor, as q and k are slices of one projection."""
    x = contiguous_last_dims(x, 2)
    num_tokens, num_heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens:
        heads = min(HEADS, power_of_two(num_heads))
        _rope[(num_tokens, -(-num_heads // heads))](
            *(x, contiguous_last_dims(cos, 3), contiguous_last_dims(signed_sin, 3), out, num_heads, x.stride(0)),
            DIM=dim,
            HEADS=heads,
            HALF=power_of_two(dim // 2),
            num_warps=4 if heads * dim >= 1024 else 1,
        )
    return out
