"""Prepares activations for the product with a matrix: rounds them to bytes where the weights are multiplied as bytes,
to 16-bit numbers where those are, to bfloat16 in a model of that dtype.

A row x becomes integers in units of a step: max|x| / 127 in one byte, max|x| / 32 639 in two or in 16 bits. So no
number is off by more than half a step. As in `norms.py`, the data is in the L1 cache.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from minillm.ops.cpu.amx import PARTS, ROWS
from minillm.ops.cpu.amx_products import split_row, split_size
from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.matrix_fields import COLUMNS, GROUP, INPUTS, NONE
from minillm.ops.cpu.nibbles import row_size, store_int32
from minillm.ops.cpu.panels import BYTE, TILED, pairs_row_size
from minillm.ops.cpu.simd import (
    BYTE_OFFSET,
    LANES,
    ZERO,
    absolute,
    fma,
    largest,
    load,
    maximum,
    rint,
    splat,
    store,
    store_bfloats,
    store_bytes,
    store_words,
    total,
)

LARGEST, TINY = np.float32(127), np.finfo(np.float32).tiny
PER_BYTE, UPWARDS = np.float32(1 / 256), np.float32(1 / 512)
LARGEST_OF_TWO = np.float32(127 * 256 + 127)
"""The largest code with two signed bytes. `UPWARDS`: halves round up, so that the second byte is at most 127."""


def codes_size(rows: int, columns: int, group: int) -> int:
    """Bytes that `rows` rows of inputs take at most, for weights of any kind. `group`: of nibbles, else `NONE`."""
    nibbles = row_size.py_func(columns, columns if group == NONE else group)
    tiled = split_size.py_func(columns, PARTS) if TILED else 0
    return -(-rows // ROWS) * ROWS * max(nibbles, pairs_row_size.py_func(columns), tiled)


def prepare_row(w, matrix, vectors, x, x_at, codes, row, scales, scale_at):
    """Prepare the numbers at `x[x_at]` for the product with `matrix`, as row `row` of `codes`. By the dtype of `w`:

        ONE_BYTE        one byte per number, plus `BYTE_OFFSET`
        TWO_BYTES       code = 256 · first + second, each byte plus `BYTE_OFFSET`, in rows 2 · `row` and 2 · `row` + 1
        WORDS           one signed 16-bit number
        NIBBLES         two signed bytes, and sums (see `nibbles.row_size`)
        BFLOAT_PAIRS    the nearest bfloat16s
        BFLOAT          where it is `TILED`, three bfloat16 parts (see `amx_products.split_row`)
        others          nothing

    The first four also store the scale at `scales[scale_at]`. For `NIBBLES` and `FLOAT_NIBBLES` x is first multiplied,
    in place, by the input scales of the matrix, if it has any.
    """
    raise NotImplementedError


@njit(**PART)
def _step(x, x_at, size, max_code, scales, scale_at):
    """Store and return the step that makes `max_code` the largest code."""
    high = absolute(load(x, x_at))
    for i in range(LANES, size, LANES):
        high = maximum(high, absolute(load(x, x_at + i)))
    step = largest(high) / max_code
    step = TINY if step < TINY else step
    scales[scale_at] = step
    return splat(step)


@njit(**PART)
def _first_byte(code):
    """The first of the two bytes of each code."""
    return rint(fma(code, splat(PER_BYTE), splat(UPWARDS)))


@njit(**PART)
def _in_one(x, x_at, size, codes, row, scales, scale_at):
    step, at = _step(x, x_at, size, LARGEST, scales, scale_at), row * size
    for i in range(0, size, LANES):
        store_bytes(codes, at + i, rint(load(x, x_at + i) / step), BYTE_OFFSET)


@njit(**PART)
def _in_two(x, x_at, size, codes, row, scales, scale_at):
    step, at = _step(x, x_at, size, LARGEST_OF_TWO, scales, scale_at), 2 * row * size
    for i in range(0, size, LANES):
        code = rint(load(x, x_at + i) / step)
        first = _first_byte(code)
        store_bytes(codes, at + i, first, BYTE_OFFSET)
        store_bytes(codes, at + size + i, fma(first, splat(-BYTE), code), BYTE_OFFSET)


@njit(**PART)
def _in_words(x, x_at, size, codes, row, scales, scale_at):
    step, at = _step(x, x_at, size, LARGEST_OF_TWO, scales, scale_at), 2 * row * size
    for i in range(0, size, LANES):
        store_words(codes, at + 2 * i, load(x, x_at + i) / step)


@njit(**PART)
def _in_bfloats(x, x_at, size, codes, row):
    at = row * pairs_row_size(size)
    for i in range(0, size, LANES):
        store_bfloats(codes, at + 2 * i, load(x, x_at + i))
    codes[at + 2 * size : at + pairs_row_size(size)] = 0


@njit(**PART)
def _in_two_with_sums(x, x_at, size, group, codes, row, scales, scale_at):
    step, at = _step(x, x_at, size, LARGEST_OF_TWO, scales, scale_at), row * row_size(size, group)
    sum_at = at + 2 * size
    for begin in range(0, size, group):
        firsts = seconds = splat(ZERO)  # separate sums, small enough to be exact in float32
        for i in range(begin, min(begin + group, size), LANES):
            code = rint(load(x, x_at + i) / step)
            first = _first_byte(code)
            second = fma(first, splat(-BYTE), code)
            store_bytes(codes, at + i, first, 0)
            store_bytes(codes, at + size + i, second, 0)
            firsts, seconds = firsts + first, seconds + second
        store_int32(codes, sum_at, 256 * int(total(firsts)) + int(total(seconds)))
        sum_at += 4


@njit(**PART)
def _scale_inputs(matrix, vectors, x, x_at):
    """Multiply x by the input scales (AWQ), in place."""
    if matrix[INPUTS] != NONE:
        for i in range(0, matrix[COLUMNS], LANES):
            store(x, x_at + i, load(x, x_at + i) * load(vectors, matrix[INPUTS] + i))


@overload(prepare_row, jit_options=PART)
def _typed_prepare_row(w, matrix, vectors, x, x_at, codes, row, scales, scale_at):
    if w.dtype == types.uint8:
        return lambda w, matrix, vectors, x, x_at, codes, row, scales, scale_at: _in_one(
            x, x_at, matrix[COLUMNS], codes, row, scales, scale_at
        )
    if w.dtype == types.boolean:
        return lambda w, matrix, vectors, x, x_at, codes, row, scales, scale_at: _in_two(
            x, x_at, matrix[COLUMNS], codes, row, scales, scale_at
        )
    if w.dtype == types.int64:
        return lambda w, matrix, vectors, x, x_at, codes, row, scales, scale_at: _in_words(
            x, x_at, matrix[COLUMNS], codes, row, scales, scale_at
        )
    if w.dtype == types.uint32:

        def scale_and_round(w, matrix, vectors, x, x_at, codes, row, scales, scale_at):
            _scale_inputs(matrix, vectors, x, x_at)
            _in_two_with_sums(x, x_at, matrix[COLUMNS], matrix[GROUP], codes, row, scales, scale_at)

        return scale_and_round
    if w.dtype == types.int32:
        return lambda w, matrix, vectors, x, x_at, codes, row, scales, scale_at: _scale_inputs(matrix, vectors, x, x_at)
    if w.dtype in TILED:
        parts = 1 if w.dtype == types.uint64 else PARTS
        return lambda w, matrix, vectors, x, x_at, codes, row, scales, scale_at: split_row(
            x, x_at, matrix[COLUMNS], codes, row, parts
        )
    if w.dtype == types.uint64:
        return lambda w, matrix, vectors, x, x_at, codes, row, scales, scale_at: _in_bfloats(
            x, x_at, matrix[COLUMNS], codes, row
        )
    return lambda w, matrix, vectors, x, x_at, codes, row, scales, scale_at: None
