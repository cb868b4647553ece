"""Loops that call one function of the compiled CPU step many times from compiled code.

The functions run as in the step: without Python, on one thread, on their inputs in place. Each loop calls its function
`count` times, the i-th time on copy `(first + i) % copies` of the inputs that are read from memory.
"""

# ruff: noqa: ANN001, ANN201  (numba infers types)
from __future__ import annotations

from minillm.ops.cpu.attention import attend
from minillm.ops.cpu.compiled import entry_point
from minillm.ops.cpu.kv_rows import write_row
from minillm.ops.cpu.matrix_fields import COLUMNS, OUTPUTS
from minillm.ops.cpu.norms import rms_norm, rotate, silu_gate
from minillm.ops.cpu.panels import multiply
from minillm.ops.cpu.rounding import prepare_row
from minillm.ops.cpu.simd import LANES
from minillm.ops.cpu.step import argmax


@entry_point()
def multiply_loop(count, first, copies, w, matrices, vectors, scratch, codes, rows, out):
    """A linear layer over panels, which rounds its inputs if the weights require it.

    `matrices`: one line for each copy (see `panels`). `scratch`: x, a scale for each row, space for sums. `codes`:
    `codes_size` bytes.
    """
    for i in range(count):
        matrix = matrices[(first + i) % copies]
        columns, outputs = matrix[COLUMNS], matrix[OUTPUTS]
        scales_at = rows * columns
        for r in range(rows):
            prepare_row(w, matrix, vectors, scratch, r * columns, codes, r, scratch, scales_at + r)
        multiply(
            w, matrix, vectors, scratch, 0, codes, scales_at, rows, 0, outputs // LANES, out, 0, outputs, False,
            scales_at + rows,
        )  # fmt: skip


@entry_point()
def attend_loop(count, first, copies, team, q, shape, requests, tables, tree, keys, values, out, scratch):
    """Paged attention of one request. `shape`: heads, KV heads, head size, block size; `requests`: a line per copy."""
    heads, num_kv, dim = shape[0], shape[1], shape[2]
    for i in range(count):
        at = (first + i) % copies
        attend(
            team, q, 0, heads * dim, heads, num_kv, dim, 0, requests[at : at + 1], tables, tree, shape[3], 0, keys,
            values, out, 0, scratch, 0,
        )  # fmt: skip


@entry_point()
def store_loop(count, k, v, slots, num_kv, dim, keys, values):
    """Write the keys and values of all tokens to their slots."""
    for _ in range(count):
        for token in range(len(slots)):
            for head in range(num_kv):
                row, at = slots[token] * num_kv + head, (token * num_kv + head) * dim
                write_row(keys, row, k, at, dim)
                write_row(values, row, v, at, dim)


@entry_point()
def rms_norm_loop(count, x, rows, size, weight, eps, out):
    """Normalise every row."""
    for _ in range(count):
        for row in range(rows):
            rms_norm(x, row * size, size, weight, 0, eps, out, row * size)


@entry_point()
def rope_loop(count, x, rows, heads, size, cos, signed_sin):
    """Rotate all heads of every token, in place."""
    for _ in range(count):
        for row in range(rows):
            for head in range(heads):
                rotate(x, (row * heads + head) * size, size, cos, signed_sin, row)


@entry_point()
def silu_gate_loop(count, x, rows, size, out):
    """SiLU gate of every row."""
    for _ in range(count):
        for row in range(rows):
            silu_gate(x, row * 2 * size, row * 2 * size + size, size, out, row * size)


@entry_point()
def argmax_loop(count, logits, rows, vocab, out):
    """Argmax of every row."""
    for _ in range(count):
        for row in range(rows):
            out[row] = argmax(logits, row * vocab, vocab)
