"""Bars begin and end where their parts do, on their lane, and the words say the same."""

from __future__ import annotations

import pytest

from minillm.errors import ConfigError
from minillm.viz.timeline.transfer_timeline import BAR, LANE, TimedPart, TransferRow, TransferTimeline
from tests.viz.pictures import description, found, parse, text_of

SPLIT = TransferRow(
    "recompute <a third>",
    [
        TimedPart("link", "activations", 0, 0.01),
        TimedPart("compute", "recompute", 0.01, 0.03),
        TimedPart("link", "keys and values", 0.01, 0.04),
    ],
    "l = 12",
)
ALL = TransferRow("send everything", [TimedPart("link", "keys and values", 0, 0.06)])
PICTURE = TransferTimeline("One cache comes back", [ALL, SPLIT], "over a link")


def bars(row: str) -> list[tuple[str, float, float, float]]:
    """(part, x, y, width) of a row."""
    [group] = [g for g in found(PICTURE.to_svg(), "transfer") if g.get("data-row") == row]
    drawn = [g for g in group if g.get("data-testid") == "part"]
    return [(g.get("data-part"), *(float(g[0].get(key)) for key in ("x", "y", "width"))) for g in drawn]


def test_bars_lie_where_their_parts_ran() -> None:
    [(_, left, top, width)] = bars("send everything")
    scale = width / 0.06
    rows = {name: (x, y, w) for name, x, y, w in bars("recompute <a third>")}
    for part in SPLIT.parts:
        x, _, w = rows[part.name]
        assert x - left == pytest.approx(part.start * scale, abs=0.11)
        assert w == pytest.approx((part.end - part.start) * scale, abs=0.11)
    assert rows["activations"][1] == rows["keys and values"][1] == rows["recompute"][1] - LANE
    assert rows["activations"][1] > top + LANE + BAR, "rows do not overlap"


def test_words_and_totals() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe()
    assert "send everything: 60 ms (keys and values on the link lane from 0.00 ms to 60 ms)." in words
    assert "recompute <a third>: 40 ms" in words
    shown = text_of(parse(PICTURE.to_svg()))
    assert "l = 12" in shown and "over a link" in shown and "prefill" not in shown, "the legend has what is drawn"
    assert repr(PICTURE) == "<TransferTimeline>" and PICTURE.to_svg() == PICTURE.to_svg()


def test_everything_stays_inside() -> None:
    svg = PICTURE.to_svg()
    right = float(parse(svg).get("viewBox").split()[2])
    assert all(0 <= float(g[0].get("x")) <= float(g[0].get("x")) + float(g[0].get("width")) <= right - 90
               for g in found(svg, "part"))  # fmt: skip


@pytest.mark.parametrize("seconds", [2e-6, 0.0004, 0.9, 400.0])
def test_the_axis_has_a_few_ticks_at_any_scale(seconds: float) -> None:
    svg = TransferTimeline("t", [TransferRow("a", [TimedPart("link", "rotate", 0, seconds)])]).to_svg()
    ticks = [e for e in parse(svg).iter() if e.get("d", "").endswith("v5")]
    assert 3 <= len(ticks) <= 10


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "at least one row"),
        ([TransferRow("a", [])], "a part that takes time"),
        ([TransferRow("a", [TimedPart("link", "wait", 0, 1)])], "'wait' on 'link'; the parts are activations"),
        ([TransferRow("a", [TimedPart("disk", "rotate", 0, 1)])], "'rotate' on 'disk'"),
        ([TransferRow("a", [TimedPart("link", "rotate", 2, 1), TimedPart("link", "rotate", 0, 1)])], "from 2 to 1 s"),
    ],
)
def test_what_cannot_be_drawn_is_refused(rows: list[TransferRow], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TransferTimeline("t", rows)
