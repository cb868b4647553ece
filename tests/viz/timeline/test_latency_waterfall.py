"""Parts are as long as their times, follow each other without gaps, and the text says the same as the picture."""

from __future__ import annotations

import itertools
import json

import pytest

from minillm.errors import ConfigError
from minillm.viz.timeline.latency_waterfall import COLOURS, LETTERS, Latency, LatencyWaterfall
from tests.viz.pictures import description, found, parse, text_of

PLAIN = Latency("plain", {"tokenise": 0.001, "prefill": 0.060, "target": 0.120, "python": 0.010, "detokenise": 0.0005})
FAST = Latency("compiled <16>", {"tokenise": 0.001, "prefill": 0.040, "target": 0.038, "python": 0.008}, before="plain")
DRAFT = Latency("draft", {"prefill": 0.040, "draft": 0.020, "target": 0.030, "python": 0.012}, before="compiled <16>")
PICTURE = LatencyWaterfall("one completion", [PLAIN, FAST, DRAFT])


def bars(svg: str, name: str) -> list[tuple[str, float, float]]:
    """(part, where it begins, width) of one row, from left to right."""
    [group] = [g for g in found(svg, "latency") if g.get("data-system") == name]
    parts = [e for e in group if e.get("data-testid") == "part"]
    return [(e.get("data-part"), float(e.get("x")), float(e.get("width"))) for e in parts]


def test_parts_are_as_long_as_their_times_and_follow_each_other() -> None:
    svg = PICTURE.to_svg()
    scale = sum(width for _, _, width in bars(svg, "plain")) / PLAIN.total
    for row in PICTURE.rows:
        drawn = bars(svg, row.name)
        assert [part for part, _, _ in drawn] == [part for part in COLOURS if part in row.seconds]
        for part, _, width in drawn:
            assert width == pytest.approx(row.seconds[part] * scale, abs=0.11)
        for (_, x, width), (_, following, _) in itertools.pairwise(drawn):
            assert x + width == pytest.approx(following, abs=0.11)


def test_everything_stays_inside() -> None:
    svg = PICTURE.to_svg()
    width = float(parse(svg).get("viewBox").split()[2])
    for element in parse(svg).iter():
        if element.get("data-testid") in ("part", "saved", "lost"):
            assert 0 <= float(element.get("x")) <= float(element.get("x")) + float(element.get("width")) <= width


def test_what_was_saved_and_what_was_lost_reach_to_the_row_before() -> None:
    svg = PICTURE.to_svg()
    scale = sum(width for _, _, width in bars(svg, "plain")) / PLAIN.total
    [saved], [lost] = found(svg, "saved"), found(svg, "lost")
    assert float(saved.get("width")) == pytest.approx((PLAIN.total - FAST.total) * scale, abs=0.2)
    assert float(lost.get("width")) == pytest.approx((DRAFT.total - FAST.total) * scale, abs=0.2)


def test_text_of_the_picture_names_totals_ratios_and_the_limit() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe()
    assert "plain: 192 ms, over the limit (target 120 ms, prefill 60 ms, python 10.0 ms, rest 1.5 ms)" in words
    assert "compiled <16>: 87 ms, under the limit, 2.20× as fast as plain" in words
    assert "draft: 102 ms, over the limit, 0.85× as fast as compiled <16>" in words
    states = {g.get("data-system"): g.get("data-state") for g in found(PICTURE.to_svg(), "latency")}
    assert states == {"plain": "over", "compiled <16>": "under", "draft": "over"}


def test_small_parts_are_summed_up_in_words_and_the_sum_is_the_whole() -> None:
    [row] = [g for g in found(PICTURE.to_svg(), "latency") if g.get("data-system") == "plain"]
    assert "rest 1.5 ms" in text_of(row)
    assert PLAIN.total == pytest.approx(0.1915)


def test_the_picture_explains_what_was_saved_what_was_lost_and_what_a_row_is_compared_with() -> None:
    for rows, signs in (([PLAIN], []), ([PLAIN, FAST], ["time saved"]), (PICTURE.rows, ["time saved", "time lost"])):
        texts = [text_of(e) for e in parse(LatencyWaterfall("t", rows).to_svg()).iter() if e.tag.endswith("text")]
        assert [text for text in texts if text.startswith("time ")] == signs
        assert [text for text in texts if text.startswith("as ")] == [f"as {row.before}" for row in rows if row.before]


def test_parts_of_the_plotly_figure_differ_without_colour() -> None:
    traces = PICTURE.to_plotly()["data"]
    letters = [LETTERS[part] for part in COLOURS if any(part in row.seconds for row in PICTURE.rows)]
    assert [trace["text"] for trace in traces] == [[letter] * 3 for letter in letters]
    assert [trace["name"].partition(":")[0] for trace in traces] == letters


def test_another_limit_moves_the_verdict() -> None:
    words = LatencyWaterfall("t", [FAST.__class__("a", FAST.seconds)], limit=0.05).describe()
    assert "a: 87 ms, over the limit" in words and "limit of 50 ms" in words


def test_plotly_accepts_the_figure_and_stacks_the_same_parts() -> None:
    import plotly.graph_objects as go

    bundle = PICTURE._repr_mimebundle_()
    json.dumps(bundle, allow_nan=False)
    assert {"image/svg+xml", "text/plain"} < set(bundle)
    figure = go.Figure(bundle["application/vnd.plotly.v1+json"])
    assert figure.layout.barmode == "stack"
    totals = [sum(values) for values in zip(*(trace.x for trace in figure.data), strict=True)]
    assert totals == pytest.approx([1000 * row.total for row in reversed(PICTURE.rows)])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no rows"),
        ([Latency("a", {"wait": 1.0})], "has a part 'wait'; the parts are tokenise, queue"),
        ([Latency("a", {"draft": -1.0})], "draft took -1.0 seconds"),
        ([Latency("a", {"draft": float("nan")})], "draft took nan seconds"),
        ([Latency("a", {"draft": float("inf")})], "draft took inf seconds"),
        ([Latency("a", {}), Latency("a", {})], "two rows 'a'"),
        ([Latency("a", {}, before="b"), Latency("b", {})], "before='b', which is not an earlier row"),
    ],
)
def test_what_cannot_be_drawn_is_refused(rows: list[Latency], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LatencyWaterfall("t", rows)


@pytest.mark.parametrize("limit", [0.0, -0.1, float("inf"), float("nan")])
def test_a_limit_that_is_no_time_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match=f"limit = {limit} seconds"):
        LatencyWaterfall("t", [Latency("a", {"draft": 1.0})], limit=limit)


def test_plotly_says_the_values_and_the_limit_and_keeps_its_legend_off_the_axis():
    layout = PICTURE.to_plotly()["layout"]
    told = [note["text"] for note in layout["annotations"]]
    assert told[0] == "100 ms limit"
    assert len(told) == 1 + len(PICTURE.rows) and all("ms</b>" in text for text in told[1:])
    assert layout["legend"]["yref"] == "container"


def test_a_row_that_took_no_time_is_compared_with_nothing() -> None:
    svg = LatencyWaterfall("nothing", [PLAIN, Latency("cached", {}, before="plain")]).to_svg()
    assert "as fast" not in svg and len(found(svg, "saved")) == 1
