"""Blocks that a draft reads: each view shows exactly its own, under the attention that they got."""

from __future__ import annotations

import pytest

from minillm.errors import ConfigError
from minillm.viz.speculation.viewed_blocks import BlockView, ViewedBlocks
from tests.viz.pictures import description, found, states, text_of

ATTENTION = [0.5, 0.0, 2.0, 0.25, 1.0]
PICTURE = ViewedBlocks(
    ATTENTION,
    [BlockView("sink and window", [0, 3, 4], "drafts “x”", False), BlockView("Snap<KV>", [2, 3, 4], "drafts “y”")],
    {2: "def y"},
)


def test_each_view_shows_the_blocks_that_it_reads() -> None:
    shown = states(PICTURE.to_svg(), "block")
    as_read = [[state == "read" for state in shown[i : i + 5]] for i in (0, 5)]
    assert as_read == [[True, False, False, True, True], [False, False, True, True, True]]


def test_read_blocks_are_taller_than_the_others() -> None:
    cells = found(PICTURE.to_svg(), "block")
    heights = {
        state: {float(c.get("height")) for c in cells if c.get("data-state") == state} for state in ("read", "skipped")
    }
    assert min(heights["read"]) > 2 * max(heights["skipped"]), "so that colour is not the only sign"


def test_bars_are_as_high_as_the_root_of_the_attention() -> None:
    bars = found(PICTURE.to_svg(), "attention")
    heights = [float(bar.get("height")) for bar in bars]
    assert [h / max(heights) for h in heights] == pytest.approx([(a / 2.0) ** 0.5 for a in ATTENTION], abs=0.01)


def test_the_pointer_goes_through_the_marked_block_in_every_row() -> None:
    svg = PICTURE.to_svg()
    [pointer] = found(svg, "marked")
    bar = found(svg, "attention")[2]
    middle = float(bar.get("x")) + float(bar.get("width")) / 2
    assert float(pointer.get("d")[1:].split()[0]) == pytest.approx(middle, abs=1)
    assert pointer.get("d").count("M") == 1 + len(PICTURE.views)
    assert "▾ def y" in text_of(found(svg, "viewed-blocks")[0])


def test_outcomes_have_a_sign() -> None:
    outcomes = found(PICTURE.to_svg(), "outcome")
    assert [o.get("data-state") for o in outcomes] == ["bad", "good"]
    assert [text_of(o)[0] for o in outcomes] == ["✗", "✓"]


def test_words_say_what_is_read() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe() and repr(PICTURE) == "<ViewedBlocks>"
    assert "5 blocks. Most attention: blocks 0, 2, 4. def y: block 2." in words
    assert "sink and window reads blocks 0, 3, 4: drafts “x”." in words
    assert "Snap<KV> reads blocks 2, 3, 4: drafts “y”." in words


def test_hundreds_of_blocks_stay_inside_the_picture() -> None:
    picture = ViewedBlocks([1.0] * 300, [BlockView("a", range(0, 300, 7))], {299: "the end"})
    cells = found(picture.to_svg(), "block")
    assert len(cells) == 300 and max(float(c.get("x")) + float(c.get("width")) for c in cells) <= 957
    assert picture.to_svg().count('data-testid="outcome"') == 0


def test_no_attention_at_all_can_be_drawn() -> None:
    bars = found(ViewedBlocks([0.0, 0.0], [BlockView("a", [0])], {}).to_svg(), "attention")
    assert [float(bar.get("height")) for bar in bars] == [0, 0]


@pytest.mark.parametrize(
    ("attention", "views", "marked", "says"),
    [
        ([], [BlockView("a", [])], {}, "0 blocks"),
        ([1.0], [], {}, "0 views"),
        ([1.0], [BlockView("a", [0])] * 5, {}, "5 views"),
        ([1.0, 1.0], [BlockView("a", [2])], {}, "no block 2; the request has blocks 0 to 1"),
        ([1.0, 1.0], [BlockView("a", [-1])], {}, "no block -1"),
        ([1.0, 1.0], [BlockView("a", [0])], {5: "x"}, "no block 5"),
    ],
)
def test_what_cannot_be_drawn_is_refused(attention, views, marked, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ViewedBlocks(attention, views, marked)
