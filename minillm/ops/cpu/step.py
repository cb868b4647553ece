"""The whole decoder for one ragged step: what every thread runs.

It is `minillm.models.decoder` again, line by line, with one difference: there is a barrier between two lines if the
second needs what other threads computed in the first. Each linear layer is divided by its outputs, attention by KV
heads and query rows, the rest by tokens. Activations of all tokens lie in `scratch.floats`, which every thread reads
and writes; `…_at` is the index at which something begins there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from minillm.ops.cpu.attention import attend, scratch_size
from minillm.ops.cpu.compiled import OPTIONS, PART, entry_point
from minillm.ops.cpu.kv_rows import write_row
from minillm.ops.cpu.matrix_fields import COLUMNS, NONE, OUTPUTS
from minillm.ops.cpu.norms import rms_norm, rotate, silu_gate
from minillm.ops.cpu.panels import SUMS_SIZE, TILED, multiply, unpack_row
from minillm.ops.cpu.rounding import prepare_row
from minillm.ops.cpu.simd import LANES, ONE, ZERO, largest, load, no_inline, splat, store, total
from minillm.ops.cpu.softmax import exp_of_negative, larger
from minillm.ops.cpu.team import barrier, call_at, join_team, thread_range

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, BLOCK_SIZE, SLOTS, FINAL_NORM, TIED, VOCABULARY = range(11)
"""Indices in `dims`."""
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, ROTATES, WINDOW = range(6)
"""Indices in a row of `Weights.layers`: where the layer's norms begin in `Weights.vectors`, whether it applies RoPE,
its sliding window (0: none)."""
QKV, OUT, GATE_UP, DOWN = range(4)
"""A layer's matrices, in this order; the unembedding follows those of the last layer."""
EPS = 0
"""Index of ε in `Weights.vectors`."""
NO_TOKEN, ENDED = -1, -2
"""Stand for a draft: where logits are NaN or infinite, and behind the end of a chain that ends early."""
INFINITY = np.float32(np.inf)
SEARCHED = 256
"""Numbers of which `argmax` first finds the largest, and then where it is."""
DEPTH = 0
"""Column of `Inputs.tree`: what is added to the position of a request's first new token. The other is the mask
(`attention.MASK`)."""


class Weights(NamedTuple):
    """A packed model (`minillm.runtime.packed_decoder`)."""

    layers: np.ndarray
    """`[layers, 6]`."""
    matrices: np.ndarray
    """`[4 · layers + 1, fields]` (`matrix_fields`)."""
    vectors: np.ndarray
    """Norms, scales and biases, float32, flat."""
    panels: np.ndarray
    """All matrices of the layers."""
    head: np.ndarray
    """The unembedding, in panels."""
    embedding: np.ndarray
    """`[vocab · hidden]`; empty if it is tied to the unembedding."""
    cos: np.ndarray
    signed_sin: np.ndarray
    """`[positions · head_dim]`."""


class Inputs(NamedTuple):
    """One ragged step, all int64."""

    token_ids: np.ndarray
    """`[tokens]`."""
    requests: np.ndarray
    """`[requests, 5]`: index of its first token, number of new tokens, of all tokens in its block table, where that
    begins in `tables`, number of tokens that it leaves out (see `minillm.batch.Segment`)."""
    tables: np.ndarray
    """All block tables, one after the other."""
    tree: np.ndarray
    """`[tokens, 2]` if a request brings a draft tree (see `minillm.batch.Segment`), else `[0, 2]`."""
    wanted: np.ndarray
    """The rows whose logits are computed."""
    observed: np.ndarray
    """The tokens whose queries are copied to `queries`."""


class Scratch(NamedTuple):
    """Memory of a step."""

    floats: np.ndarray
    """Activations of all tokens (`areas`), then `thread_size` floats for each thread."""
    codes: np.ndarray
    """Activations rounded to bytes or bfloat16s."""
    thread_size: int


@njit(**PART)
def areas(dims, tokens):
    """The index in `Scratch.floats` at which each area begins: residual stream, normalised rows, heads, results of
    attention, gate and up, gated, scales of the codes, scratch of the threads. The last is also the size of all areas
    before it."""
    x = 0
    normed = x + tokens * dims[HIDDEN]
    heads = normed + tokens * dims[HIDDEN]
    attended = heads + tokens * (dims[HEADS] + 2 * dims[KV_HEADS]) * dims[HEAD_DIM]
    gate_up = attended + tokens * dims[HEADS] * dims[HEAD_DIM]
    gated = gate_up + tokens * 2 * dims[INTERMEDIATE]
    scales = gated + tokens * dims[INTERMEDIATE]
    threads = (scales + tokens + LANES) // LANES * LANES
    return x, normed, heads, attended, gate_up, gated, scales, threads


def thread_scratch_size(dims):
    """Floats of scratch memory that each thread needs for itself."""
    return max(SUMS_SIZE, scratch_size(dims[HEAD_DIM])) + LANES


@njit(inline="always", **OPTIONS)
def forward(team, dims, weights, keys, values, inputs, n, scratch, logits, queries):
    """This thread's part of one forward of the first `n` tokens; `logits`: `[wanted rows, outputs]`, flat; `queries`:
    `[layers, observed tokens, heads · head_dim]`, flat.

    It is inlined into `run`, so that numba compiles it only once.
    """
    layers, matrices, vectors, w, head, embedding, cos, signed_sin = weights
    token_ids, requests, tables, tree, wanted, observed = inputs
    floats, codes, thread_size = scratch
    hidden, head_dim, inter = dims[HIDDEN], dims[HEAD_DIM], dims[INTERMEDIATE]
    num_heads, num_kv, eps = dims[HEADS], dims[KV_HEADS], vectors[EPS]
    q_size, heads_row = num_heads * head_dim, (num_heads + 2 * num_kv) * head_dim
    x_at, normed_at, heads_at, attended_at, gate_up_at, gated_at, scales_at, threads_at = areas(dims, n)
    thread_at = threads_at + team.thread_id * thread_size

    for i in range(team.thread_id, n, team.num_threads):
        embed_row(embedding, head, hidden, dims[TIED], token_ids[i], floats, x_at + i * hidden)
    for layer in range(dims[LAYERS]):
        fields, first = layers[layer], 4 * layer
        normalise(
            team, w, matrices[first + QKV], n, vectors, fields[INPUT_NORM], eps, floats, x_at, normed_at, codes,
            scales_at,
        )  # fmt: skip
        barrier(team)
        begin, end = thread_range(team, heads_row // LANES)
        multiply(
            w, matrices[first + QKV], vectors, floats, normed_at, codes, scales_at, n, begin, end,
            floats, heads_at, heads_row, False, thread_at,
        )  # fmt: skip
        barrier(team)
        layer_row = layer * dims[SLOTS] * num_kv
        norm_rope_store(
            team, fields, dims, requests, tables, tree, vectors, eps, cos, signed_sin, floats, heads_at,
            keys, values, layer_row,
        )  # fmt: skip
        barrier(team)
        for i in range(team.thread_id, len(observed), team.num_threads):
            copy(floats, heads_at + observed[i] * heads_row, queries, (layer * len(observed) + i) * q_size, q_size)
        attend(
            team, floats, heads_at, heads_row, num_heads, num_kv, head_dim, fields[WINDOW],
            requests, tables, tree, dims[BLOCK_SIZE], layer_row, keys, values, floats, attended_at, floats, thread_at,
        )  # fmt: skip
        barrier(team)
        if layer == dims[LAYERS] - 1:  # from here on only the wanted rows
            n = len(wanted)
            if team.thread_id == 0:
                for i in range(n):
                    copy(floats, x_at + wanted[i] * hidden, floats, x_at + i * hidden, hidden)
                    copy(floats, attended_at + wanted[i] * q_size, floats, attended_at + i * q_size, q_size)
            barrier(team)
        round_rows(w, team, matrices[first + OUT], n, vectors, floats, attended_at, codes, scales_at)
        begin, end = thread_range(team, hidden // LANES)
        multiply(
            w, matrices[first + OUT], vectors, floats, attended_at, codes, scales_at, n, begin, end,
            floats, x_at, hidden, True, thread_at,
        )  # fmt: skip
        barrier(team)
        normalise(
            team, w, matrices[first + GATE_UP], n, vectors, fields[POST_NORM], eps, floats, x_at, normed_at, codes,
            scales_at,
        )  # fmt: skip
        barrier(team)
        begin, end = thread_range(team, inter // LANES)
        for half in range(2):
            shift = half * inter // LANES
            multiply(
                w, matrices[first + GATE_UP], vectors, floats, normed_at, codes, scales_at, n, begin + shift,
                end + shift, floats, gate_up_at, 2 * inter, False, thread_at,
            )  # fmt: skip
        for i in range(n):
            at, column, count = gate_up_at + i * 2 * inter, begin * LANES, (end - begin) * LANES
            silu_gate(floats, at + column, at + inter + column, count, floats, gated_at + i * inter + column)
        barrier(team)
        round_rows(w, team, matrices[first + DOWN], n, vectors, floats, gated_at, codes, scales_at)
        begin, end = thread_range(team, hidden // LANES)
        multiply(
            w, matrices[first + DOWN], vectors, floats, gated_at, codes, scales_at, n, begin, end,
            floats, x_at, hidden, True, thread_at,
        )  # fmt: skip
        barrier(team)
    matrix = matrices[4 * dims[LAYERS]]
    normalise(team, head, matrix, n, vectors, dims[FINAL_NORM], eps, floats, x_at, normed_at, codes, scales_at)
    barrier(team)
    begin, end = thread_range(team, matrix[OUTPUTS] // LANES)
    multiply(
        head, matrix, vectors, floats, normed_at, codes, scales_at, n, begin, end,
        logits, 0, matrix[OUTPUTS], False, thread_at,
    )  # fmt: skip
    barrier(team)


@njit(**PART)
def normalise(team, w, matrix, n, vectors, norm, eps, floats, x_at, normed_at, codes, scales_at):
    """RMSNorm of this thread's rows, which are then rounded for `matrix` if its weights need that."""
    hidden = matrix[COLUMNS]
    for i in range(team.thread_id, n, team.num_threads):
        at = normed_at + i * hidden
        rms_norm(floats, x_at + i * hidden, hidden, vectors, norm, eps, floats, at)
        prepare_row(w, matrix, vectors, floats, at, codes, i, floats, scales_at + i)


@njit(**PART)
def norm_rope_store(
    team, fields, dims, requests, tables, tree, vectors, eps, cos, signed_sin, floats, heads_at, keys, values,
    layer_row,
):  # fmt: skip
    """Normalise and rotate the queries and keys of this thread's tokens, and store their keys and values."""
    no_inline()
    num_heads, num_kv, head_dim, block_size = dims[HEADS], dims[KV_HEADS], dims[HEAD_DIM], dims[BLOCK_SIZE]
    heads_row = (num_heads + 2 * num_kv) * head_dim
    for r in range(requests.shape[0]):
        token, count, seq_len, table, num_skipped = requests[r]
        for i in range(count):
            if (token + i) % team.num_threads != team.thread_id:
                continue
            index, row = seq_len - count + i, heads_at + (token + i) * heads_row
            position = num_skipped + (seq_len - count + tree[token + i, DEPTH] if len(tree) else index)
            for h in range(num_heads + num_kv):
                at = row + h * head_dim
                norm = fields[Q_NORM] if h < num_heads else fields[K_NORM]
                if norm != NONE:
                    rms_norm(floats, at, head_dim, vectors, norm, eps, floats, at)
                if fields[ROTATES]:
                    rotate(floats, at, head_dim, cos, signed_sin, position)
            slot = tables[table + index // block_size] * block_size + index % block_size
            for h in range(num_kv):
                at, kv_row = row + (num_heads + h) * head_dim, layer_row + slot * num_kv + h
                write_row(keys, kv_row, floats, at, head_dim)
                write_row(values, kv_row, floats, at + num_kv * head_dim, head_dim)


@njit(**PART)
def copy(source, source_at, target, target_at, size):
    """Copy `size` numbers."""
    for i in range(0, size, LANES):
        store(target, target_at + i, load(source, source_at + i))


@njit(**PART)
def embed_row(embedding, head, hidden, tied, token, out, at):
    """The token's row of the embedding; if that is tied to the unembedding, it is gathered from its panels."""
    if tied:
        unpack_row(head, hidden, token, out, at)
    else:
        for i in range(0, hidden, LANES):
            store(out, at + i, load(embedding, token * hidden + i))


def round_rows(w, team, matrix, n, vectors, floats, x_at, codes, scales_at):
    """Round `n` rows for the weights `w` (see `prepare_row`), then wait at a barrier. Does nothing for weights for
    which `prepare_row` does nothing."""
    raise NotImplementedError


@overload(round_rows, jit_options=PART)
def _typed_round_rows(w, team, matrix, n, vectors, floats, x_at, codes, scales_at):
    as_floats = (types.float32, types.int16, types.uint16, types.int8)
    if w.dtype in as_floats and w.dtype not in TILED:
        return lambda w, team, matrix, n, vectors, floats, x_at, codes, scales_at: None

    def round_and_wait(w, team, matrix, n, vectors, floats, x_at, codes, scales_at):
        for i in range(team.thread_id, n, team.num_threads):
            prepare_row(w, matrix, vectors, floats, x_at + i * matrix[COLUMNS], codes, i, floats, scales_at + i)
        barrier(team)

    return round_and_wait


@entry_point()
def run(sync, threads, drafted, survival, min_survival, dims, weights, keys, values, inputs, scratch, logits, queries):
    """One thread's part of a step. `logits` and `queries` are written, see `forward`.

    If `drafted` (`[requests, steps]`, int64) has columns, the step is repeated until they are filled, each time with
    the argmax of every request as its next token; `inputs.wanted` must then be the last row of each request. Where
    logits are NaN or infinite, `drafted` has `NO_TOKEN`.
    `survival` (`[requests]`, float32) is multiplied by the probability of every such token. A chain ends before the
    token with which it falls below `min_survival`: then `drafted` has `ENDED`, as it must have before the call. An
    empty `survival`: no chain ends early.
    `inputs.token_ids`, `inputs.requests` and `inputs.wanted` are overwritten.
    """
    team = join_team(sync, threads)
    if team.thread_id < 0:
        return
    token_ids, requests, wanted = inputs.token_ids, inputs.requests, inputs.wanted
    count, outputs = requests.shape[0], weights.matrices[4 * dims[LAYERS]][OUTPUTS]
    tokens, steps = len(token_ids), drafted.shape[1]
    for i in range(max(steps, 1)):
        forward(team, dims, weights, keys, values, inputs, tokens, scratch, logits, queries)
        if steps == 0:
            break
        for r in range(team.thread_id, count, team.num_threads):
            at, size = r * outputs, dims[VOCABULARY]
            if len(survival) == 0:
                drafted[r, i] = argmax(logits, at, size)
            elif survival[r] >= min_survival:
                token = argmax(logits, at, size)
                if token != NO_TOKEN:
                    survival[r] *= probability(logits, at, size, token)
                if token == NO_TOKEN or survival[r] >= min_survival:
                    drafted[r, i] = token
        barrier(team)
        if i == steps - 1 or (len(survival) and all_below(survival, min_survival)):
            break
        if team.thread_id == 0:
            for r in range(count):
                token_ids[r], wanted[r] = max(0, drafted[r, i]), r
                requests[r, 0], requests[r, 1], requests[r, 2] = r, 1, requests[r, 2] + 1
        tokens = count
        barrier(team)


@njit(**PART)
def argmax(logits, at, size):
    """The index of the (first) largest of `size` numbers; `NO_TOKEN` if one of them is NaN or infinite."""
    best, peak, not_finite, end = at, -INFINITY, splat(ZERO), at + size
    for begin in range(at, end - size % LANES, SEARCHED):
        lanes = splat(-INFINITY)
        for i in range(begin, min(begin + SEARCHED, end - LANES + 1), LANES):
            numbers = load(logits, i)
            lanes = larger(numbers, lanes)
            not_finite = not_finite + (numbers - numbers)  # 0, or NaN
        high = largest(lanes)
        if high > peak:
            best, peak = begin, high
    is_broken = total(not_finite) != ZERO
    for i in range(end - size % LANES, end):
        is_broken |= not abs(logits[i]) < INFINITY
        if logits[i] > peak:
            best, peak = i, logits[i]
    if is_broken:
        return NO_TOKEN
    while logits[best] != peak:
        best += 1
    return best - at


@njit(**PART)
def probability(logits, at, size, token):
    """The softmax of the largest of `size` finite logits, which is `token`'s."""
    largest, lanes = splat(logits[at + token]), splat(ZERO)
    whole = size // LANES * LANES
    for i in range(at, at + whole, LANES):
        lanes = lanes + exp_of_negative(load(logits, i) - largest)
    others = total(lanes)
    for i in range(at + whole, at + size):
        others += np.exp(logits[i] - logits[at + token])
    return ONE / others


@njit(**PART)
def all_below(numbers, limit):
    """Whether every number is below `limit`."""
    found = True
    for number in numbers:
        found &= number < limit
    return found


@entry_point(parallel=True)
def run_together(
    address, sync, threads, drafted, survival, min_survival, dims, weights, keys, values, inputs, scratch, logits,
    queries,
):  # fmt: skip
    """`run`, whose machine code lies at `address`, on `threads` threads at once."""
    for _ in prange(threads):
        call_at(
            address, (
                sync, threads, drafted, survival, min_survival, dims, weights, keys, values, inputs, scratch, logits,
                queries,
            ),
        )  # fmt: skip
