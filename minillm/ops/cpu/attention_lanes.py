"""A task of attention with its query rows as the lanes of a vector, for float32 sums and at most sixteen rows.

A vector holds one number of each row, and each number of a key or a value multiplies a vector:

    scores    s[j, 0 : 16]  =  Σ_c  k[j, c] · q[c, 0 : 16]        only the queries are transposed, once
    values    o[c, 0 : 16] +=  Σ_j  v[j, c] · w[j, 0 : 16]

Nothing is summed across lanes, so the softmax takes as many instructions for sixteen rows as for one. Keys and values
are read where they lie. `attention._task`, whose lanes are keys, is faster for few rows and as fast for many.

Every sum is taken in the order of `attention._task`, so a row gets the same bits from both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.find_rows import find_rows, row_array
from minillm.ops.cpu.register_tiles import FITS_ALL, loop_in_registers
from minillm.ops.cpu.simd import (
    F32,
    FLOATS,
    I64,
    LANES,
    ZERO,
    address,
    call,
    load,
    no_inline,
    read,
    repeat,
    splat,
    store,
    transpose,
)
from minillm.ops.cpu.softmax import NEGATIVE_INFINITY, exp_of_negative, larger

KEY_BLOCK = 128
"""Positions of a key block. Blocks begin at multiples of it, so the result of a row does not depend on its task."""
MASK = 1
"""Column of `tree`: which new tokens of its request a token sees, bit i for the i-th; -1: all up to itself."""
KEYS, CHANNELS = (16, 8) if FITS_ALL else (4, 1)
"""Keys whose scores are summed at once, and the channels of the queries that are in registers meanwhile."""
SUMS = 16 if FITS_ALL else 4
"""Channels of the values that are summed at once."""
STATE = (1 + LANES) * LANES
"""Floats of the state of sixteen rows, which are the lanes: the largest score so far, then the sum of the weights of
every sixteenth key, from each of the first sixteen on."""
SMALLEST = np.float32(np.finfo(np.float32).min)
"""The smallest finite number."""


def _times(builder: ir.IRBuilder, vector: Any, pointer: Any, offset: int, added: Any) -> Any:
    """vector · the number at `pointer[offset]` + added."""
    number = builder.load(builder.gep(pointer, [ir.Constant(I64, offset)]))
    return call(builder, "llvm.fma.v16f32", FLOATS, vector, repeat(builder, number, FLOATS), added)


def _vector_at(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """A pointer to vector number `index` behind `pointer`."""
    at = builder.gep(pointer, [builder.mul(index, ir.Constant(I64, LANES))])
    return builder.bitcast(at, FLOATS.as_pointer())


@intrinsic
def _score_keys(
    typing: Any, keys: Any, at: Any, row: Any, queries: Any, queries_at: Any, size: Any, out: Any, out_at: Any
) -> Any:
    """out[j, 0 : 16] = Σ_c keys[j, c] · queries[c, 0 : 16] for `KEYS` keys, which lie `row` numbers apart, and c below
    `size`, a multiple of `CHANNELS`. Σ runs over c in order, one multiply-add each."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keys_, at, row, queries_, queries_at, size, out_, out_at = args
        first_key = address(context, builder, keys, keys_, at, F32)
        query = address(context, builder, queries, queries_, queries_at, F32)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            channel = builder.mul(i, ir.Constant(I64, CHANNELS))
            channels = [builder.add(channel, ir.Constant(I64, c)) for c in range(CHANNELS)]
            vectors = [read(builder, _vector_at(builder, query, c)) for c in channels]
            key, new = builder.gep(first_key, [channel]), []
            for total in sums:
                for c, vector in enumerate(vectors):
                    total = _times(builder, vector, key, c, total)
                new.append(total)
                key = builder.gep(key, [row])
            return new

        start = [ir.Constant(FLOATS, [0.0] * LANES)] * KEYS
        sums = loop_in_registers(builder, builder.sdiv(size, ir.Constant(I64, CHANNELS)), start, body)
        to = address(context, builder, out, out_, out_at, F32)
        for j, total in enumerate(sums):
            builder.store(total, _vector_at(builder, to, ir.Constant(I64, j))).align = 1
        return context.get_dummy_value()

    intp = types.intp
    return types.void(keys, intp, intp, queries, intp, intp, out, intp), code


@intrinsic
def _add_values(
    typing: Any, values: Any, at: Any, row: Any, count: Any, weights: Any, weights_at: Any, sums: Any, sums_at: Any
) -> Any:
    """sums[c, 0 : 16] += Σ_j values[j, c] · weights[j, 0 : 16] for `SUMS` channels and `count` values, which lie `row`
    numbers apart. Σ runs over j in order, one multiply-add each."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values_, at, row, count, weights_, weights_at, sums_, sums_at = args
        first_value = address(context, builder, values, values_, at, F32)
        weight = address(context, builder, weights, weights_, weights_at, F32)
        first_sum = address(context, builder, sums, sums_, sums_at, F32)
        places = [_vector_at(builder, first_sum, ir.Constant(I64, c)) for c in range(SUMS)]

        def body(j: Any, totals: list[Any]) -> list[Any]:
            vector = read(builder, _vector_at(builder, weight, j))
            value = builder.gep(first_value, [builder.mul(j, row)])
            return [_times(builder, vector, value, c, total) for c, total in enumerate(totals)]

        totals = loop_in_registers(builder, count, [read(builder, place) for place in places], body)
        for total, place in zip(totals, places, strict=True):
            builder.store(total, place).align = 1
        return context.get_dummy_value()

    intp = types.intp
    return types.void(values, intp, intp, intp, weights, intp, sums, intp), code


@njit(**PART)
def attend_lanes(
    first, rows, group, head, heads, heads_at, heads_row, num_heads, num_kv_heads, head_dim, window,
    request, tables, tree, block_size, layer_row, keys, values, out, out_at, scratch, at,
):  # fmt: skip
    """A task of `attention.attend`: at most sixteen query rows of one KV head, from row `first` on."""
    no_inline()
    token, count, seq_len, table = request[0], request[1], request[2], request[3]
    start, size = seq_len - count, head_dim * LANES
    low = max(0, start + first // group - window + 1) // KEY_BLOCK * KEY_BLOCK if window else 0
    high = start + (first + rows - 1) // group + 1  # the last row sees the most keys
    queries = at + STATE
    sums = queries + size
    scores = sums + size
    spare = scores + KEY_BLOCK * LANES
    (key_array,), (value_array,) = row_array(keys, block_size, scratch), row_array(values, block_size, scratch)

    scale = splat(np.float32(1 / math.sqrt(head_dim)))
    for i in range(0, head_dim, LANES):
        for r in range(first, first + LANES):
            query = splat(ZERO)
            if r < first + rows:
                place = heads_at + (token + r // group) * heads_row + (head * group + r % group) * head_dim
                query = load(heads, place + i) * scale
            store(scratch, spare + (r - first) * LANES, query)
        transpose(scratch, spare, LANES, scratch, queries + i * LANES)
    _start(scratch, at, sums, size)
    for position in range(low, high, KEY_BLOCK):
        num_keys = min(KEY_BLOCK, high - position)
        j = 0
        while j < num_keys:
            source, row, here = find_rows(
                keys, position + j, num_keys - j, tables, table, block_size, layer_row, num_kv_heads, head, head_dim,
                scratch, spare,
            )  # fmt: skip
            for i in range(0, here, KEYS):
                to = scores + (j + i) * LANES
                _score_keys(key_array, source + i * row, row, scratch, queries, head_dim, scratch, to)
            j += here
        width = (num_keys + LANES - 1) // LANES * LANES
        for lane in range(rows):
            index = (first + lane) // group
            mask = tree[token + index, MASK] if len(tree) else -1
            _mask_lane(scratch, scores + lane, width, start - position, index, window, mask)
        _softmax_block(scratch, scores, width, at, sums, size)
        j = 0
        while j < num_keys:
            source, row, here = find_rows(
                values, position + j, num_keys - j, tables, table, block_size, layer_row, num_kv_heads, head, head_dim,
                scratch, spare,
            )  # fmt: skip
            for i in range(0, head_dim, SUMS):
                weights = scores + j * LANES
                _add_values(value_array, source + i, row, here, scratch, weights, scratch, sums + i * LANES)
            j += here
    weight_sum = _weight_sum(scratch, at)
    for i in range(0, size, LANES):
        store(scratch, sums + i, load(scratch, sums + i) / weight_sum)
    for i in range(0, head_dim, LANES):
        transpose(scratch, sums + i * LANES, LANES, scratch, spare)
        for r in range(first, first + rows):
            place = out_at + ((token + r // group) * num_heads + head * group + r % group) * head_dim
            store(out, place + i, load(scratch, spare + (r - first) * LANES))


@njit(**PART)
def _start(scratch, state, sums, size):
    """Initialise the state of sixteen rows, and their `size` sums of values."""
    store(scratch, state, splat(NEGATIVE_INFINITY))
    for i in range(LANES, STATE, LANES):
        store(scratch, state + i, splat(ZERO))
    for i in range(0, size, LANES):
        store(scratch, sums + i, splat(ZERO))


@njit(**PART)
def _mask_lane(scratch, at, width, new_at, index, window, mask):
    """Mask the scores of keys that new token `index` of a request does not see, in one lane of `width` vectors.

    `new_at`: which of the keys is the first new token's, negative if it lies before them. `mask`: see `MASK`.
    """
    last = new_at + index + 1
    for j in range(max(0, last), width):
        scratch[at + j * LANES] = NEGATIVE_INFINITY
    if window:
        for j in range(min(last - window, width)):
            scratch[at + j * LANES] = NEGATIVE_INFINITY
    if mask != -1:
        for i in range(max(0, -new_at), min(index, width - new_at)):
            if not (mask >> i) & 1:
                scratch[at + (new_at + i) * LANES] = NEGATIVE_INFINITY


@njit(**PART)
def _softmax_block(scratch, scores, width, state, sums, size):
    """`softmax.softmax_block` for sixteen rows: turns `width` vectors of scores into weights, in place."""
    before = load(scratch, state)
    a = b = c = d = before  # four at a time, because each waits for the one before
    for j in range(scores, scores + width * LANES, 4 * LANES):
        a, b = larger(load(scratch, j), a), larger(load(scratch, j + LANES), b)
        c, d = larger(load(scratch, j + 2 * LANES), c), larger(load(scratch, j + 3 * LANES), d)
    peak = larger(larger(a, b), larger(c, d))
    store(scratch, state, peak)
    # A row that has seen no key yet has -∞ here, and its weights must become zero, not NaN.
    peak = larger(peak, splat(SMALLEST))
    rescale = exp_of_negative(before - peak)
    for i in range(LANES, STATE, LANES):
        store(scratch, state + i, load(scratch, state + i) * rescale)
    for i in range(0, size, LANES):
        store(scratch, sums + i, load(scratch, sums + i) * rescale)
    for j in range(0, width, LANES):
        for i in range(LANES):
            at, place = scores + (j + i) * LANES, state + (1 + i) * LANES
            weight = exp_of_negative(load(scratch, at) - peak)
            store(scratch, at, weight)
            store(scratch, place, load(scratch, place) + weight)


@njit(**PART)
def _weight_sum(scratch, state):
    """The sum of all weights of each of sixteen rows, in the order of `simd.total`."""
    lanes = LANES // 2
    while lanes:
        for i in range(1, 1 + lanes):
            place = state + i * LANES
            store(scratch, place, load(scratch, place) + load(scratch, place + lanes * LANES))
        lanes //= 2
    return load(scratch, state + LANES)
