"""Codebook cells: every point lies in the cell of its nearest centre, and the lost share is right."""

from __future__ import annotations

import random

import pytest

from minillm.errors import ConfigError
from minillm.viz.tensors.codebook_cells import CodebookCells, PointCloud, cell
from tests.viz.pictures import description, found, text_of

CROSS = PointCloud("four <points>", [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)], [(1.0, 0.0), (-1.0, 0.0)])
PICTURE = CodebookCells("A pair", [CROSS, PointCloud("exact", [(0.5, 0.5)], [(0.5, 0.5)])])


def inside(point, corners) -> bool:
    """Whether a point lies in a convex polygon, by the signs of the areas to its edges."""
    signs = [
        (u - x) * (point[1] - y) - (v - y) * (point[0] - x)
        for (x, y), (u, v) in zip(corners, [*corners[1:], *corners[:1]], strict=True)
    ]
    return all(s >= -1e-9 for s in signs) or all(s <= 1e-9 for s in signs)


def test_cells_hold_the_points_that_are_nearest_to_their_centre() -> None:
    rng = random.Random(3)
    centres = [(rng.uniform(-1, 1), rng.uniform(-1, 1)) for _ in range(7)]
    cells = [cell(centre, centres, 1.0) for centre in centres]
    for _ in range(200):
        point = (rng.uniform(-1, 1), rng.uniform(-1, 1))
        distances = [(point[0] - x) ** 2 + (point[1] - y) ** 2 for x, y in centres]
        nearest = distances.index(min(distances))
        assert [inside(point, corners) for corners in cells].index(True) == nearest


def test_a_single_centre_has_the_whole_square() -> None:
    assert cell((0.2, 0.1), [(0.2, 0.1)], 2.0) == [(-2, -2), (2, -2), (2, 2), (-2, 2)]


def test_the_lost_share_is_the_squared_distance() -> None:
    assert CROSS.error == pytest.approx((2 + 2) / 4)
    assert PICTURE.clouds[1].error == 0
    assert PointCloud("origin", [(0.0, 0.0)], [(1.0, 0.0)]).error == 0


def test_every_centre_is_drawn_in_its_cell() -> None:
    svg = PICTURE.to_svg()
    assert [len(found(svg, name)) for name in ("cell", "centre", "cloud")] == [3, 3, 2]
    errors = [float(cloud.get("data-error")) for cloud in found(svg, "cloud")]
    assert errors == [1.0, 0.0]


def test_both_squares_have_one_scale_and_stay_inside() -> None:
    svg = PICTURE.to_svg()
    assert PICTURE.reach == pytest.approx(1.05)
    squares = [next(e for e in cloud if e.tag.endswith("rect")) for cloud in found(svg, "cloud")]
    assert len({square.get("width") for square in squares}) == 1
    assert max(float(s.get("x")) + float(s.get("width")) for s in squares) <= 957


def test_words_say_what_is_lost() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe() and repr(PICTURE) == "<CodebookCells>"
    assert "four <points>: 4 points, 2 centres; 100.0% of the squared length is lost." in words
    assert "four <points>" in text_of(found(PICTURE.to_svg(), "codebook-cells")[0])


@pytest.mark.parametrize(
    ("clouds", "says"),
    [
        ([], "0 clouds"),
        ([CROSS] * 4, "4 clouds"),
        ([PointCloud("a", [], [(0.0, 0.0)])], "0 points and 1 centres"),
        ([PointCloud("a", [(0.0, 0.0)], [])], "1 points and 0 centres"),
    ],
)
def test_what_cannot_be_drawn_is_refused(clouds, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CodebookCells("a", clouds)
