"""Paged attention: every query row walks its request's block table, and nothing is gathered.

    out = Σ_j softmax_j(q · k_j / √d) v_j        over the positions j ≤ p (and j > p - window, if there is one)

A task is one KV head of one request and up to `ROWS` query rows: the query heads that share the KV head (GQA), for one
or several new tokens. So decoding, verifying and prefill differ only in how many tasks they make. Keys come by sixteen,
are made floats once for all rows of the task, if they are not, and turned on their side, so that sixteen scores are the
lanes of one vector; values need no turning, and floats are read where they lie. The scores of a row fit into memory as
a whole (4 bytes per position), so this is the softmax of the textbook: the largest, the exponentials, their sum. Each
row is summed up in the order of positions, whatever else the task holds.

Bytes moved: 2 · positions · (bytes of a row), once per task; nothing is gathered first, as PyTorch must. The scores of
a full task outgrow a second cache of 1 MB at some 10 000 positions; from there on a tiled running softmax, which keeps
no scores, should be the better way.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.extending import overload

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.panels import tiles
from minillm.ops.cpu.rows import read_row
from minillm.ops.cpu.simd import LANES, exp, largest, load, maximum, splat, stay_whole, store, total, transpose

ROWS = 24
"""Query rows of a task: four tiles."""
GROUPS = 4
"""Times sixteen keys that are scored together, so that few rows make enough sums at a time to hide their waits."""
ZERO, NOTHING = np.float32(0), np.float32(-np.inf)


def scratch_size(longest: int, head_dim: int) -> int:
    """Floats that a thread needs for sequences of up to `longest` tokens: scores, queries, results, sixteen rows, and
    `GROUPS` times sixteen turned ones."""
    return ROWS * _padded(longest) + (2 * ROWS + (1 + GROUPS) * LANES) * head_dim


def _padded(count: int) -> int:
    return (count // LANES + 2) * LANES


@njit(**OPTIONS)
def attend(
    number, size, heads, heads_at, heads_row, num_heads, num_kv_heads, head_dim, window,
    requests, tables, block_size, layer_row, keys, values, out, out_at, scratch, own_at,
):  # fmt: skip
    """The tasks of thread `number` of `size`.

    Queries: token i's heads lie at `heads[heads_at + i · heads_row]`, results go to `out[out_at + i · num_heads ·
    head_dim]`. `requests`: `[n, 4]`, of each its first token, new tokens, tokens in all, and where its block table
    begins in `tables`. `layer_row`: the first row of this layer in `keys` and `values`. `window`: 0 for none.
    `scratch[own_at]`: `scratch_size` floats.
    """
    stay_whole()
    group = num_heads // num_kv_heads
    all_rows = 0
    for r in range(requests.shape[0]):
        all_rows += requests[r, 1] * group * num_kv_heads
    most = min(ROWS, max(1, (all_rows + size - 1) // size))
    task = 0
    for r in range(requests.shape[0]):
        request_rows = requests[r, 1] * group
        tasks = (request_rows + most - 1) // most
        rows = (request_rows + tasks - 1) // tasks  # tasks of one size: threads that share them end together
        for head in range(num_kv_heads):
            for first in range(0, request_rows, rows):
                if task % size == number:
                    _task(
                        first, min(rows, request_rows - first), group, head, heads, heads_at, heads_row, num_heads,
                        num_kv_heads, head_dim, window, requests[r], tables, block_size, layer_row, keys, values,
                        out, out_at, scratch, own_at,
                    )  # fmt: skip
                task += 1


@njit(**OPTIONS)
def _task(
    first, rows, group, head, heads, heads_at, heads_row, num_heads, num_kv_heads, head_dim, window,
    request, tables, block_size, layer_row, keys, values, out, out_at, scratch, at,
):  # fmt: skip
    stay_whole()
    token, count, seq_len, table = request
    start = seq_len - count
    low = max(0, start + first // group - window + 1) // LANES * LANES if window else 0
    high = start + (first + rows - 1) // group + 1  # the last row sees most
    width = (high - low + LANES - 1) // LANES * LANES
    queries = at + rows * width
    results = queries + rows * head_dim
    copied = results + rows * head_dim
    turned = copied + LANES * head_dim

    scale = splat(np.float32(1 / math.sqrt(head_dim)))
    for r in range(rows):
        place = heads_at + (token + (first + r) // group) * heads_row + (head * group + (first + r) % group) * head_dim
        for i in range(0, head_dim, LANES):
            store(scratch, queries + r * head_dim + i, load(heads, place + i) * scale)
            store(scratch, results + r * head_dim + i, splat(ZERO))

    (all_keys,), (all_values,) = _where(keys, block_size, scratch), _where(values, block_size, scratch)
    j = low
    while j < high:
        groups = GROUPS if high - j > (GROUPS - 1) * LANES else 1
        for g in range(groups):
            first_key = j + g * LANES
            source_at, row, _ = _find(
                keys, first_key, min(LANES, high - first_key), tables, table, block_size, layer_row, num_kv_heads, head,
                head_dim, scratch, copied,
            )  # fmt: skip
            for i in range(0, head_dim, LANES):
                transpose(all_keys, source_at + i, row, scratch, turned + (g * head_dim + i) * LANES)
        scores, step = at + j - low, LANES * head_dim
        if groups == GROUPS:
            tiles(
                scratch,
                turned,
                step,
                LANES,
                scratch,
                queries,
                head_dim,
                head_dim,
                scratch,
                scores,
                width,
                rows,
                False,
                4,
            )
        else:
            tiles(
                scratch,
                turned,
                step,
                LANES,
                scratch,
                queries,
                head_dim,
                head_dim,
                scratch,
                scores,
                width,
                rows,
                False,
                1,
            )
        j += groups * LANES
    for r in range(rows):
        seen = start + (first + r) // group + 1
        unseen = max(0, seen - window) if window else 0
        _softmax(scratch, at + r * width, width, unseen - low, seen - low)
    j = low
    while j < high:
        source_at, row, here = _find(
            values, j, high - j, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, copied
        )
        weights = at + j - low
        p = 0
        while p < head_dim:
            if head_dim - p >= 4 * LANES:
                tiles(
                    all_values, source_at + p, LANES, row, scratch, weights, width, here,
                    scratch, results + p, head_dim, rows, True, 4,
                )  # fmt: skip
                p += 4 * LANES
            else:
                tiles(
                    all_values, source_at + p, LANES, row, scratch, weights, width, here,
                    scratch, results + p, head_dim, rows, True, 2,
                )  # fmt: skip
                p += 2 * LANES
        j += here
    for r in range(rows):
        place = (
            out_at
            + (token + (first + r) // group) * num_heads * head_dim
            + (head * group + (first + r) % group) * head_dim
        )
        for i in range(0, head_dim, LANES):
            store(out, place + i, load(scratch, results + r * head_dim + i))


def _where(pool, block_size, spare):
    """The array that `_find` finds rows in, as a tuple of one. Floats stay where they are, in the pool; codes, and
    floats whose blocks hold no multiple of sixteen, are copied to `spare`."""
    raise NotImplementedError


def _find(pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at):
    """Rows j, j + 1, … of a request as floats: where the first begins, the distance from one to the next, and how many
    lie so: up to `most`, and at least sixteen of them if they are as many. At `spare[spare_at]` is room for sixteen."""
    raise NotImplementedError


@njit(**OPTIONS)
def _copy_sixteen(
    pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at
):  # fmt: skip
    count, block, offset = min(most, LANES), table + j // block_size, j % block_size
    for i in range(count):
        slot = tables[block] * block_size + offset
        read_row(pool, layer_row + slot * num_kv_heads + head, spare, spare_at + i * head_dim, head_dim)
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0
    return spare_at, head_dim, count


@njit(**OPTIONS)
def _find_floats(
    pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at
):  # fmt: skip
    if block_size % LANES:
        return _copy_sixteen(
            pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at
        )
    block, offset = table + j // block_size, j % block_size
    slot, count = tables[block] * block_size + offset, block_size - offset
    while count < most and tables[block + 1] == tables[block] + 1:
        block, count = block + 1, count + block_size
    at = (layer_row + slot * num_kv_heads + head) * head_dim
    return at, num_kv_heads * head_dim, min(count, most)


@overload(_where, jit_options=OPTIONS)
def _typed_where(pool, block_size, spare):
    if pool[0].dtype == types.float32:
        return lambda pool, block_size, spare: (spare,) if block_size % LANES else (pool[0],)
    return lambda pool, block_size, spare: (spare,)


@overload(_find, jit_options=OPTIONS)
def _typed_find(pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at):
    find = _find_floats if pool[0].dtype == types.float32 else _copy_sixteen
    return lambda pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at: (
        find(pool, j, most, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, spare, spare_at)
    )


@njit(**OPTIONS)
def _softmax(scores, at, width, first, last):
    """Softmax over `scores[at + first : at + last]`, in place; 0 elsewhere in `width`, a multiple of sixteen."""
    for j in range(first):
        scores[at + j] = NOTHING
    for j in range(last, width):
        scores[at + j] = NOTHING
    high = load(scores, at)
    for j in range(LANES, width, LANES):
        high = maximum(high, load(scores, at + j))
    peak = splat(largest(high))
    sums = splat(ZERO)
    for j in range(0, width, LANES):
        e = exp(load(scores, at + j) - peak)
        sums = sums + e
        store(scores, at + j, e)
    whole = splat(total(sums))
    for j in range(0, width, LANES):
        store(scores, at + j, load(scores, at + j) / whole)
