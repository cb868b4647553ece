"""Products with AMX: as exact as products in float32, and the same to the last bit however rows are grouped.

A processor without AMX runs the same code with its instructions in software (`software_amx.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import njit

from minillm.ops.cpu.amx import PARTS, ROW_BYTES, ROWS
from minillm.ops.cpu.amx_products import (
    AMX_SUMS_SIZE,
    BLOCK,
    CHUNK,
    SLAB,
    multiply_tiles,
    pack_tiles,
    split_row,
    split_size,
)
from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.matrix_fields import BIAS, COLUMNS, MATRIX_FIELDS, NONE, OUTPUTS, PANEL
from minillm.ops.cpu.processor import has_amx
from minillm.ops.cpu.simd import LANES
from tests.ops.cpu.software_amx import emulated

both = pytest.mark.parametrize("parts", [PARTS, 1], ids=["exact", "rounded"])


@pytest.fixture(autouse=True, scope="module")
def instructions() -> Iterator[None]:
    """AMX's instructions, in software if need be."""
    if has_amx():
        yield
        return
    with emulated():
        yield


def bits(x: np.ndarray) -> np.ndarray:
    """The upper halves of the float32s: bfloat16s."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def floats(upper: np.ndarray) -> np.ndarray:
    return (upper.astype(np.uint32) << 16).view(np.float32)


multiply = njit(**OPTIONS)(multiply_tiles.py_func)


@njit(**OPTIONS)
def split_rows(x, rows, columns, codes, parts):
    for r in range(rows):
        split_row(x, r * columns, columns, codes, r, parts)


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16s, as floats."""
    return torch.from_numpy(x).bfloat16().float().numpy()


def product(
    weight: np.ndarray, x: np.ndarray, parts: int, bias: np.ndarray | None = None, start: np.ndarray | None = None
) -> np.ndarray:
    """x Wᵀ (+ b) (+ start) by `multiply_tiles`; `weight` as bits, x in `parts` parts."""
    (outputs, columns), rows = weight.shape, len(x)
    matrix = np.full(MATRIX_FIELDS, NONE, np.int64)
    matrix[[PANEL, COLUMNS, OUTPUTS]] = 0, columns, outputs
    vectors = np.zeros(outputs, np.float32)
    if bias is not None:
        matrix[BIAS], vectors = 0, bias
    size = -(-rows // ROWS) * ROWS * split_size.py_func(columns, parts)
    codes = np.full(size, 0xFF, np.uint8)  # NaN where nothing is written
    split_rows(x.reshape(-1), rows, columns, codes, parts)
    out = np.full((rows, outputs), np.nan, np.float32) if start is None else start.copy()
    own = np.full(AMX_SUMS_SIZE, np.nan, np.float32)
    multiply(
        pack_tiles(weight), 0, matrix, vectors, codes, parts, rows, 0, outputs // LANES, out.reshape(-1), 0, outputs,
        start is not None, own, 0,
    )  # fmt: skip
    return out


def test_the_three_parts_of_a_number_add_up_to_it() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((20, 48)) * 10.0 ** rng.integers(-20, 20, (20, 48))).astype(np.float32)
    codes = np.zeros(2 * ROWS * split_size.py_func(48, PARTS), np.uint8)
    split_rows(x.reshape(-1), 20, 48, codes, PARTS)
    steps = 2
    tiles = codes.view(np.uint16).reshape(2, steps, PARTS, ROWS, ROW_BYTES // 2)
    parts = floats(tiles).transpose(2, 0, 3, 1, 4).reshape(PARTS, 2 * ROWS, steps * ROW_BYTES // 2)
    assert np.array_equal(parts[:, :20, :48].astype(np.float64).sum(0), x.astype(np.float64))
    assert not parts[:, :20, 48:].any()  # the padding is zero


WIDE = (BLOCK + 1) * 32 + 16
SHAPES = ((16, 32), (64, 48), (112, 64), ((SLAB + 3) * LANES, 32), (48, WIDE))


@both
@pytest.mark.parametrize(
    ("rows", "shapes"),
    [*((rows, SHAPES) for rows in (1, 17, CHUNK + 20)), *((rows, SHAPES[2:4]) for rows in (3, 16, 31, 32, 33, 50))],
)
def test_products_are_as_exact_as_in_float32(rows: int, shapes: tuple[tuple[int, int], ...], parts: int) -> None:
    rng = np.random.default_rng(rows)
    for outputs, columns in shapes:
        weight, x = bits(rng.standard_normal((outputs, columns))), rng.standard_normal((rows, columns)).astype("f")
        bias, start = rng.standard_normal(outputs).astype("f"), rng.standard_normal((rows, outputs)).astype("f")
        meant = x if parts == PARTS else nearest(x)
        right = meant.astype(np.float64) @ floats(weight).astype(np.float64).T
        for got, expected in (
            (product(weight, x, parts), right),
            (product(weight, x, parts, bias), right + bias),
            (product(weight, x, parts, bias, start), right + bias + start),
        ):
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error < 3e-7, (outputs, columns)  # two parts instead of three would be off by 1e-6 and more


@both
def test_a_row_is_the_same_to_the_last_bit_whatever_rows_are_beside_it(parts: int) -> None:
    rng = np.random.default_rng(1)
    columns = (BLOCK + 2) * 32
    weight, x = bits(rng.standard_normal((80, columns))), rng.standard_normal((CHUNK + 40, columns)).astype("f")
    together = product(weight, x, parts)
    for first, last in ((0, 1), (3, 5), (10, 26), (10, 27), (20, 60), (100, CHUNK + 40)):
        assert np.array_equal(product(weight, x[first:last], parts), together[first:last]), (first, last)
