"""Write new keys and values into the paged cache, as floats or as codes.

The formats are those of `cache/paged.py`, `cache/paged_int8.py` and `cache/paged_int4.py`; the arithmetic is
`kv_quant`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.errors import UnsupportedError
from minillm.ops.kv_quant import INT8_LEVELS, pack_int4, quantize_affine, quantize_symmetric

INT8_POOLS = (torch.int8, torch.bfloat16)
INT4_POOLS = (torch.uint8, torch.float16, torch.float16)


def store_kv(
    k: Tensor, v: Tensor, key_pools: Sequence[Tensor], value_pools: Sequence[Tensor], slot_mapping: Tensor
) -> None:
    """Write `k` and `v` (`[num_tokens, num_kv_heads, head_dim]`) into their slots (`slot_mapping`: `[num_tokens]`).

    The pools of a layer: one tensor of floats `[slots, num_kv_heads, head_dim]`; or INT8 codes of that shape and scales
    `[slots, num_kv_heads]` (bfloat16); or packed INT4 codes `[slots, num_kv_heads, head_dim / 2]` with scales and zero
    points `[slots, num_kv_heads, groups]` (float16). A token with a negative slot is padding and is not written. Raises
    `UnsupportedError` for pools of other dtypes.
    """
    used = slot_mapping >= 0
    for new, pools in ((k, key_pools), (v, value_pools)):
        for pool, part in zip(pools, encode(new[used], pools), strict=True):
            pool.index_copy_(0, slot_mapping[used], part)


def code_bits(pools: Sequence[Tensor]) -> int:
    """Return the bits of a code in these pools, 8 or 4; 0 for floats. Raises `UnsupportedError` for other dtypes."""
    kinds = tuple(pool.dtype for pool in pools)
    if len(kinds) == 1 and kinds[0].is_floating_point:
        return 0
    if kinds in (INT8_POOLS, INT4_POOLS):
        return 8 if kinds == INT8_POOLS else 4
    raise UnsupportedError(f"no cache has pools of {list(kinds)}; use kv_cache_dtype 'auto', 'int8' or 'int4'")


def encode(x: Tensor, pools: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what to write into each of `pools` for keys or values `[num_tokens, num_kv_heads, head_dim]`."""
    bits = code_bits(pools)
    if bits == 0:
        return (x.to(pools[0].dtype),)
    if bits == 8:
        return quantize_symmetric(x, INT8_LEVELS)
    codes, scale, zero = quantize_affine(x.unflatten(-1, (pools[1].shape[-1], -1)), dim=-1)
    return pack_int4(codes.flatten(-2)), scale.squeeze(-1), zero.squeeze(-1)
