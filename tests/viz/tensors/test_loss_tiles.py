"""The picture of a loss in tiles shows which tile exists, which are merged, and how much of each row they hold."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from minillm.errors import ConfigError
from minillm.viz import LossTiles

MASS = [[0.5, 0.25, 0.25], [0.125, 0.625, 0.25], [0.2, 0.2, 0.6]]


def parts(svg: str, name: str) -> list[dict[str, str]]:
    return [node.attrib for node in ElementTree.fromstring(svg).iter() if node.get("data-testid") == name]


def test_tiles_before_the_one_that_exists_are_merged_and_those_after_it_are_not() -> None:
    picture = LossTiles(MASS, 8, at=(1, 1))
    states = [tile["data-state"] for tile in parts(picture.to_svg(), "tile")]
    assert states == ["merged"] * 4 + ["now"] + ["later"] * 4
    assert [picture.merged(i) for i in range(3)] == [1.0, 0.75, 0.0]


def test_bars_are_as_long_as_the_share_that_is_in_the_sum() -> None:
    bars = parts(LossTiles(MASS, 8, at=(2, 0)).to_svg(), "sum")
    assert [(bar["data-row"], float(bar["width"])) for bar in bars] == [("0", 250.0), ("1", 250.0), ("2", 50.0)]


def test_the_description_says_what_the_picture_shows() -> None:
    picture = LossTiles(MASS, 4, at=(2, 1))
    words = picture.describe()
    assert "3 × 3 tiles of 4 × 4" in words and "tile (2, 1)" in words and "rows of tile 2: 40%" in words
    assert "16 of 144 similarities exist at a time" in picture.to_svg()
    assert picture.to_svg() == picture.to_svg() and repr(picture) == "<LossTiles>"


@pytest.mark.parametrize(
    ("mass", "at"), [([], (0, 0)), ([[1.0]] * 2, (0, 0)), ([[0.1] * 11] * 11, (0, 0)), (MASS, (3, 0)), (MASS, (0, -1))]
)
def test_what_cannot_be_drawn_is_refused(mass: list[list[float]], at: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="tile"):
        LossTiles(mass, 8, at)
