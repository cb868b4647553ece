"""Quantise new keys and values and write them into the paged cache: one launch for both.

One program handles the key and the value of one token, for all KV heads. Codes and scales equal those of `kv_quant` on
a CPU bit for bit:

    INT8   s = amax / 127, rounded to bfloat16 (nearest, ties to even)       code = round(x / s)
    INT4   per group: zero = min rounded down to float16, s = (max - zero) / 15 rounded up to float16
           code = clamp(round((x - zero) / s), 0, 15), two to a byte, the even channel low

Bit equality needs three precautions. Divisions are `div_rn`, because a kernel's plain `/` may be off by one bit.
Rounding to an integer (ties to even) adds and subtracts 1.5 · 2^23: a float of that size has no fractional digits.
bfloat16 is rounded on the bits of the float, because Triton's interpreter truncates where a GPU rounds.

Bytes moved: k and v are read and codes are written; PyTorch writes and reads back about ten intermediate tensors.
Wins: with a quantised cache, where one launch replaces some forty. Loses: float pools save only one launch of two; KV
heads of a few groups fill a program badly when one token is written.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import UnsupportedError
from minillm.ops import store_kv as reference
from minillm.ops.kv_quant import SMALLEST_SCALE, SMALLEST_STEP
from minillm.ops.triton.machine import contiguous_last_dims, power_of_two
from minillm.ops.triton.stored_rows import check_contiguous

ROUNDING_MAGIC = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds |x| < 2^22 to an integer, ties to even."""
TINY_SCALE, TINY_STEP = tl.constexpr(SMALLEST_SCALE), tl.constexpr(SMALLEST_STEP)


@triton.jit
def _bfloat16(x):  # noqa: ANN202
    """fp32 → the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x).to(tl.bfloat16)


@triton.jit
def _half_below(x):  # noqa: ANN202
    """fp32 → a float16 number no larger than it, as `kv_quant._half_below`."""
    near = x.to(tl.float16)
    below = (x - tl.abs(x) * 0.0009765625 - TINY_STEP).to(tl.float16)  # 2^-10
    return tl.where(near.to(tl.float32) > x, below, near)


@triton.jit
def _store_floats(x_at, pool_ptr, rows_at, inside, DIM: tl.constexpr, PAD_DIM: tl.constexpr) -> None:
    """Store one row per KV head. `x_at`: pointer to its first number; `rows_at`: its row in the pool."""
    channel = tl.arange(0, PAD_DIM)[None, :]
    mask = inside[:, None] & (channel < DIM)
    x = tl.load(x_at[:, None] + channel, mask=mask, other=0.0)
    tl.store(pool_ptr + rows_at[:, None] * DIM + channel, x.to(pool_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_int8(x_at, pool_ptr, scale_ptr, rows_at, inside, DIM: tl.constexpr, PAD_DIM: tl.constexpr) -> None:
    """Store one row per KV head, with one scale."""
    channel = tl.arange(0, PAD_DIM)[None, :]
    mask = inside[:, None] & (channel < DIM)
    x = tl.load(x_at[:, None] + channel, mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), 1)
    scale = _bfloat16(tl.maximum(tl.div_rn(amax, 127.0), TINY_SCALE))
    is_nan = tl.max((x != x).to(tl.int32), 1) != 0
    scale = tl.where(is_nan, float("nan"), scale.to(tl.float32))
    code = (tl.div_rn(x, scale[:, None]) + ROUNDING_MAGIC) - ROUNDING_MAGIC
    tl.store(pool_ptr + rows_at[:, None] * DIM + channel, code.to(tl.int8), mask=mask)
    tl.store(scale_ptr + rows_at, scale.to(tl.bfloat16), mask=inside)


@triton.jit
def _store_int4(
    x_at, pool_ptr, scale_ptr, zero_ptr, rows_at, inside, CHANNELS: tl.constexpr, PAD_PAIRS: tl.constexpr
) -> None:
    """Store one row per KV head and group. Even and odd channels are loaded separately, so packing needs no shuffle."""
    pair = tl.arange(0, PAD_PAIRS)[None, :]
    mask = inside[:, None] & (pair < CHANNELS // 2)
    even = tl.load(x_at[:, None] + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_at[:, None] + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    low = tl.min(tl.where(mask, tl.minimum(even, odd), float("inf")), 1)
    high = tl.max(tl.where(mask, tl.maximum(even, odd), float("-inf")), 1)
    is_nan = tl.max(((even != even) | (odd != odd)).to(tl.int32), 1) != 0
    zero = _half_below(low)
    zero_32 = zero.to(tl.float32)
    scale_32 = tl.maximum(-_half_below(tl.div_rn(zero_32 - high, 15.0)).to(tl.float32), TINY_STEP)
    scale_32 = tl.where(is_nan, float("nan"), scale_32)
    low_code = (tl.div_rn(even - zero_32[:, None], scale_32[:, None]) + ROUNDING_MAGIC) - ROUNDING_MAGIC
    high_code = (tl.div_rn(odd - zero_32[:, None], scale_32[:, None]) + ROUNDING_MAGIC) - ROUNDING_MAGIC
    low_code = tl.minimum(tl.maximum(low_code, 0.0), 15.0).to(tl.int32)
    high_code = tl.minimum(tl.maximum(high_code, 0.0), 15.0).to(tl.int32)
    byte = (low_code | (high_code << 4)).to(tl.uint8)
    tl.store(pool_ptr + rows_at[:, None] * (CHANNELS // 2) + pair, byte, mask=mask)
    tl.store(scale_ptr + rows_at, scale_32.to(tl.float16), mask=inside)
    tl.store(zero_ptr + rows_at, zero, mask=inside)


@triton.jit
def _store_kv(
    k_ptr,  # [tokens, KV heads, dim]
    v_ptr,
    k_pool_ptr,
    k_scale_ptr,
    k_zero_ptr,
    v_pool_ptr,
    v_scale_ptr,
    v_zero_ptr,
    slot_ptr,  # [tokens] int32 or int64
    k_stride: int,
    v_stride: int,
    BITS: tl.constexpr,  # per stored code; 0: floats
    NUM_ROWS: tl.constexpr,  # KV heads; INT4: times groups
    ROW: tl.constexpr,  # numbers that share a scale: dim; INT4: a group
    PAD_ROWS: tl.constexpr,
    PAD_ROW: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    row = tl.arange(0, PAD_ROWS)
    inside = row < NUM_ROWS
    rows_at = slot * NUM_ROWS + row
    k_at = k_ptr + token * k_stride + row * ROW
    v_at = v_ptr + token * v_stride + row * ROW
    if BITS == 0:
        _store_floats(k_at, k_pool_ptr, rows_at, inside, ROW, PAD_ROW)
        _store_floats(v_at, v_pool_ptr, rows_at, inside, ROW, PAD_ROW)
    elif BITS == 8:
        _store_int8(k_at, k_pool_ptr, k_scale_ptr, rows_at, inside, ROW, PAD_ROW)
        _store_int8(v_at, v_pool_ptr, v_scale_ptr, rows_at, inside, ROW, PAD_ROW)
    else:
        _store_int4(k_at, k_pool_ptr, k_scale_ptr, k_zero_ptr, rows_at, inside, ROW, PAD_ROW)
        _store_int4(v_at, v_pool_ptr, v_scale_ptr, v_zero_ptr, rows_at, inside, ROW, PAD_ROW)


def store_kv(
    k: Tensor, v: Tensor, key_pools: Sequence[Tensor], value_pools: Sequence[Tensor], slot_mapping: Tensor
) -> None:
    """As `minillm.ops.store_kv.store_kv`. INT4 groups of an odd number of channels run through the reference, because
    there a byte may belong to two groups. Raises `UnsupportedError` also for strided pools, and for keys and values
    that differ in format or shape."""
    bits = reference.code_bits(key_pools)
    num_tokens, num_kv, dim = k.shape
    groups = key_pools[1].shape[2] if bits == 4 else 1
    channels = dim // groups
    if bits == 4 and channels % 2:
        return reference.store_kv(k, v, key_pools, value_pools, slot_mapping)
    key_format, value_format = _format(key_pools), _format(value_pools)
    if key_format != value_format:
        raise UnsupportedError(
            f"the kernel writes keys and values of one format; here keys have {key_format} and values {value_format} "
            "(bits of a code or 0, the shape of each pool without slots); use the reference of store_kv"
        )
    check_contiguous([*key_pools, *value_pools])
    if num_tokens:
        k, v = contiguous_last_dims(k, 2), contiguous_last_dims(v, 2)
        padded_pools = [pool for pools in (key_pools, value_pools) for pool in (*pools, pools[0], pools[0])[:3]]
        _store_kv[(num_tokens,)](
            *(k, v, *padded_pools, contiguous_last_dims(slot_mapping), k.stride(0), v.stride(0)),
            BITS=bits,
            NUM_ROWS=num_kv * groups,
            ROW=channels,
            PAD_ROWS=power_of_two(num_kv * groups),
            PAD_ROW=power_of_two(channels // 2 if bits == 4 else channels),
            num_warps=4 if num_kv * dim >= 512 else 1,
        )


def _format(pools: Sequence[Tensor]) -> tuple[object, ...]:
    return (reference.code_bits(pools), *(tuple(pool.shape[1:]) for pool in pools))
