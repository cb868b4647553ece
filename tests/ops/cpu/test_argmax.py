"""The compiled argmax, which chooses draft tokens: the first of the largest, and no token where a number is broken."""

from __future__ import annotations

import numpy as np
import pytest

from minillm.bench.kernels_cpu import argmax_loop
from minillm.ops.cpu.simd import LANES
from minillm.ops.cpu.step import NO_TOKEN, SEARCHED

SIZES = (1, 3, LANES, LANES + 1, SEARCHED - 1, SEARCHED, SEARCHED + 1, 2 * SEARCHED + LANES, 4099)


def chosen(rows: np.ndarray) -> list[int]:
    found = np.zeros(len(rows), np.int64)
    argmax_loop(1, np.ascontiguousarray(rows, np.float32).reshape(-1), *rows.shape, found)
    return found.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_first_of_the_largest(size: int) -> None:
    rows = np.random.default_rng(size).integers(-9, 9, (20, size))  # with many equals
    assert chosen(rows) == rows.argmax(axis=1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_each_place_can_be_the_largest(size: int) -> None:
    places = sorted({0, size // 2, max(0, size - LANES), size - 1})
    rows = -1 - np.random.default_rng(0).random((len(places), size))
    rows[range(len(places)), places] = -0.5
    assert chosen(rows) == places


def test_zeros_of_both_signs_are_equal() -> None:
    assert chosen(np.array([[-1, -0.0, 0.0, -0.0], [-1, 0.0, -0.0, -2]])) == [1, 1]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", SIZES)
def test_a_number_that_is_not_finite_gives_no_token(size: int, broken: float) -> None:
    places = sorted({0, size // 2, max(0, size - LANES), size - 1})
    rows = np.random.default_rng(0).standard_normal((len(places), size))
    rows[range(len(places)), places] = broken
    assert chosen(rows) == [NO_TOKEN] * len(places)
