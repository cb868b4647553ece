"""The picture of a split layer shows whose strip is where, and the two places where ranks wait for each other."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from minillm.errors import ConfigError
from minillm.viz import SplitLayer

HEADS = [(range(3), range(1)), (range(3, 6), range(1, 2))]


def parts(svg: str, name: str) -> list[dict[str, str]]:
    return [node.attrib for node in ElementTree.fromstring(svg).iter() if node.get("data-testid") == name]


def test_every_rank_has_a_strip_of_each_matrix_and_all_meet_twice() -> None:
    svg = SplitLayer(HEADS, 6, 768, 288).to_svg()
    slices = parts(svg, "slice")
    assert [s["data-split"] for s in slices if s["data-rank"] == "0"] == [
        "columns",
        "rows",
        "columns",
        "columns",
        "rows",
    ]
    for first, second in zip(slices[:5], slices[5:], strict=True):
        axis, size = ("x", "width") if first["data-split"] == "columns" else ("y", "height")
        assert float(first[size]) == float(second[size]) == 30
        step = 30 if axis == "x" else 92 + 30  # the second lane is lower
        assert float(second[axis]) - float(first[axis]) == step
    assert len(parts(svg, "all-reduce")) == 2 and len(parts(svg, "heads")) == 2


def test_the_description_says_what_the_picture_shows() -> None:
    words = SplitLayer([(range(2), range(1)), (range(2, 4), range(1))], 4, 96, 48).describe()
    assert "Rank 1 holds query heads 2-3 and KV heads 0" in words and "inner channels 48-95" in words
    assert "2 partial results of 48 numbers per token" in words


def test_same_contents_give_the_same_bytes() -> None:
    picture = SplitLayer(HEADS, 6, 768, 288)
    assert picture.to_svg() == picture.to_svg() and repr(picture) == "<SplitLayer>"
    assert "Σ" in SplitLayer([(range(6), range(2))], 6, 768, 288).to_svg()


@pytest.mark.parametrize("heads", [[], [(range(1), range(1))] * 9, [(range(0), range(1))], [(range(1), range(0))]])
def test_what_cannot_be_drawn_is_refused(heads: list[tuple[range, range]]) -> None:
    with pytest.raises(ConfigError, match="rank"):
        SplitLayer(heads, 6, 768, 288)
