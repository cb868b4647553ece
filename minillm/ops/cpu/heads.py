"""One round of the draft heads: what every thread runs.

It is `minillm.speculative.draft_heads` again, line by line, as `step.py` is the decoder: each product is divided by its
outputs, the rest by requests, with a barrier where a thread needs what others computed. The target's unembedding
multiplies all positions of all requests at once, in the panels that the target's own step reads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from minillm.ops.cpu.compiled import PART, entry_point
from minillm.ops.cpu.matrix_fields import OUTPUTS
from minillm.ops.cpu.norms import rms_norm, silu, silu_gate
from minillm.ops.cpu.panels import SUMS_SIZE, multiply
from minillm.ops.cpu.simd import LANES, ONE, load, store
from minillm.ops.cpu.step import argmax, copy, embed_row, round_rows
from minillm.ops.cpu.team import barrier, call_at, join_team, thread_range

HIDDEN, INNER, POSITION_RANK, TOKEN_RANK, NUM_DRAFTS, VOCABULARY, TIED, TOKEN_NORM, EPS, KIND = range(10)
"""Indices in `dims`. TOKEN_NORM, EPS: where the norm's weights and its ε are in `HeadsWeights.vectors`. KIND: the row
of the confidences that cuts the chains."""
GATE_UP, DOWN, POSITION_IN, CONTEXT, CONFIDENCE, STATE, NARROW, POSITION_OUT = range(8)
"""Rows of `HeadsWeights.matrices`. NARROW is W D; POSITION_OUT the first of one matrix Bᵢ per position."""
THREAD_SIZE = SUMS_SIZE + LANES
"""Floats of scratch memory that each thread needs for itself."""


class HeadsWeights(NamedTuple):
    """The packed heads."""

    matrices: np.ndarray
    """`[7 + num_drafts, fields]` (`matrix_fields`)."""
    vectors: np.ndarray
    """Norm, ε and bias, float32, flat."""
    panels: np.ndarray
    """All matrices."""
    tokens: np.ndarray
    """Q e of every token: `[vocab · token_rank]`."""


class Unembedding(NamedTuple):
    """The target's unembedding and embedding, as its step has them (`step.Weights`)."""

    head: np.ndarray
    matrix: np.ndarray
    vectors: np.ndarray
    embedding: np.ndarray


class RoundArrays(NamedTuple):
    """Inputs and results of a round of `n` requests."""

    hidden: np.ndarray
    """`[n · hidden]`."""
    last: np.ndarray
    """`[n]`, int64: the last tokens."""
    counts: np.ndarray
    """`[n]`, int64: most drafts of each request; on return the number after the cut."""
    logits: np.ndarray
    """`[n · longest, outputs]`, flat, with the largest of `counts` on return as `longest`: W sᵢ. If `drafted` has
    columns, on return the whole logits of the drafts."""
    contexts: np.ndarray
    """`[n, num_drafts · token_rank]`, flat: Pᵢ c."""
    drafted: np.ndarray
    """`[n, num_drafts]` int64: the argmax at every position; `[n, 0]`: the drafts are drawn outside."""


@njit(**PART)
def areas(dims, n):
    """The index in the scratch memory at which each area begins: the inputs of the MLP, c, gate and up, gated, inputs
    of all Bᵢ, of one, confidences, s, z, z before its nonlinearity, scales of the codes, scratch of the threads."""
    x = 0
    c = x + n * 2 * dims[HIDDEN]
    gate_up = c + n * dims[HIDDEN]
    gated = gate_up + n * 2 * dims[INNER]
    narrow = gated + n * dims[INNER]
    position = narrow + n * dims[NUM_DRAFTS] * dims[POSITION_RANK]
    confidence = position + n * dims[NUM_DRAFTS] * dims[POSITION_RANK]
    s = confidence + n * (-(-2 * dims[NUM_DRAFTS] // LANES) * LANES)
    z = s + n * dims[NUM_DRAFTS] * dims[HIDDEN]
    total = z + n * dims[TOKEN_RANK]
    scales = total + n * dims[TOKEN_RANK]
    threads = (scales + n * dims[NUM_DRAFTS] + LANES) // LANES * LANES
    return x, c, gate_up, gated, narrow, position, confidence, s, z, total, scales, threads


@entry_point()
def run(sync, threads, dims, weights, target, round_, min_survival, floats, codes):
    """One thread's part of a round. `floats`, `codes`: scratch memory."""
    team = join_team(sync, threads)
    if team.thread_id < 0:
        return
    matrices, vectors, w, tokens = weights
    hidden_states, last, counts, logits, contexts, drafted = round_
    n, hidden, inner, num_drafts = len(last), dims[HIDDEN], dims[INNER], dims[NUM_DRAFTS]
    rank, token_rank = dims[POSITION_RANK], dims[TOKEN_RANK]
    x, c, gate_up, gated, narrow, position, confidence, s, z, total, scales, threads_at = areas(dims, n)
    thread_at = threads_at + team.thread_id * THREAD_SIZE

    for r in range(team.thread_id, n, team.num_threads):
        copy(hidden_states, r * hidden, floats, c + r * hidden, hidden)
        at = x + r * 2 * hidden
        copy(hidden_states, r * hidden, floats, at, hidden)
        embed_row(target.embedding, target.head, hidden, dims[TIED], last[r], floats, at + hidden)
        rms_norm(floats, at + hidden, hidden, vectors, dims[TOKEN_NORM], vectors[dims[EPS]], floats, at + hidden)
    barrier(team)
    round_rows(w, team, matrices[GATE_UP], n, vectors, floats, x, codes, scales)
    begin, end = thread_range(team, inner // LANES)
    for half in range(2):
        shift = half * inner // LANES
        multiply(
            w, matrices[GATE_UP], vectors, floats, x, codes, scales, n, begin + shift, end + shift,
            floats, gate_up, 2 * inner, False, thread_at,
        )  # fmt: skip
    for r in range(n):
        at, column = gate_up + r * 2 * inner, begin * LANES
        silu_gate(floats, at + column, at + inner + column, (end - begin) * LANES, floats, gated + r * inner + column)
    barrier(team)
    product(team, w, matrices[DOWN], vectors, floats, gated, codes, scales, n, floats, c, hidden, True, thread_at)
    round_rows(w, team, matrices[CONTEXT], n, vectors, floats, c, codes, scales)
    for matrix, out, out_at in (
        (matrices[POSITION_IN], floats, narrow), (matrices[CONFIDENCE], floats, confidence),
        (matrices[CONTEXT], contexts, 0),
    ):  # fmt: skip
        begin, end = thread_range(team, matrix[OUTPUTS] // LANES)
        multiply(
            w, matrix, vectors, floats, c, codes, scales, n, begin, end, out, out_at, matrix[OUTPUTS], False, thread_at
        )
    barrier(team)

    if team.thread_id == 0:
        for r in range(n):
            cut(
                floats,
                confidence + r * matrices[CONFIDENCE][OUTPUTS] + dims[KIND] * num_drafts,
                min_survival,
                counts,
                r,
            )
    for r in range(team.thread_id, n, team.num_threads):
        for i in range(num_drafts):
            silu(floats, narrow + (r * num_drafts + i) * rank, rank, floats, position + (i * n + r) * rank)
    barrier(team)
    longest = 0
    for r in range(n):
        longest = max(longest, counts[r])
    if longest == 0:
        return
    for r in range(team.thread_id, n, team.num_threads):
        for i in range(longest):
            copy(floats, c + r * hidden, floats, s + (r * longest + i) * hidden, hidden)
    barrier(team)
    for i in range(longest):
        product(
            team, w, matrices[POSITION_OUT + i], vectors, floats, position + i * n * rank, codes, scales, n,
            floats, s + i * hidden, longest * hidden, True, thread_at,
        )  # fmt: skip
    outputs = target.matrix[OUTPUTS]
    product(
        team, target.head, target.matrix, target.vectors, floats, s, codes, scales, n * longest,
        logits, 0, outputs, False, thread_at,
    )  # fmt: skip
    if drafted.shape[1] == 0:
        return

    for i in range(longest):
        if i > 0:
            product(
                team, w, matrices[STATE], vectors, floats, z, codes, scales, n, floats, total, token_rank, False,
                thread_at,
            )  # fmt: skip
        for r in range(team.thread_id, n, team.num_threads):
            token = last[r] if i == 0 else max(0, drafted[r, i - 1])
            for k in range(0, token_rank, LANES):
                added = load(contexts, (r * num_drafts + i) * token_rank + k) + load(tokens, token * token_rank + k)
                if i > 0:
                    added = added + load(floats, total + r * token_rank + k)
                store(floats, total + r * token_rank + k, added)
            silu(floats, total + r * token_rank, token_rank, floats, z + r * token_rank)
        barrier(team)
        product(
            team, w, matrices[NARROW], vectors, floats, z, codes, scales, n, logits, i * outputs, longest * outputs,
            True, thread_at,
        )  # fmt: skip
        for r in range(team.thread_id, n, team.num_threads):
            drafted[r, i] = argmax(logits, (r * longest + i) * outputs, dims[VOCABULARY])
        barrier(team)


@njit(**PART)
def product(team, w, matrix, vectors, floats, x_at, codes, scales, rows, out, out_at, out_row, add, thread_at):
    """This thread's outputs of one linear layer (`panels.multiply`), then a barrier."""
    round_rows(w, team, matrix, rows, vectors, floats, x_at, codes, scales)
    begin, end = thread_range(team, matrix[OUTPUTS] // LANES)
    multiply(w, matrix, vectors, floats, x_at, codes, scales, rows, begin, end, out, out_at, out_row, add, thread_at)
    barrier(team)


@njit(**PART)
def cut(confidences, at, min_survival, counts, request):
    """Lower the number of drafts of a request to those whose estimated survival is at least `min_survival`."""
    survival, count = ONE, 0
    while count < counts[request]:
        survival = survival / (ONE + np.exp(-confidences[at + count]))
        if survival < min_survival:
            break
        count += 1
    counts[request] = count


@entry_point(parallel=True)
def run_together(address, sync, threads, dims, weights, target, round_, min_survival, floats, codes):
    """`run`, whose machine code lies at `address`, on `threads` threads at once."""
    for _ in prange(threads):
        call_at(address, (sync, threads, dims, weights, target, round_, min_survival, floats, codes))
