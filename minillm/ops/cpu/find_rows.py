"""Where the keys or values of a request lie in the pool of a cache."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.kv_rows import read_row
from minillm.ops.cpu.simd import LANES

BFLOATS = types.uint16
"""numba type of a pool of bfloat16s."""


def row_array(pool, block_size, spare):
    """The array in which `find_rows` finds rows, as a tuple of one. Floats and pairs of bfloat16s stay in the pool;
    codes, and rows whose block size is no multiple of sixteen, are copied to `spare`."""
    raise NotImplementedError


def row_size(pool, head_dim):
    """Numbers of 32 bits in a row that `find_rows` finds: a float, or a pair of bfloat16s."""
    raise NotImplementedError


def find_rows(pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, size, spare, spare_at):
    """Rows j, j + 1, … of a request, `size` floats or pairs each: (index of the first, distance from one to the next,
    number of rows).

    The number is at most `most` and at least min(`most`, 16). `spare[spare_at]`: room for sixteen rows.
    """
    raise NotImplementedError


@njit(**PART)
def copy_sixteen(
    pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at
):  # fmt: skip
    """`find_rows` for sixteen rows at most, copied to `spare` as floats."""
    count, block, offset = min(most, LANES), table + j // block_size, j % block_size
    for i in range(count):
        slot = tables[block] * block_size + offset
        read_row(pool, layer_row + slot * num_kv_heads + head, spare, spare_at + i * head_dim, head_dim)
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0
    return spare_at, head_dim, count


@njit(**PART)
def _find_floats(
    pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at
):  # fmt: skip
    if block_size % LANES:
        return copy_sixteen(
            pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at
        )
    block, offset = table + j // block_size, j % block_size
    slot, count = tables[block] * block_size + offset, block_size - offset
    while count < most and tables[block + 1] == tables[block] + 1:
        block, count = block + 1, count + block_size
    at = (layer_row + slot * num_kv_heads + head) * head_dim
    return at, num_kv_heads * head_dim, min(count, most)


@overload(row_array, jit_options=PART)
def _typed_row_array(pool, block_size, spare):
    if pool[0].dtype == types.float32:
        return lambda pool, block_size, spare: (spare,) if block_size % LANES else (pool[0],)
    if pool[0].dtype == BFLOATS:
        return lambda pool, block_size, spare: (spare,) if block_size % LANES else (pool[0].view(np.float32),)
    return lambda pool, block_size, spare: (spare,)


@overload(row_size, jit_options=PART)
def _typed_row_size(pool, head_dim):
    return (lambda pool, head_dim: head_dim // 2) if pool[0].dtype == BFLOATS else lambda pool, head_dim: head_dim


@overload(find_rows, jit_options=PART)
def _typed_find_rows(pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, size, spare, spare_at):
    if pool[0].dtype == BFLOATS:
        return lambda pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, size, spare, spare_at: (
            _find_floats(
                (pool[0].view(np.float32),), j, most, tables, table, block_size, layer_row, num_kv_heads, head, size,
                spare, spare_at,
            )
        )  # fmt: skip
    find = _find_floats if pool[0].dtype == types.float32 else copy_sixteen
    return lambda pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, size, spare, spare_at: find(
        pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, size, spare, spare_at
    )
