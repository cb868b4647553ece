"""Linear layers over panels, against the product in fp64, for every kind of weights."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from minillm.ops.cpu import panels
from minillm.ops.cpu.compiled import entry_point
from minillm.ops.cpu.matrix_fields import BIAS, CODE_SUMS, COLUMNS, MATRIX_FIELDS, NONE, OUTPUTS, PANEL, SCALES
from minillm.ops.cpu.panels import (
    SUMS_SIZE,
    narrow_dot_tiles,
    narrow_tiles,
    pack,
    pack_bfloat_pairs,
    pack_floats,
    pack_pairs,
    wide_dot_tiles,
    wide_tiles,
)
from minillm.ops.cpu.processor import has_amx, processor
from minillm.ops.cpu.register_tiles import PMADDWD
from minillm.ops.cpu.rounding import codes_size, prepare_row
from minillm.ops.cpu.simd import BFLOAT, BFLOAT_PAIRS, BYTE_OFFSET, HALF, LANES, ONE_BYTE, TWO_BYTES, WORDS
from minillm.ops.quantized_linear import quantize_rows
from minillm.quantization.w8a8 import integer_product

multiply = entry_point()(panels.multiply.py_func)
"""Cached on disk, as a step is: compiling takes seconds."""

KINDS = ["float32", "half", "bfloat", "rounded bfloat", "int8", "pairs twice", "pairs"]
if processor().byte_lanes in PMADDWD:
    KINDS.append("words")
TOLERANCE = {"pairs twice": 6e-5, "words": 6e-5}
"""Sixteen bits from -max to max: an error of at most max / 65 000, where max is some four times a typical number."""
LARGEST_CODE = 127 * 256 + 127
PACKS = {
    "int8": pack,
    "pairs": partial(pack_pairs, kind=ONE_BYTE),
    "pairs twice": partial(pack_pairs, kind=TWO_BYTES),
    "words": partial(pack_pairs, kind=WORDS),
}


def two_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of `x` as two rows of unsigned bytes, first and second, and its scale."""
    scales = x.abs().amax(1) / LARGEST_CODE
    codes = (x / scales[:, None]).round().int()
    first = torch.div(codes + 128, 256, rounding_mode="floor")
    return torch.stack((first, codes - 256 * first), 1).add(BYTE_OFFSET).to(torch.uint8), scales


def run(kind: str, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None, add: bool = False):
    """Return y through `multiply` (for `add`: added to 0.5, which is then subtracted), and the right y."""
    outputs, columns = weight.shape
    padded = -(-outputs // LANES) * LANES
    vectors: list[np.ndarray] = []
    matrix = np.full(MATRIX_FIELDS, NONE, np.int64)
    matrix[[PANEL, COLUMNS, OUTPUTS]] = 0, columns, padded

    def keep(field: int, values: np.ndarray) -> None:
        matrix[field] = sum(map(len, vectors))
        vectors.append(np.pad(values, (0, padded - len(values))))

    if kind in PACKS:
        codes, scales = quantize_rows(weight)
        packed = PACKS[kind](codes.numpy())
        keep(SCALES, scales.numpy())
        keep(CODE_SUMS, (BYTE_OFFSET * codes.int().sum(1, dtype=torch.int32)).numpy().view(np.float32))
        meant = codes * scales[:, None]
    elif kind == "rounded bfloat":
        meant, x = weight.bfloat16(), x.bfloat16().float()
        packed, meant = pack_bfloat_pairs(meant.view(torch.uint16).numpy()), meant.float()
    else:
        meant = {"float32": weight, "half": weight.half(), "bfloat": weight.bfloat16()}[kind]
        bits = meant.view({4: torch.float32, 2: torch.int16}[meant.itemsize]).numpy()
        packed = pack_floats(bits.view({"float32": np.float32, "half": HALF, "bfloat": BFLOAT}[kind]))
        meant = meant.float()
    if bias is not None:
        keep(BIAS, bias.numpy())
    rows = len(x)
    codes_x, scales_x = quantize_rows(x)
    unsigned = (codes_x.int() + BYTE_OFFSET).to(torch.uint8)
    if kind == "pairs twice":
        unsigned, scales_x = two_bytes(x)
    unsigned = unsigned.numpy().reshape(-1)
    scratch = np.concatenate([x.numpy().reshape(-1), scales_x.numpy(), np.zeros(SUMS_SIZE)]).astype("f")
    if kind.endswith("bfloat") or kind == "words":
        unsigned = np.full(codes_size(rows, columns, NONE), 0xFF, np.uint8)
        round_rows(packed, matrix, np.zeros(0, np.float32), scratch, rows, unsigned, rows * columns)
    out = np.full((rows, padded), 0.5 if add else np.nan, np.float32)
    multiply(
        packed, matrix, np.concatenate([*vectors, np.zeros(LANES, np.float32)]), scratch, 0, unsigned, rows * columns,
        rows, 0, padded // LANES, out.reshape(-1), 0, padded, add, rows * columns + rows,
    )  # fmt: skip
    y = torch.from_numpy(out[:, :outputs]) - (0.5 if add else 0.0)
    if kind == "pairs":
        right = integer_product(codes_x, codes) * scales_x[:, None] * scales
    else:
        right = x.double() @ meant.double().T
    return y, right if bias is None else right + bias


@entry_point()
def round_rows(w, matrix, vectors, x, rows, codes, scales_at):
    for r in range(rows):
        prepare_row(w, matrix, vectors, x, r * matrix[COLUMNS], codes, r, x, scales_at + r)


def relative(y: torch.Tensor, right: torch.Tensor) -> float:
    return float((y - right).norm() / right.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 50])
def test_products_are_right_for_every_number_of_rows_and_panels(kind: str, rows: int) -> None:
    torch.manual_seed(rows)
    for outputs, columns in ((16, 32), (64, 48), (100, 64), (176, 32)):
        y, right = run(kind, torch.randn(outputs, columns).half().float(), torch.randn(rows, columns))
        assert relative(y, right) < TOLERANCE.get(kind, 1e-6), (outputs, columns)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_residual_are_added(kind: str) -> None:
    torch.manual_seed(1)
    y, right = run(kind, torch.randn(80, 32), torch.randn(7, 32), torch.randn(80), add=True)
    assert relative(y, right) < TOLERANCE.get(kind, 1e-6)


def test_activations_are_rounded_to_the_nearest_bfloat() -> None:
    torch.manual_seed(4)
    weight, x = torch.randn(80, 48).bfloat16().float(), torch.randn(9, 48)
    exact = x.double() @ weight.double().T
    matrix = np.full(MATRIX_FIELDS, NONE, np.int64)
    matrix[COLUMNS] = 48
    codes, packed = np.zeros(codes_size(9, 48, NONE), np.uint8), np.zeros(0, BFLOAT_PAIRS)
    round_rows(packed, matrix, np.zeros(0, np.float32), x.numpy().reshape(-1), 9, codes, 0)
    if not has_amx():  # rows one after the other, padded to a multiple of 32 columns
        found = torch.from_numpy(codes[: 9 * 128].view(np.int16).reshape(9, 64)).view(torch.bfloat16)
        assert torch.equal(found[:, :48], x.bfloat16()) and not found[:, 48:].any()
    y, right = run("rounded bfloat", weight, x)
    assert relative(y, right) < 1e-6 < 1e-3 < relative(y, exact) < 1e-2


@pytest.mark.parametrize("columns", [512, 528, 1600])
def test_sums_of_words_do_not_leave_the_range_of_int32(columns: int) -> None:
    """All codes are the largest, so that int32 would wrap round behind 518 columns."""
    for sign in (1.0, -1.0):
        y, right = run("words", torch.full((32, columns), sign), torch.ones(3, columns))
        assert relative(y, right) < 1e-6


def test_bytes_are_multiplied_exactly() -> None:
    torch.manual_seed(2)
    y, right = run("pairs", torch.randn(80, 256), torch.randn(9, 256))
    assert torch.equal(y, right)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(80, 64), torch.randn(55, 64)
    together, _ = run(kind, weight, x)
    for first, last in ((0, 1), (3, 5), (10, 16), (40, 55)):
        assert torch.equal(run(kind, weight, x[first:last])[0], together[first:last])


@entry_point()
def both_tiles(w, x, y, columns, rows):
    wide_tiles(w, 0, columns * LANES, LANES, x, 0, columns, columns, y[0], 0, 4 * LANES, rows, False, 4)
    narrow_tiles(w, 0, columns * LANES, LANES, x, 0, columns, columns, y[1], 0, 4 * LANES, rows, False, 4)


@pytest.mark.parametrize("rows", [1, 2, 3, 13])
def test_tiles_for_few_and_for_many_registers_give_the_same_bits(rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(64, 48), torch.randn(rows, 48)
    y = np.full((2, rows * 64), np.nan, np.float32)
    both_tiles(pack(weight.numpy()), x.numpy().reshape(-1), y, 48, rows)
    assert np.array_equal(y[0], y[1])
    assert relative(torch.from_numpy(y[1]).view(rows, 64), x.double() @ weight.double().T) < 1e-6


@entry_point()
def both_byte_tiles(w, x, y, columns, rows):
    wide_dot_tiles(w, 0, columns * LANES, x, 0, columns, columns // 4, y[0], 0, 4 * LANES, rows, False, 4)
    narrow_dot_tiles(w, 0, columns * LANES, x, 0, columns, columns // 4, y[1], 0, 4 * LANES, rows, False, 4)


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_tiles_of_bytes_for_few_and_for_many_registers_give_the_same_sums(rows: int) -> None:
    rng = np.random.default_rng(rows)
    codes, x = rng.integers(-127, 128, (64, 48)).astype(np.int8), rng.integers(0, 127, (rows, 48)).astype(np.uint8)
    y = np.zeros((2, rows * 64), np.float32)
    both_byte_tiles(pack_pairs(codes), x.reshape(-1), y, 48, rows)
    right = x.astype(np.int64) @ codes.T.astype(np.int64)
    for got in y:
        assert np.array_equal(got.view(np.int32).reshape(rows, 64), right)
