"""Paged attention: every query row walks its request's block table; keys and values are not gathered first.

    out = Σ_j softmax_j(q · k_j / √d) v_j        over the positions j ≤ p (and j > p - window, if there is one)

A task is one KV head of one request and up to `TASK_ROWS` query rows: the query heads that share the KV head (GQA), for
one or several new tokens. So decode, verification and prefill differ only in the number of tasks. A task reads sixteen
keys at a time, dequantises them, once for all its rows, if they are codes, and transposes them, so that sixteen scores
are the lanes of one vector. Values need no transpose; float values are read in place. Where a task has about sixteen
rows, as when four drafts are verified, the rows are the lanes (`attention_lanes.py`): nothing is transposed then.

A **key block** is `KEY_BLOCK` positions. The softmax goes block by block (`softmax.py`), so that scores stay in the L1
and L2 caches. Key blocks that no row of the task may see are skipped. Key blocks begin at fixed positions, and each row
is summed in the order of positions, so its result does not depend on the other rows of the task.

Keys and values in bfloat16 are multiplied as pairs (`attention_pairs.py`).

Bytes moved: 2 · positions · (bytes of a row), once per task. PyTorch gathers keys and values first.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numba.extending import overload

from minillm.ops.cpu.attention_lanes import KEY_BLOCK, MASK, attend_lanes
from minillm.ops.cpu.attention_pairs import add_pair_rows, interleave_rows, pair_tiles
from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.find_rows import BFLOATS, copy_sixteen, find_rows, row_array, row_size
from minillm.ops.cpu.panels import tiles
from minillm.ops.cpu.register_tiles import FITS_ALL
from minillm.ops.cpu.simd import LANES, load, no_inline, splat, store, store_bfloats, transpose
from minillm.ops.cpu.softmax import NEGATIVE_INFINITY, finish_row, softmax_block, start_row

TASK_ROWS = 96
"""Most query rows of a task: sixteen tiles."""
TILE_ROWS = 6
"""Rows of one tile."""
LEAST_LANES = 9 if FITS_ALL else 13
"""Rows from which on `attend_lanes` is faster, up to sixteen: it takes as long for one row as for sixteen. Measured on
a core of Zen 5 with AVX-512, and with the instructions of AVX2 alone."""
NO_TREE = np.empty((0, 2), np.int64)
"""`tree` of a step without draft trees: the new tokens of each request are a chain."""
KEY_GROUPS = 4
"""Groups of sixteen keys that one tile scores. With few rows too, it then has enough independent sums to hide the
latency of a multiply-add."""


def scratch_size(head_dim: int) -> int:
    """Floats of scratch memory that a thread needs. For each row: its largest score, the scores of a key block, the
    query and the sums. Once: the values of a key block, or sixteen keys and `KEY_GROUPS` · sixteen transposed ones.
    `attend_lanes` needs less."""
    return TASK_ROWS * (1 + KEY_BLOCK + 2 * head_dim + LANES) + max(KEY_BLOCK, (1 + KEY_GROUPS) * LANES) * head_dim


@njit(**PART)
def attend(
    team, heads, heads_at, heads_row, num_heads, num_kv_heads, head_dim, window,
    requests, tables, tree, block_size, layer_row, keys, values, out, out_at, scratch, thread_at,
):  # fmt: skip
    """Run this thread's tasks.

    Queries: token i's heads lie at `heads[heads_at + i · heads_row]`, results go to `out[out_at + i · num_heads ·
    head_dim]`. `requests`: `[n, 4]` or more columns, for each the index of its first token, the number of its new
    tokens and of all tokens in its block table, and where that begins in `tables`. `tree`: `[tokens, 2]` if a request
    has a draft tree, else `[0, 2]`. `layer_row`: the first row of this layer in `keys` and `values`. `window`: 0 for
    none. `scratch[thread_at]`: `scratch_size` floats.
    """
    no_inline()
    group = num_heads // num_kv_heads
    all_rows = 0
    for r in range(requests.shape[0]):
        all_rows += requests[r, 1] * group * num_kv_heads
    max_rows = min(TASK_ROWS, max(1, (all_rows + team.num_threads - 1) // team.num_threads))
    task = 0
    for r in range(requests.shape[0]):
        request_rows = requests[r, 1] * group
        tasks = (request_rows + max_rows - 1) // max_rows
        rows = (request_rows + tasks - 1) // tasks  # tasks of equal size, so that threads finish together
        for head in range(num_kv_heads):
            for first in range(0, request_rows, rows):
                if task % team.num_threads == team.thread_id:
                    count = min(rows, request_rows - first)
                    _run_task(
                        keys, count, (
                            first, count, group, head, heads, heads_at, heads_row, num_heads, num_kv_heads, head_dim,
                            window, requests[r], tables, tree, block_size, layer_row, keys, values, out, out_at,
                            scratch, thread_at,
                        ),
                    )  # fmt: skip
                task += 1


def _run_task(keys, rows, arguments):
    """Call `_task`, or where it is faster `attend_lanes`."""
    raise NotImplementedError


@njit(**PART)
def _task(
    first, rows, group, head, heads, heads_at, heads_row, num_heads, num_kv_heads, head_dim, window,
    request, tables, tree, block_size, layer_row, keys, values, out, out_at, scratch, at,
):  # fmt: skip
    no_inline()
    token, count, seq_len, table = request[0], request[1], request[2], request[3]
    start, size = seq_len - count, head_dim + LANES
    low = max(0, start + first // group - window + 1) // KEY_BLOCK * KEY_BLOCK if window else 0
    high = start + (first + rows - 1) // group + 1  # the last row sees the most keys
    scores = at + TASK_ROWS
    queries = scores + rows * KEY_BLOCK
    sums = queries + rows * head_dim
    spare = sums + rows * size

    scale = splat(np.float32(1 / math.sqrt(head_dim)))
    for r in range(rows):
        place = heads_at + (token + (first + r) // group) * heads_row + (head * group + (first + r) % group) * head_dim
        for i in range(0, head_dim, LANES):
            _store_query(keys, scratch, queries + r * head_dim, i, load(heads, place + i) * scale)
        start_row(scratch, at + r, scratch, sums + r * size, head_dim)
    for position in range(low, high, KEY_BLOCK):
        num_keys = min(KEY_BLOCK, high - position)
        _score(
            position, num_keys, keys, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch,
            spare, queries, rows, scores,
        )  # fmt: skip
        if len(tree):
            for r in range(rows):
                index = (first + r) // group
                _apply_tree_mask(
                    tree[token + index, MASK], index, start - position, num_keys, scratch, scores + r * KEY_BLOCK
                )
        width = (num_keys + LANES - 1) // LANES * LANES
        for r in range(rows):
            last = start + (first + r) // group + 1
            unseen = max(0, last - window - position) if window else 0
            softmax_block(
                scratch, scores + r * KEY_BLOCK, width, unseen, min(last - position, width), scratch, at + r, scratch,
                sums + r * size, head_dim,
            )  # fmt: skip
        _add_values(
            position, num_keys, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch,
            spare, scores, rows, sums,
        )  # fmt: skip
    for r in range(rows):
        row, query_head = token + (first + r) // group, head * group + (first + r) % group
        finish_row(scratch, sums + r * size, head_dim, out, out_at + (row * num_heads + query_head) * head_dim)


@njit(**PART)
def _apply_tree_mask(mask, index, new_at, num_keys, scores, at):
    """Mask the scores of earlier new tokens that new token `index` of a request does not see in the draft tree.

    `new_at`: where the scores of new tokens begin in the key block; negative if they begin before it. (The largest
    score of a row stays finite: the row has seen a key before a whole key block is masked for it.)
    """
    if mask == -1:
        return
    for i in range(max(0, -new_at), min(index, num_keys - new_at)):
        if not (mask >> i) & 1:
            scores[at + new_at + i] = NEGATIVE_INFINITY


@njit(**PART)
def _score(
    position, count, keys, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare, queries,
    rows, scores,
):  # fmt: skip
    """Compute the scores of `count` keys, from `position` on, for all rows."""
    (pool,) = row_array(keys, block_size, scratch)
    size = row_size(keys, head_dim)
    transposed, step = spare + LANES * size, LANES * size
    for j in range(0, count, KEY_GROUPS * LANES):
        groups = KEY_GROUPS if count - j > (KEY_GROUPS - 1) * LANES else (count - j + LANES - 1) // LANES
        for g in range(groups):
            key = j + g * LANES
            source, row, _ = find_rows(
                keys, position + key, min(LANES, count - key), tables, table, block_size, layer_row, num_kv_heads,
                head, size, scratch, spare,
            )  # fmt: skip
            for i in range(0, size, LANES):
                transpose(pool, source + i, row, scratch, transposed + g * step + i * LANES)
        if groups == KEY_GROUPS:
            _score_tiles(keys, transposed, step, scratch, queries, head_dim, scores + j, rows, 4)
        else:
            for g in range(groups):
                at = transposed + g * step
                _score_tiles(keys, at, step, scratch, queries, head_dim, scores + j + g * LANES, rows, 1)


def _store_query(keys, scratch, at, i, query):
    """Store sixteen numbers of a query row that begins at `scratch[at]`, from its column i on."""
    raise NotImplementedError


def _score_tiles(keys, transposed, step, scratch, queries, head_dim, scores, rows, groups):
    """Compute the scores of a literal number of groups of sixteen transposed keys, which lie `step` floats apart."""
    raise NotImplementedError


def _add_values(
    position, count, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare,
    weights, rows, sums,
):  # fmt: skip
    """Add `count` weighted values, from `position` on, to the sums of all rows."""
    raise NotImplementedError


@njit(**PART)
def _add_float_values(
    position, count, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare,
    weights, rows, sums,
):  # fmt: skip
    if rows > TILE_ROWS:  # every tile reads the values: copied side by side they fit into the L1 cache
        for j in range(0, count, LANES):
            copy_sixteen(
                values, position + j, count - j, tables, table, block_size, layer_row, num_kv_heads, head, head_dim,
                scratch, spare + j * head_dim,
            )  # fmt: skip
        _add_rows(scratch, spare, head_dim, count, head_dim, scratch, weights, rows, sums)
        return
    (pool,) = row_array(values, block_size, scratch)
    j = 0
    while j < count:
        source, row, here = find_rows(
            values, position + j, count - j, tables, table, block_size, layer_row, num_kv_heads, head, head_dim,
            scratch, spare,
        )  # fmt: skip
        _add_rows(pool, source, row, here, head_dim, scratch, weights + j, rows, sums)
        j += here


@njit(**PART)
def _add_bfloat_values(
    position, count, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare,
    weights, rows, sums,
):  # fmt: skip
    (pool,) = row_array(values, block_size, scratch)
    size, copies = row_size(values, head_dim), spare + KEY_BLOCK // 2 * head_dim
    j = 0
    while j < count:
        source, row, here = find_rows(
            values, position + j, count - j, tables, table, block_size, layer_row, num_kv_heads, head, size, scratch,
            copies,
        )  # fmt: skip
        interleave_rows(pool, source, row, here, size, scratch, spare, j // 2, KEY_BLOCK // 2)
        j += here
    add_pair_rows(scratch, spare, head_dim, count, weights, KEY_BLOCK, rows, sums)


@njit(**PART)
def _add_rows(values, at, row, count, head_dim, scratch, weights, rows, sums):
    """Add `count` weighted values, which lie `row` numbers apart, to the sums of all rows."""
    size = head_dim + LANES
    for p in range(0, head_dim, 4 * LANES):
        if head_dim - p >= 4 * LANES:
            tiles(
                values, at + p, LANES, row, scratch, weights, KEY_BLOCK, count, scratch, sums + p, size, rows, True, 4
            )
        else:
            tiles(
                values, at + p, LANES, row, scratch, weights, KEY_BLOCK, count, scratch, sums + p, size, rows, True, 2
            )


@overload(_run_task, jit_options=PART)
def _typed_run_task(keys, rows, arguments):
    if keys[0].dtype == BFLOATS:
        return lambda keys, rows, arguments: _task(*arguments)

    def run(keys, rows, arguments):
        if LEAST_LANES <= rows <= LANES:
            attend_lanes(*arguments)
        else:
            _task(*arguments)

    return run


@overload(_store_query, jit_options=PART)
def _typed_store_query(keys, scratch, at, i, query):
    if keys[0].dtype == BFLOATS:
        return lambda keys, scratch, at, i, query: store_bfloats(scratch, at + i // 2, query)
    return lambda keys, scratch, at, i, query: store(scratch, at + i, query)


@overload(_score_tiles, jit_options=PART, prefer_literal=True)
def _typed_score_tiles(keys, transposed, step, scratch, queries, head_dim, scores, rows, groups):
    if keys[0].dtype == BFLOATS:

        def score(keys, transposed, step, scratch, queries, head_dim, scores, rows, groups):
            pair_tiles(
                scratch, transposed, step, queries, head_dim, head_dim // 2, scores, KEY_BLOCK, rows, False, groups
            )
    else:

        def score(keys, transposed, step, scratch, queries, head_dim, scores, rows, groups):
            tiles(
                scratch, transposed, step, LANES, scratch, queries, head_dim, head_dim, scratch, scores, KEY_BLOCK,
                rows, False, groups,
            )  # fmt: skip

    return score


@overload(_add_values, jit_options=PART)
def _typed_add_values(
    position, count, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare,
    weights, rows, sums,
):  # fmt: skip
    add = _add_bfloat_values if values[0].dtype == BFLOATS else _add_float_values

    def add_values(
        position, count, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch, spare,
        weights, rows, sums,
    ):  # fmt: skip
        add(
            position, count, values, tables, table, block_size, layer_row, num_kv_heads, head, head_dim, scratch,
            spare, weights, rows, sums,
        )  # fmt: skip

    return add_values
