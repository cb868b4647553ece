"""Rounding a row of activations to bytes, against the same with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.norms import round_row
from minillm.ops.cpu.simd import PAIRED, TWICE_PAIRED

SIZE, ROW = 48, 1


@njit(**OPTIONS)
def rounded(w, x, codes, scales):
    round_row(w, x, 0, SIZE, codes, ROW, scales, 0)


def row_of(kind: type, x: np.ndarray) -> tuple[np.ndarray, float]:
    """The signed codes that `round_row` makes of `x`, and what one unit stands for."""
    count = 1 if kind is PAIRED else 2
    codes, scales = np.zeros(2 * count * SIZE, np.uint8), np.zeros(1, np.float32)
    rounded(np.zeros(1, kind), x, codes, scales)
    assert not codes[: ROW * count * SIZE].any()  # the row before it is another's
    parts = codes[ROW * count * SIZE :].astype(np.int64).reshape(count, SIZE) - 128
    return (parts[0] if count == 1 else 256 * parts[0] + parts[1]), scales[0]


@pytest.mark.parametrize(("kind", "largest"), [(PAIRED, 127), (TWICE_PAIRED, 127 * 256 + 127)])
def test_the_largest_number_has_the_largest_code_and_all_are_near(kind: type, largest: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = (rng.standard_normal(SIZE) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
        codes, step = row_of(kind, x)
        assert np.abs(codes).max() == largest
        assert np.abs(codes.astype(np.float64) * step - x).max() <= 0.5001 * step


def test_two_bytes_hold_every_code_there_is() -> None:
    """Above all those whose second byte is at an end of its range, where one more would be another byte."""
    largest = 127 * 256 + 127
    every = np.arange(-largest, largest + 1)
    for first in range(0, len(every), SIZE - 1):
        wanted = np.zeros(SIZE, np.int64)
        part = every[first : first + SIZE - 1]
        wanted[: len(part)], wanted[-1] = part, largest  # so that a unit is 1
        codes, step = row_of(TWICE_PAIRED, wanted.astype(np.float32))
        assert step == 1 and np.array_equal(codes, wanted)


@pytest.mark.parametrize("kind", [PAIRED, TWICE_PAIRED])
def test_a_row_of_zeros_stays_one(kind: type) -> None:
    codes, step = row_of(kind, np.zeros(SIZE, np.float32))
    assert not codes.any() and step > 0
