"""Paged attention: every query row walks its request's block table, and nothing is gathered.

    out = Σ_j softmax_j(q · k_j / √d) v_j        over the positions j ≤ p (and j > p - window, if there is one)

A task is one KV head of one request and up to `ROWS` query rows: the query heads that share the KV head (GQA), for one
or several new tokens. So decoding, verifying and prefill differ only in how many tasks they make. Keys come by sixteen,
are made floats once for all rows of the task, if they are not, and turned on their side, so that sixteen scores are the
lanes of one vector; values need no turning, and floats are read where they lie.

Keys come in blocks of `KEYS`, with a softmax that goes on from block to block (`softmax.py`), so that scores stay in
the caches nearest to the processor. Blocks that no row of the task may see are left out. Blocks begin at fixed
positions, and each row is summed up in the order of positions; so its numbers are the same whatever else the task
holds.

Bytes moved: 2 · positions · (bytes of a row), once per task; nothing is gathered first, as PyTorch must.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.extending import overload

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.panels import tiles
from minillm.ops.cpu.rows import read_row
from minillm.ops.cpu.simd import LANES, load, splat, stay_whole, store, transpose
from minillm.ops.cpu.softmax import finish_row, start_row, weigh_block

ROWS = 96
"""Query rows of a task, at most: sixteen tiles."""
FEW = 6
"""Rows of one tile."""
KEYS = 128
"""Positions of a block, which begins at a multiple of them: so the numbers of a row do not depend on its task."""
GROUPS = 4
"""Times sixteen keys that are scored together, so that few rows make enough sums at a time to hide their waits."""


def scratch_size(head_dim: int) -> int:
    """Floats that a thread needs: of each row its largest score, the scores of a block, the query and the sums; then a
    block of values, or sixteen keys and `GROUPS` times sixteen turned ones."""
    return ROWS * (1 + KEYS + 2 * head_dim + LANES) + max(KEYS, (1 + GROUPS) * LANES) * head_dim


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
    token, count, seq_len, table = request[0], request[1], request[2], request[3]
    start, size = seq_len - count, head_dim + LANES
    low = max(0, start + first // group - window + 1) // KEYS * KEYS if window else 0
    high = start + (first + rows - 1) // group + 1  # the last row sees most
    scores = at + ROWS
    queries = scores + rows * KEYS
    sums = queries + rows * head_dim
    spare = sums + rows * size

    scale = splat(np.float32(1 / math.sqrt(head_dim)))
    for r in range(rows):
        place = heads_at + (token + (first + r) // group) * heads_row + (head * group + (first + r) % group) * head_dim
        for i in range(0, head_dim, LANES):
            store(scratch, queries + r * head_dim + i, load(heads, place + i) * scale)
        start_row(scratch, at + r, scratch, sums + r * size, head_dim)
    for block in range(low, high, KEYS):
        seen = min(KEYS, high - block)
        _score(
            block, seen, keys, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare,
            queries, rows, scores,
        )  # fmt: skip
        width = (seen + LANES - 1) // LANES * LANES
        for r in range(rows):
            last = start + (first + r) // group + 1
            unseen = max(0, last - window - block) if window else 0
            weigh_block(
                scratch, scores + r * KEYS, width, unseen, min(last - block, width), scratch, at + r, scratch,
                sums + r * size, head_dim,
            )  # fmt: skip
        _add_values(
            block, seen, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare,
            scores, rows, sums,
        )  # fmt: skip
    for r in range(rows):
        row, query_head = token + (first + r) // group, head * group + (first + r) % group
        finish_row(scratch, sums + r * size, head_dim, out, out_at + (row * num_heads + query_head) * head_dim)


@njit(**OPTIONS)
def _score(
    block, count, keys, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare, queries,
    rows, scores,
):  # fmt: skip
    """The scores of `count` keys, from position `block` on, for all rows."""
    (pool,) = _where(keys, block_size, scratch)
    turned, step = spare + LANES * head_dim, LANES * head_dim
    for j in range(0, count, GROUPS * LANES):
        groups = GROUPS if count - j > (GROUPS - 1) * LANES else (count - j + LANES - 1) // LANES
        for g in range(groups):
            key = j + g * LANES
            source, row, _ = _find(
                keys, block + key, min(LANES, count - key), tables, table, block_size, layer_row, num_kv_heads, head,
                head_dim, scratch, spare,
            )  # fmt: skip
            for i in range(0, head_dim, LANES):
                transpose(pool, source + i, row, scratch, turned + g * step + i * LANES)
        if groups == GROUPS:
            tiles(
                scratch, turned, step, LANES, scratch, queries, head_dim, head_dim, scratch, scores + j, KEYS, rows,
                False, 4,
            )  # fmt: skip
        else:
            for g in range(groups):
                tiles(
                    scratch, turned + g * step, step, LANES, scratch, queries, head_dim, head_dim, scratch,
                    scores + j + g * LANES, KEYS, rows, False, 1,
                )  # fmt: skip


@njit(**OPTIONS)
def _add_values(
    block, count, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare, weights,
    rows, sums,
):  # fmt: skip
    """Add `count` weighted values, from position `block` on, to the sums of all rows."""
    if rows > FEW:  # they are read in every tile: side by side they fit into the first cache
        for j in range(0, count, LANES):
            _copy_sixteen(
                values, block + j, count - j, tables, table, block_size, layer_row, num_kv_heads, head, head_dim,
                scratch, spare + j * head_dim,
            )  # fmt: skip
        _add_rows(scratch, spare, head_dim, count, head_dim, scratch, weights, rows, sums)
        return
    (pool,) = _where(values, block_size, scratch)
    j = 0
    while j < count:
        source, row, here = _find(
            values, block + j, count - j, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch,
            spare,
        )  # fmt: skip
        _add_rows(pool, source, row, here, head_dim, scratch, weights + j, rows, sums)
        j += here


@njit(**OPTIONS)
def _add_rows(values, at, row, count, head_dim, scratch, weights, rows, sums):
    """Add `count` weighted values, `row` numbers apart."""
    size = head_dim + LANES
    for p in range(0, head_dim, 4 * LANES):
        if head_dim - p >= 4 * LANES:
            tiles(values, at + p, LANES, row, scratch, weights, KEYS, count, scratch, sums + p, size, rows, True, 4)
        else:
            tiles(values, at + p, LANES, row, scratch, weights, KEYS, count, scratch, sums + p, size, rows, True, 2)


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
