"""The picture of an attention mask."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from minillm.errors import ConfigError
from minillm.teaching.exercises.l02_kv_cache import offset_mask
from minillm.viz.tensors.mask_grid import MaskGrid

SVG = "{http://www.w3.org/2000/svg}"


def test_cells_are_the_mask_and_seen_ones_carry_a_dot():
    mask = offset_mask(2, 3).tolist()
    root = ET.fromstring(MaskGrid(mask, ["def", " f", "(", "<x>", "\n"], past=3).to_svg())
    rows = [g for g in root.iter(f"{SVG}g") if g.get("data-testid") == "query"]
    assert [[r.get("data-state") == "seen" for r in row.iter(f"{SVG}rect")] for row in rows] == mask
    assert [len(list(row.iter(f"{SVG}circle"))) for row in rows] == [4, 5]


def test_words_count_what_each_token_sees():
    grid = MaskGrid(offset_mask(2, 3).tolist(), list("abcde"), past=3)
    assert grid.describe() == "2 new tokens after 3 cached ones may see 4, 5 of 5 keys."
    assert repr(grid) == "<MaskGrid>"


def test_nothing_cached_draws_no_border():
    svg = MaskGrid(offset_mask(2, 0).tolist(), ["a", "b"], past=0).to_svg()
    assert "from the cache" not in svg and "stroke-dasharray" not in svg


def test_many_keys_are_drawn_small():
    svg = MaskGrid([[True, False] * 200], ["key"] * 400, past=399).to_svg()
    boxes = [e for e in ET.fromstring(svg).iter(f"{SVG}rect") if e.get("data-state")]
    assert len(boxes) == 400 and all(float(box.get("width")) > 0 for box in boxes)
    assert "from the cache" in svg and svg.count(">key<") <= 1


@pytest.mark.parametrize(
    ("mask", "keys", "past"),
    [
        ([], [], 0),
        ([[True]], ["a"], -1),
        ([[True]], ["a", "b"], 0),
        ([[True]], ["a", "b"], 1),
        ([[True] * 3], ["a"], 2),
    ],
)
def test_a_mask_that_does_not_fit_its_tokens_is_refused(mask: list[list[bool]], keys: list[str], past: int) -> None:
    with pytest.raises(ConfigError, match="give one key per token"):
        MaskGrid(mask, keys, past)
