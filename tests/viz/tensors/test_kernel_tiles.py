"""The picture of programs over a tensor, and the experiment that finds out who wrote what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.viz.tensors.kernel_tiles import KernelTiles, find_writers
from tests.viz.pictures import description, found, states, text_of


def programs(shape: tuple[int, int], tile: tuple[int, int], masked: bool = True, skip: int = -1):
    """A launch in plain Python: each program writes its tile, number by number, where `out.stride` says."""
    (rows, columns), (high, wide) = shape, tile

    def launch(grid: tuple[int, int], out: Tensor) -> None:
        memory = out.as_strided((out.untyped_storage().nbytes() // 4,), (1,), 0)
        for i in range(grid[0]):
            for j in range(grid[1]):
                for r in range(i * high, (i + 1) * high):
                    for c in range(j * wide, (j + 1) * wide):
                        if (not masked or (r < rows and c < columns)) and (i, j) != (skip, skip):
                            memory[r * out.stride(0) + c] = 1.0

    return launch


def test_each_lane_is_its_programs():
    tiles = find_writers(programs((3, 5), (1, 4)), (3, 5), (1, 4))
    assert tiles.owners == [[n, n, n, n, n + 1, -1, -1, -1] for n in (0, 2, 4)]
    assert tiles.counts == {"written": 15, "masked": 9, "missed": 0, "outside": 0}
    assert tiles.num_programs == 6


def test_tiles_of_several_rows_stick_out_below():
    tiles = find_writers(programs((3, 4), (2, 8)), (3, 4), (2, 8), gaps=False)
    assert [row[0] for row in tiles.owners] == [0, 0, 1, -1]
    assert tiles.counts == {"written": 12, "masked": 20, "missed": 0, "outside": 0}


def test_what_is_written_beyond_the_tensor_shows_and_is_crossed_out():
    tiles = find_writers(programs((2, 5), (1, 4), masked=False), (2, 5), (1, 4))
    assert tiles.counts == {"written": 10, "masked": 0, "missed": 0, "outside": 6}
    svg = tiles.to_svg()
    assert states(svg, "lane").count("outside") == 6
    assert "✗3" in svg and "6 beyond the tensor" in description(svg)
    assert "written beyond the tensor" in text_of(found(svg, "legend")[0])


def test_what_nobody_wrote_is_missed():
    tiles = find_writers(programs((2, 5), (1, 4), skip=1), (2, 5), (1, 4))
    assert tiles.counts["missed"] == 1
    assert "1 never written" in tiles.describe()


def test_the_picture_says_what_the_counts_say():
    svg = find_writers(programs((1, 13), (1, 8)), (1, 13), (1, 8), "stamp <kernel>").to_svg()
    lanes = found(svg, "lane")
    assert [lane.get("data-program") for lane in lanes] == ["0"] * 8 + ["1"] * 5 + [None] * 3
    assert states(svg, "lane").count("masked") == 3
    assert len({lane.get("fill") for lane in lanes}) == 3  # two programs and the hatch
    assert description(svg) == "1 × 13 numbers, 2 programs of 8 lanes, 13 written, 3 masked."
    assert "never written" not in svg and "stamp &lt;kernel&gt;" in svg


def test_every_program_that_fits_a_page_is_told_apart_without_colour():
    svg = find_writers(programs((1, 40), (1, 4)), (1, 40), (1, 4)).to_svg()
    assert {lane.get("data-program") for lane in found(svg, "lane")} == {str(n) for n in range(10)}
    assert all(f">{n}</text>" in svg for n in range(10))


def test_it_repeats_itself_and_has_a_plain_name():
    one, two = (find_writers(programs((2, 3), (1, 2)), (2, 3), (1, 2)) for _ in "ab")
    assert one == two and one.to_svg() == two.to_svg() and repr(one) == "<KernelTiles>"


def test_half_precision_works_too():
    def launch(grid: tuple[int, int], out: Tensor) -> None:
        out[: grid[0]] = 1

    assert find_writers(launch, (3, 4), (1, 4), dtype=torch.float16).counts["written"] == 12


@pytest.mark.parametrize(
    ("owners", "shape", "says"),
    [([[0] * 65], (1, 65), "at most 64"), ([[0, 0]], (2, 2), "do not cover")],
)
def test_what_cannot_be_drawn_is_refused(owners, shape, says):
    with pytest.raises(ConfigError, match=says):
        KernelTiles(owners, shape, (1, 1))


@pytest.mark.parametrize(
    ("owners", "shape", "tile"),
    [([], (1, 1), (1, 1)), ([[]], (1, 1), (1, 1)), ([[0, 0], [0]], (2, 2), (1, 1)), ([[0]], (1, 1), (0, 1))],
)
def test_lanes_that_are_no_tiles_of_a_tensor_are_refused(
    owners: list[list[int]], shape: tuple[int, int], tile: tuple[int, int]
) -> None:
    with pytest.raises(ConfigError, match=r"do not cover|rows equally long"):
        KernelTiles(owners, shape, tile)
