"""What a query may read: the cells of each panel are those that the technique keeps."""

from __future__ import annotations

import pytest

from minillm.errors import ConfigError
from minillm.viz.tensors.kept_cache import BOX_HEIGHT, BOX_WIDTH, KeptCache, KeptPart
from tests.viz.pictures import description, found, text_of

CHANNELS = KeptPart("think", "channels", [True, False, True, True], [True] * 10, 8, "2 of <4> heads")
TOKENS = KeptPart("squeezed", "channels", [True] * 4, [True, False, False, True, True, False, True, True], 6)
PICTURE = KeptCache([CHANNELS, TOKENS])


def area(element) -> float:
    return float(element.get("width")) * float(element.get("height")) / (BOX_WIDTH * BOX_HEIGHT)


def test_shares_count_cells() -> None:
    assert CHANNELS.share == pytest.approx((0.75 * 8 + 2) / 10)
    assert TOKENS.share == pytest.approx((3 + 2) / 8)
    assert KeptPart("all", "ranks", [True], [True, True], 0).share == 1


def test_filled_areas_are_the_shares() -> None:
    panels = found(PICTURE.to_svg(), "panel")
    for panel, part in zip(panels, PICTURE.parts, strict=True):
        filled = sum(area(e) for e in panel if e.get("data-testid") in ("kept", "whole"))
        assert filled == pytest.approx(part.share, abs=0.01)
        assert panel.get("data-share") == f"{part.share:.3f}"


def test_neighbours_are_one_rectangle_at_their_place() -> None:
    kept = found(PICTURE.to_svg(), "kept")
    assert len(kept) == 2 + 2, "channel 0, and channels 2 and 3 together; token 0, and tokens 3 and 4 together"
    tops = [float(e.get("y")) for e in kept[:2]]
    assert tops[1] - tops[0] == pytest.approx(BOX_HEIGHT / 2, abs=0.1)
    lefts = [float(e.get("x")) for e in kept[2:]]
    assert lefts[1] - lefts[0] == pytest.approx(3 * BOX_WIDTH / 8, abs=0.2)


def test_the_window_is_hatched_and_ends_the_panel() -> None:
    svg = PICTURE.to_svg()
    for window, panel in zip(found(svg, "whole"), found(svg, "panel"), strict=True):
        box = panel[0]
        right = float(box.get("x")) + float(box.get("width"))
        assert float(window.get("x")) + float(window.get("width")) == pytest.approx(right, abs=0.2)
        assert window.get("fill").startswith("url(#whole-")


def test_words_say_what_is_kept() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe() and repr(PICTURE) == "<KeptCache>"
    assert "think: 3 of 4 channels of 8 of 8 old tokens, and 2 whole tokens: 80% of the cells. 2 of <4> heads." in words
    assert "squeezed: 4 of 4 channels of 3 of 6 old tokens, and 2 whole tokens: 62% of the cells." in words


def test_panels_do_not_overlap_and_stay_inside() -> None:
    svg = KeptCache([CHANNELS] * 5).to_svg()
    [root] = found(svg, "kept-cache")
    boxes = [(float(p[0].get("x")), float(p[0].get("y"))) for p in found(svg, "panel")]
    assert len(set(boxes)) == 5
    assert max(x for x, _ in boxes) + BOX_WIDTH <= 957
    assert max(y for _, y in boxes) + BOX_HEIGHT + 60 < float(root.get("height"))
    assert "2 of <4> heads" in text_of(root)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "0 techniques"),
        ([CHANNELS] * 9, "9 techniques"),
        ([KeptPart("a", "ranks", [], [True], 0)], "0 rows and 1 tokens"),
        ([KeptPart("a", "ranks", [True], [], 0)], "1 rows and 0 tokens"),
        ([KeptPart("a", "ranks", [True], [True], 2)], "whole_from=2 must be from 0 to 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(parts, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KeptCache(parts)
