"""The whole decoder for one ragged step: what every thread of the team runs.

It is `minillm.models.decoder` again, line by line, with one difference: between two lines that need each other's
results the threads meet. Each linear layer is cut by its outputs, attention by KV heads and query rows, the rest by
tokens. Activations of all tokens lie in `scratch`, which every thread reads and writes.
"""

from __future__ import annotations

from numba import njit, prange, types
from numba.extending import overload

from minillm.ops.cpu.attention import attend, scratch_size
from minillm.ops.cpu.compiled import OPTIONS, entry_point
from minillm.ops.cpu.matrix_fields import COLUMNS, NONE, OUTPUTS
from minillm.ops.cpu.norms import rms_norm, rotate, silu_gate
from minillm.ops.cpu.panels import SUMS_SIZE, TILED, multiply, unpack_row
from minillm.ops.cpu.rounding import round_row
from minillm.ops.cpu.rows import write_row
from minillm.ops.cpu.simd import LANES, load, stay_whole, store
from minillm.ops.cpu.team import join, meet, share

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, BLOCK_SIZE, SLOTS, FINAL_NORM, TIED, VOCABULARY = range(11)
"""The model's numbers, `dims`."""
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, ROTATES, WINDOW = range(6)
"""A layer's numbers: where its norms begin among the vectors, whether it applies RoPE, its window (0: none)."""
QKV, OUT, GATE_UP, DOWN = range(4)
"""A layer's matrices, in this order; the unembedding follows those of the last layer."""
EPS = 0
"""Where ε lies among the vectors."""


@njit(**OPTIONS)
def areas(dims, tokens):
    """Where things begin in `scratch`: residual stream, normed rows, heads, attention's results, gate and up, gated,
    scales of the codes, what each thread has for itself; then the size of that."""
    x = 0
    normed = x + tokens * dims[HIDDEN]
    heads = normed + tokens * dims[HIDDEN]
    attended = heads + tokens * (dims[HEADS] + 2 * dims[KV_HEADS]) * dims[HEAD_DIM]
    gate_up = attended + tokens * dims[HEADS] * dims[HEAD_DIM]
    gated = gate_up + tokens * 2 * dims[INTERMEDIATE]
    scales = gated + tokens * dims[INTERMEDIATE]
    own = (scales + tokens + LANES) // LANES * LANES
    return x, normed, heads, attended, gate_up, gated, scales, own


def own_size(dims):
    """Floats that each thread needs for itself."""
    return max(SUMS_SIZE, scratch_size(dims[HEAD_DIM])) + LANES


@njit(inline="always", **OPTIONS)
def forward(
    number, size, sync, dims, layers, matrices, vectors, w, head, embedding, cos, signed_sin, keys, values,
    token_ids, requests, tables, wanted, scratch, own_floats, codes, logits,
):  # fmt: skip
    """Thread `number`'s part of one forward. `wanted`: the rows whose logits go to `logits` (`[rows, outputs]`).

    It is copied into `run`, so that it is compiled once and not for itself, too.
    """
    n, hidden, head_dim, inter = len(token_ids), dims[HIDDEN], dims[HEAD_DIM], dims[INTERMEDIATE]
    num_heads, num_kv, eps = dims[HEADS], dims[KV_HEADS], vectors[EPS]
    q_size, heads_row = num_heads * head_dim, (num_heads + 2 * num_kv) * head_dim
    x_at, normed_at, heads_at, attended_at, gate_up_at, gated_at, scales_at, own_at = areas(dims, n)
    own_at += number * own_floats

    for i in range(number, n, size):
        embed(embedding, head, dims, token_ids[i], scratch, x_at + i * hidden)
    for layer in range(dims[LAYERS]):
        fields, first = layers[layer], 4 * layer
        normalise(
            number, size, w, matrices[first + QKV], n, vectors, fields[INPUT_NORM], eps, scratch, x_at, normed_at,
            codes, scales_at,
        )  # fmt: skip
        meet(sync, size)
        begin, end = share(heads_row // LANES, number, size)
        multiply(
            w, matrices[first + QKV], vectors, scratch, normed_at, codes, scales_at, n, begin, end,
            scratch, heads_at, heads_row, False, own_at,
        )  # fmt: skip
        meet(sync, size)
        layer_row = layer * dims[SLOTS] * num_kv
        keep(
            number, size, fields, dims, requests, tables, vectors, eps, cos, signed_sin, scratch, heads_at,
            keys, values, layer_row,
        )  # fmt: skip
        meet(sync, size)
        attend(
            number, size, scratch, heads_at, heads_row, num_heads, num_kv, head_dim, fields[WINDOW],
            requests, tables, dims[BLOCK_SIZE], layer_row, keys, values, scratch, attended_at, scratch, own_at,
        )  # fmt: skip
        meet(sync, size)
        if layer == dims[LAYERS] - 1:  # from here on only the rows that are wanted
            n = len(wanted)
            if number == 0:
                for i in range(n):
                    copy(scratch, x_at + wanted[i] * hidden, scratch, x_at + i * hidden, hidden)
                    copy(scratch, attended_at + wanted[i] * q_size, scratch, attended_at + i * q_size, q_size)
            meet(sync, size)
        round_rows(w, number, size, matrices[first + OUT], n, vectors, scratch, attended_at, codes, scales_at, sync)
        begin, end = share(hidden // LANES, number, size)
        multiply(
            w, matrices[first + OUT], vectors, scratch, attended_at, codes, scales_at, n, begin, end,
            scratch, x_at, hidden, True, own_at,
        )  # fmt: skip
        meet(sync, size)
        normalise(
            number, size, w, matrices[first + GATE_UP], n, vectors, fields[POST_NORM], eps, scratch, x_at, normed_at,
            codes, scales_at,
        )  # fmt: skip
        meet(sync, size)
        begin, end = share(inter // LANES, number, size)
        for half in range(2):
            shift = half * inter // LANES
            multiply(
                w, matrices[first + GATE_UP], vectors, scratch, normed_at, codes, scales_at, n, begin + shift,
                end + shift, scratch, gate_up_at, 2 * inter, False, own_at,
            )  # fmt: skip
        for i in range(n):
            at, column, many = gate_up_at + i * 2 * inter, begin * LANES, (end - begin) * LANES
            silu_gate(scratch, at + column, at + inter + column, many, scratch, gated_at + i * inter + column)
        meet(sync, size)
        round_rows(w, number, size, matrices[first + DOWN], n, vectors, scratch, gated_at, codes, scales_at, sync)
        begin, end = share(hidden // LANES, number, size)
        multiply(
            w, matrices[first + DOWN], vectors, scratch, gated_at, codes, scales_at, n, begin, end,
            scratch, x_at, hidden, True, own_at,
        )  # fmt: skip
        meet(sync, size)
    matrix = matrices[4 * dims[LAYERS]]
    normalise(number, size, head, matrix, n, vectors, dims[FINAL_NORM], eps, scratch, x_at, normed_at, codes, scales_at)
    meet(sync, size)
    begin, end = share(matrix[OUTPUTS] // LANES, number, size)
    multiply(
        head, matrix, vectors, scratch, normed_at, codes, scales_at, n, begin, end,
        logits, 0, matrix[OUTPUTS], False, own_at,
    )  # fmt: skip
    meet(sync, size)


@njit(**OPTIONS)
def normalise(number, size, w, matrix, n, vectors, norm, eps, scratch, x_at, normed_at, codes, scales_at):
    """RMSNorm of this thread's rows, made ready to be multiplied by `matrix`."""
    hidden = matrix[COLUMNS]
    for i in range(number, n, size):
        at = normed_at + i * hidden
        rms_norm(scratch, x_at + i * hidden, hidden, vectors, norm, eps, scratch, at)
        round_row(w, matrix, vectors, scratch, at, codes, i, scratch, scales_at + i)


@njit(**OPTIONS)
def keep(
    number, size, fields, dims, requests, tables, vectors, eps, cos, signed_sin, scratch, heads_at, keys, values,
    layer_row,
):  # fmt: skip
    """Normalise and rotate the queries and keys of this thread's tokens, and store their keys and values."""
    stay_whole()
    num_heads, num_kv, head_dim, block_size = dims[HEADS], dims[KV_HEADS], dims[HEAD_DIM], dims[BLOCK_SIZE]
    heads_row = (num_heads + 2 * num_kv) * head_dim
    for r in range(requests.shape[0]):
        token, count, seq_len, table = requests[r]
        for i in range(count):
            if (token + i) % size != number:
                continue
            position, row = seq_len - count + i, heads_at + (token + i) * heads_row
            for h in range(num_heads + num_kv):
                at = row + h * head_dim
                norm = fields[Q_NORM] if h < num_heads else fields[K_NORM]
                if norm != NONE:
                    rms_norm(scratch, at, head_dim, vectors, norm, eps, scratch, at)
                if fields[ROTATES]:
                    rotate(scratch, at, head_dim, cos, signed_sin, position)
            slot = tables[table + position // block_size] * block_size + position % block_size
            for h in range(num_kv):
                at, place = row + (num_heads + h) * head_dim, layer_row + slot * num_kv + h
                write_row(keys, place, scratch, at, head_dim)
                write_row(values, place, scratch, at + num_kv * head_dim, head_dim)


@njit(**OPTIONS)
def copy(source, source_at, target, target_at, size):
    """Copy `size` numbers."""
    for i in range(0, size, LANES):
        store(target, target_at + i, load(source, source_at + i))


@njit(**OPTIONS)
def embed(embedding, head, dims, token, out, at):
    """The token's row of the embedding; if that is tied to the unembedding, it is gathered from its panels."""
    hidden = dims[HIDDEN]
    if dims[TIED]:
        unpack_row(head, hidden, token, out, at)
    else:
        for i in range(0, hidden, LANES):
            store(out, at + i, load(embedding, token * hidden + i))


def round_rows(w, number, size, matrix, n, vectors, scratch, x_at, codes, scales_at, sync):
    """For weights whose inputs have to be made ready (see `round_row`): do so with `n` rows together, and meet. Else
    nothing."""
    raise NotImplementedError


@overload(round_rows, jit_options=OPTIONS)
def _typed_round_rows(w, number, size, matrix, n, vectors, scratch, x_at, codes, scales_at, sync):
    if w.dtype not in (types.uint8, types.boolean, types.uint32, types.int32, *TILED):
        return lambda w, number, size, matrix, n, vectors, scratch, x_at, codes, scales_at, sync: None

    def together(w, number, size, matrix, n, vectors, scratch, x_at, codes, scales_at, sync):
        for i in range(number, n, size):
            round_row(w, matrix, vectors, scratch, x_at + i * matrix[COLUMNS], codes, i, scratch, scales_at + i)
        meet(sync, size)

    return together


@entry_point()
def run(
    sync, threads, drafted, dims, layers, matrices, vectors, w, head, embedding, cos, signed_sin, keys, values,
    token_ids, requests, tables, wanted, scratch, own_floats, codes, logits,
):  # fmt: skip
    """One thread's part of a step.

    With `drafted` (`[requests, steps]`, int64) of some width, the step is repeated with the likeliest token of each
    request until there are so many; `wanted` must then be the last row of each request. `token_ids` and `requests`
    are overwritten.
    """
    number, size = join(sync, threads)
    if number < 0:
        return
    count, outputs = requests.shape[0], matrices[4 * dims[LAYERS]][OUTPUTS]
    tokens, steps = len(token_ids), drafted.shape[1]
    for i in range(max(steps, 1)):
        forward(
            number, size, sync, dims, layers, matrices, vectors, w, head, embedding, cos, signed_sin, keys, values,
            token_ids[:tokens], requests, tables, wanted, scratch, own_floats, codes, logits,
        )  # fmt: skip
        if steps == 0:
            break
        for r in range(number, count, size):
            drafted[r, i] = likeliest(logits, r * outputs, dims[VOCABULARY])
        meet(sync, size)
        if i == steps - 1:
            break
        if number == 0:
            for r in range(count):
                token_ids[r], wanted[r] = drafted[r, i], r
                requests[r, 0], requests[r, 1], requests[r, 2] = r, 1, requests[r, 2] + 1
        tokens = count
        meet(sync, size)


@njit(**OPTIONS)
def likeliest(logits, at, size):
    """The index of the (first) largest of `size` numbers."""
    best = at
    for i in range(at, at + size):
        if logits[i] > logits[best]:
            best = i
    return best - at


@entry_point(parallel=True)
def run_together(
    sync, threads, drafted, dims, layers, matrices, vectors, w, head, embedding, cos, signed_sin, keys, values,
    token_ids, requests, tables, wanted, scratch, own_floats, codes, logits,
):  # fmt: skip
    """`run` on `threads` threads at once."""
    for _ in prange(threads):
        run(
            sync, threads, drafted, dims, layers, matrices, vectors, w, head, embedding, cos, signed_sin, keys, values,
            token_ids, requests, tables, wanted, scratch, own_floats, codes, logits,
        )  # fmt: skip
