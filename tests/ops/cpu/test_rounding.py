"""Rows of activations rounded for each kind of weights, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.matrix_fields import COLUMNS, GROUP, INPUTS, MATRIX_FIELDS, NONE
from minillm.ops.cpu.nibbles import FLOAT_NIBBLES, NIBBLES, row_size
from minillm.ops.cpu.rounding import prepare_row
from minillm.ops.cpu.simd import BYTE_OFFSET, HALF, ONE_BYTE, TWO_BYTES, WORDS

SIZE, ROW, GROUP_SIZE = 48, 1, 32
BYTES = {ONE_BYTE: SIZE, TWO_BYTES: 2 * SIZE, WORDS: 2 * SIZE, NIBBLES: row_size.py_func(SIZE, GROUP_SIZE)}
"""Bytes of one row. With nibbles the second group is half as long as the first."""


@njit(**OPTIONS)
def rounded(w, matrix, vectors, x, codes, scales):
    prepare_row(w, matrix, vectors, x, 0, codes, ROW, scales, 0)


def round_one(kind: type, x: np.ndarray, input_scales: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """The bytes that `prepare_row` writes, and the step."""
    matrix = np.full(MATRIX_FIELDS, NONE, np.int64)
    matrix[COLUMNS], matrix[GROUP] = SIZE, GROUP_SIZE
    vectors = np.zeros(SIZE, np.float32)
    if input_scales is not None:
        matrix[INPUTS], vectors[:] = 0, input_scales
    size = BYTES.get(kind, 0)
    codes, scales = np.zeros(3 * size, np.uint8), np.zeros(1, np.float32)
    rounded(np.zeros(1, kind), matrix, vectors, x, codes, scales)
    assert not codes[: ROW * size].any() and not codes[(ROW + 1) * size :].any()  # other rows stay untouched
    return codes[ROW * size : (ROW + 1) * size], scales[0]


def row_of(kind: type, x: np.ndarray) -> tuple[np.ndarray, float]:
    """The signed codes that `prepare_row` computes from `x`, and the step."""
    row, step = round_one(kind, x)
    if kind is WORDS:
        return row.view(np.int16).astype(np.int64), step
    if kind is NIBBLES:
        parts = row[: 2 * SIZE].view(np.int8).astype(np.int64).reshape(2, SIZE)
    else:
        parts = (row - np.uint8(BYTE_OFFSET)).view(np.int8).astype(np.int64).reshape(-1, SIZE)
    return (parts[0] if kind is ONE_BYTE else 256 * parts[0] + parts[1]), step


@pytest.mark.parametrize(
    ("kind", "largest"), [(ONE_BYTE, 127), *((kind, 127 * 256 + 127) for kind in (TWO_BYTES, WORDS, NIBBLES))]
)
def test_the_largest_number_has_the_largest_code_and_every_error_is_at_most_half_a_step(
    kind: type, largest: int
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = (rng.standard_normal(SIZE) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
        codes, step = row_of(kind, x)
        assert np.abs(codes).max() == largest
        assert np.abs(codes.astype(np.float64) * step - x).max() <= 0.5001 * step


@pytest.mark.parametrize("kind", [TWO_BYTES, WORDS, NIBBLES])
def test_two_bytes_hold_every_code_there_is(kind: type) -> None:
    """The critical codes have a second byte at an end of its range, where the next code changes the first byte."""
    largest = 127 * 256 + 127
    every = np.arange(-largest, largest + 1)
    for first in range(0, len(every), SIZE - 1):
        wanted = np.zeros(SIZE, np.int64)
        part = every[first : first + SIZE - 1]
        wanted[: len(part)], wanted[-1] = part, largest  # so that the step is 1
        codes, step = row_of(kind, wanted.astype(np.float32))
        assert step == 1 and np.array_equal(codes, wanted)


@pytest.mark.parametrize("kind", [ONE_BYTE, TWO_BYTES, WORDS, NIBBLES])
def test_a_row_of_zeros_stays_one(kind: type) -> None:
    codes, step = row_of(kind, np.zeros(SIZE, np.float32))
    assert not codes.any() and step > 0


def test_each_group_of_nibbles_has_the_sum_of_its_codes() -> None:
    rng = np.random.default_rng(0)
    for x in (rng.standard_normal(SIZE), rng.random(SIZE), -np.ones(SIZE)):
        row, _ = round_one(NIBBLES, x.astype(np.float32))
        codes, _ = row_of(NIBBLES, x.astype(np.float32))
        assert np.array_equal(row[2 * SIZE :].view(np.int32), [codes[:GROUP_SIZE].sum(), codes[GROUP_SIZE:].sum()])


@pytest.mark.parametrize("kind", [NIBBLES, FLOAT_NIBBLES])
def test_input_scales_multiply_the_inputs_of_nibbles(kind: type) -> None:
    x, scales = np.arange(SIZE, dtype=np.float32), np.linspace(0.5, 2, SIZE, dtype=np.float32)
    ready = x.copy()
    row, step = round_one(kind, ready, scales)
    assert np.array_equal(ready, x * scales)
    right, right_step = round_one(kind, x * scales)
    assert np.array_equal(row, right) and step == right_step


@pytest.mark.parametrize("kind", [np.float32, HALF, np.int8, FLOAT_NIBBLES])
def test_inputs_that_are_multiplied_as_floats_are_left_alone(kind: type) -> None:
    x = np.arange(SIZE, dtype=np.float32)
    _, step = round_one(kind, x)
    assert np.array_equal(x, np.arange(SIZE)) and step == 0
