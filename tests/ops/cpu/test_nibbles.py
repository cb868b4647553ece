"""Products with nibbles against the dequantised matrix in fp64; their integer sums exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from minillm.ops.cpu import panels, register_tiles
from minillm.ops.cpu.compiled import OPTIONS, entry_point
from minillm.ops.cpu.matrix_fields import BIAS, COLUMNS, GROUP, MATRIX_FIELDS, NONE, OUTPUTS, PANEL
from minillm.ops.cpu.nibbles import (
    FLOAT_NIBBLES,
    MAX_GROUP_SIZE,
    NIBBLES,
    add_group,
    pack_nibbles,
    panel_size,
    row_size,
)
from minillm.ops.cpu.panels import SUMS_SIZE
from minillm.ops.cpu.processor import Processor
from minillm.ops.cpu.rounding import prepare_row
from minillm.ops.cpu.simd import LANES
from minillm.quantization.groups import Groups, dequantize_groups, quantize_groups
from tests.ops.cpu.test_register_tiles import ways_here

KINDS = [NIBBLES, FLOAT_NIBBLES]
SHAPES = [(16, 32, 16), (64, 128, 64), (100, 256, 128), (176, 192, 128), (72, 80, 64), (40, 48, 128)]
"""(outputs, columns, group size): one panel and several, full and padded; groups that divide the columns or not."""
LARGEST = 127 * 256 + 127
BIT = 2.0**-24
"""Largest relative error of rounding to fp32."""


multiply = entry_point()(panels.multiply.py_func)
"""Cached on disk, as a step is: compiling takes seconds."""


@entry_point()
def rounded(w, matrix, vectors, scratch, codes, rows, scales_at):
    for r in range(rows):
        prepare_row(w, matrix, vectors, scratch, r * matrix[COLUMNS], codes, r, scratch, scales_at + r)


def matrix_of(outputs: int, columns: int, group: int, seed: int = 0) -> Groups:
    """A random matrix in groups. Each row has its own mean, so that zero points range from 0 to 15."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, columns, generator=rng) + torch.randn(outputs, 1, generator=rng)
    return quantize_groups(weight, 4, group)


def run(
    kind: type, weight: Groups, group: int, x: torch.Tensor, bias: torch.Tensor | None = None, add: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = x Wᵀ through `prepare_row` and `multiply`, the codes of x (`[rows, columns]`), and their steps (`[rows]`)."""
    (outputs, columns), rows = weight.codes.shape, len(x)
    packed = pack_nibbles(weight.codes.numpy(), weight.scales.numpy(), weight.zeros.numpy(), group, kind)
    padded = -(-outputs // LANES) * LANES
    matrix = np.full(MATRIX_FIELDS, NONE, np.int64)
    matrix[[PANEL, COLUMNS, OUTPUTS, GROUP]] = 0, columns, padded, group
    vectors = np.zeros(2 * padded, np.float32)
    if bias is not None:
        matrix[BIAS] = LANES
        vectors[LANES : LANES + outputs] = bias
    scales_at = x.numel()
    scratch = np.concatenate([x.numpy().reshape(-1), np.zeros(rows + SUMS_SIZE)]).astype(np.float32)
    codes = np.zeros((rows, row_size.py_func(columns, group)), np.uint8)
    out = np.full((rows, padded), 0.5 if add else np.nan, np.float32)
    rounded(packed, matrix, vectors, scratch, codes.reshape(-1), rows, scales_at)
    multiply(
        packed, matrix, vectors, scratch, 0, codes.reshape(-1), scales_at, rows, 0, padded // LANES, out.reshape(-1), 0,
        padded, add, scales_at + rows,
    )  # fmt: skip
    found = torch.from_numpy(codes[:, : 2 * columns].astype(np.int8)).long()
    steps = torch.from_numpy(scratch[scales_at : scales_at + rows].copy())
    return torch.from_numpy(out[:, :outputs]), 256 * found[:, :columns] + found[:, columns:], steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 50])
def test_products_match_the_dequantised_matrix(kind: type, rows: int) -> None:
    """Rounding changes each x by at most step / 2, so y by ‖w‖₁ · step / 2; each fp32 sum adds 2^-24 · Σ |w x|."""
    for outputs, columns, group in SHAPES:
        weight = matrix_of(outputs, columns, group, rows)
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        y, _, _ = run(kind, weight, group, x)
        meant = dequantize_groups(*weight, group).double()
        right, magnitude = x.double() @ meant.T, x.abs().double() @ meant.T.abs()
        step = x.abs().amax(1).double() / LARGEST if kind is NIBBLES else torch.zeros(rows)
        from_rounding = 0.501 * step[:, None] * meant.abs().sum(1)
        from_floats = (8 if kind is NIBBLES else columns) * BIT * magnitude
        assert ((y - right).abs() <= from_rounding + from_floats).all(), (outputs, columns, group)
        assert float((y - right).norm() / (x.norm() * meant.norm())) < 1e-5


def test_sums_of_whole_numbers_are_exact() -> None:
    """With scales that are powers of two and few groups, only the last product is rounded."""
    for outputs, columns, group in SHAPES:
        weight = matrix_of(outputs, columns, group)
        weight = weight._replace(scales=torch.ones_like(weight.scales))
        x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)).mul(2000).round().clamp(-9000, 9000)
        x[:, 5] = LARGEST
        y, codes, steps = run(NIBBLES, weight, group, x)
        signed = weight.codes.long() - weight.zeros.long().repeat_interleave(group, 1)[:, :columns]
        assert (steps == 1).all() and torch.equal(codes, x.long())
        exact = codes @ signed.T
        assert exact.abs().max() < 2**24  # so that fp32 holds it
        assert torch.equal(y.double(), exact.double())


@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_residual_are_added(kind: type) -> None:
    weight, x = matrix_of(80, 128, 64), torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(80.0)
    plain, _, _ = run(kind, weight, 64, x)
    y, _, _ = run(kind, weight, 64, x, bias, add=True)
    assert torch.allclose(y, plain + bias + 0.5, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: type) -> None:
    weight, x = matrix_of(80, 192, 128), torch.randn(55, 192, generator=torch.Generator().manual_seed(1))
    together, _, _ = run(kind, weight, 128, x)
    for first, last in ((0, 1), (3, 5), (10, 17), (40, 55)):
        assert torch.equal(run(kind, weight, 128, x[first:last])[0], together[first:last])


def test_a_matrix_is_one_stream_of_groups_each_after_its_scales_and_zero_points() -> None:
    columns, group = 96, 64
    weight = matrix_of(20, columns, group)
    flat = pack_nibbles(weight.codes.numpy(), weight.scales.numpy(), weight.zeros.numpy(), group)
    size = panel_size.py_func(columns, group)
    assert size == 2 * 16 + columns * 16 // 8 and len(flat) == 2 * size  # twenty outputs are two panels
    second_group = flat[size + 16 + group // 8 * 16 :]
    assert np.array_equal(second_group[:8].view(np.float16)[:4], weight.scales[16:, 1])
    assert np.array_equal(second_group[8:16].view(np.uint16)[:4], weight.zeros[16:, 1])
    for column in range(group, columns):
        eight, k = divmod(column - group, 8)
        words = second_group[16 + eight * 16 :][:4]
        assert np.array_equal(words >> (8 * (k % 4) + 4 * (k // 4)) & 15, weight.codes[16:, column])
        assert not second_group[16 + eight * 16 :][4:16].any()  # the rows that pad the panel


def test_bytes_of_a_weight() -> None:
    for group, bits in ((128, 4.25), (64, 4.5)):
        assert 32 * panel_size.py_func(896, group) / (896 * LANES) == bits


def one_group() -> Any:
    @njit(**OPTIONS)
    def product(w, x, columns, y):
        add_group(w, 0, 0, x, 0, 0, columns, 2 * columns, columns // 8, y, 0, 0, 1, 1)

    return product


@pytest.mark.parametrize("way", ways_here(), ids=lambda way: f"{way.byte_products} x {way.byte_lanes}")
@pytest.mark.parametrize(("code", "zero"), [(15, 0), (0, 15), (15, 15)])
def test_the_largest_numbers_of_the_longest_group_fit_with_every_instruction(
    code: int, zero: int, way: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(register_tiles, "processor", lambda: way)
    columns = MAX_GROUP_SIZE
    codes, zeros = np.full((16, columns), code, np.uint8), np.full((16, 1), zero, np.uint8)
    w = pack_nibbles(codes, np.ones((16, 1), np.float16), zeros, columns)
    row = np.full(row_size.py_func(columns, columns), 127, np.uint8)
    row[2 * columns :] = np.array([LARGEST * columns], np.int32).view(np.uint8)
    y = np.zeros(16, np.float32)
    one_group()(w, row, columns, y)
    assert np.array_equal(y, np.full(16, (code - zero) * LARGEST * columns, np.float32))
