"""The inner loops compiled for processors other than this one."""

from __future__ import annotations

import pytest

from minillm.bench.machine_code import byte_loop, float_loop

NARROW = ["haswell", "alderlake", "apple-m1", "neoverse-n1", "neoverse-v1"]
WIDE = ["skylake-avx512", "cascadelake"]
pytestmark = pytest.mark.usefixtures("every_target")
FEW = 4
"""Most spills that are allowed: LLVM 15 (numba 0.61) has some on ARM, later versions none."""


@pytest.mark.parametrize("name", NARROW)
def test_six_rows_of_one_panel_stay_in_narrow_registers(name: str) -> None:
    """With four panels, as for AVX-512, sums would be spilled to memory in each iteration."""
    loop = float_loop(name, rows=6, panels=1)
    assert loop.spills <= FEW
    assert sum(loop.multiplications.values()) in (12, 24)  # six sums in two registers, or in four
    assert float_loop(name, rows=6, panels=4).spills > 50


@pytest.mark.parametrize("name", WIDE)
def test_six_rows_of_four_panels_stay_in_wide_registers_and_do_not_move(name: str) -> None:
    """24 multiply-adds, 10 loads, and little more. Loads in another order once cost 44 moves and 4 spills a round."""
    loop = float_loop(name, rows=6, panels=4)
    assert loop.spills == 0 and loop.multiplications == {"vfmadd231ps": 24}
    assert len(loop.lines) < 50


@pytest.mark.parametrize(
    ("name", "panels", "instruction", "count"),
    [
        ("cascadelake", 4, "vpdpbusd", 24),
        ("alderlake", 1, "vpdpbusd", 12),
        ("apple-m1", 1, "sdot", 24),
        ("neoverse-n1", 1, "sdot", 24),
        ("neoverse-v1", 1, "sdot", 24),
    ],
)
def test_bytes_are_multiplied_by_the_instruction_for_it_and_little_else(
    name: str, panels: int, instruction: str, count: int
) -> None:
    loop = byte_loop(name, rows=6, panels=panels)
    assert loop.multiplications == {instruction: count} and loop.spills <= FEW
    assert len(loop.lines) < 2 * count + 8


@pytest.mark.parametrize(("name", "panels"), [("haswell", 1), ("skylake-avx512", 4)])
def test_without_such_an_instruction_pairs_are_multiplied_in_tiles_of_four_rows(name: str, panels: int) -> None:
    loop = byte_loop(name, rows=4, panels=panels)
    assert list(loop.multiplications) == ["vpmaddwd"] and loop.spills == 0
