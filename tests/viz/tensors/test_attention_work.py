"""The picture of work done again: its counts, its shapes and its words."""

from __future__ import annotations

import re

import pytest

from minillm.errors import TraceError
from minillm.teaching.exercises.l01_decoding import total_work
from minillm.trace import StepFinished, Trace
from minillm.viz.live.live_view import LiveView
from minillm.viz.tensors.attention_work import GRID, AttentionWorkView, ForwardWork
from tests.viz.pictures import description, found, parse, text_of


def naive(num_prompt: int, num_new: int) -> Trace:
    """Everything again in every forward; the prompt is new once."""
    lengths = range(num_prompt, num_prompt + num_new)
    return Trace([ForwardWork(n, n, n if n == num_prompt else 1) for n in lengths])


def remembering(num_prompt: int, num_new: int) -> Trace:
    """The prompt at once, then only the newest row."""
    lengths = range(num_prompt, num_prompt + num_new)
    return Trace([ForwardWork(n, new, new) for n in lengths for new in (n if n == num_prompt else 1,)])


def test_pairs_are_those_of_the_mask_counted_cell_by_cell():
    for num_tokens in range(1, 9):
        for num_rows in range(1, num_tokens + 1):
            queries = range(num_tokens - num_rows, num_tokens)
            counted = sum(key <= query for query in queries for key in range(num_tokens))
            assert ForwardWork(num_tokens, num_rows, 1).pairs == counted


def test_totals_are_the_lessons_formula():
    shown = [text_of(element) for element in parse(AttentionWorkView(naive(20, 32)).to_svg()).iter()]
    rows, pairs = total_work(20, 32)
    assert f"{rows:,}" in shown and f"{pairs:,}" in shown
    assert f"{20 + 31} new, {rows - 51:,} redone" in shown
    assert f"{51 * 52 // 2:,} new, {pairs - 51 * 52 // 2:,} redone" in shown


def test_columns_add_up_to_the_text_and_name_their_states():
    view = AttentionWorkView(naive(3, 4))
    columns = found(view.to_svg(), "forward")
    assert [column.get("data-step") for column in columns] == ["1", "2", "3", "4"]
    for column, work in zip(columns, view.forwards(), strict=True):
        heights = {e.get("data-state"): float(e.get("height")) for e in column}
        assert sum(heights.values()) == pytest.approx(GRID / 6 * work.num_tokens, abs=0.2), "6 tokens fill the grid"
        assert heights["new"] == pytest.approx(GRID / 6 * work.num_new, abs=0.1)
        assert ("redone" in heights) == (work.num_rows > work.num_new)


def test_triangle_has_the_area_of_the_pairs():
    svg = AttentionWorkView(naive(3, 4)).to_svg()
    areas = {path.get("data-state"): area(path.get("d")) for path in found(svg, "queries")}
    cell = (GRID / 6) ** 2
    assert areas["new"] == pytest.approx(6 * cell, rel=1e-3)
    assert areas["redone"] == pytest.approx((1 + 2 + 3 + 4 + 5) * cell, rel=1e-3)


def area(path: str) -> float:
    """Of the polygon that a path of M, H and V draws (shoelace)."""
    points, x, y = [], 0.0, 0.0
    for command, numbers in re.findall(r"([MHV])([\d. ]+)", path):
        values = [float(n) for n in numbers.split()]
        x, y = (values[0], values[1]) if command == "M" else (values[0], y) if command == "H" else (x, values[0])
        points.append((x, y))
    turned = zip(points, points[1:] + points[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in turned)) / 2


def test_with_a_memory_nothing_is_redone():
    svg = AttentionWorkView(remembering(20, 32)).to_svg()
    assert {e.get("data-state") for column in found(svg, "forward") for e in column} == {"new", "remembered"}
    assert "redone" not in [e.get("data-state") for e in found(svg, "rows")]
    assert "51 of them new and 0 redone" in description(svg)


def test_states_differ_by_more_than_colour():
    svg = AttentionWorkView(Trace([ForwardWork(6, 4, 1)])).to_svg()
    fills = {path.get("data-state"): path.get("fill") for path in found(svg, "queries")}
    assert fills["redone"].startswith("url(#redone-") and fills["new"] != fills["remembered"] == "#ffffff"


def test_picture_says_itself_in_words():
    view = AttentionWorkView(naive(2, 3))
    assert description(view.to_svg()) == view.describe()
    assert "9 rows went through the model, 4 of them new and 5 redone" in view.describe()
    assert "compared 19 pairs, 10 of them new and 9 redone" in view.describe()
    assert AttentionWorkView(Trace()).describe() == "No forward yet."


def test_earlier_step_hides_what_came_later_but_keeps_the_scale():
    view = AttentionWorkView(naive(2, 5))
    assert len(found(view.to_svg(2), "forward")) == 2
    first, last = (found(view.to_svg(step), "forward")[0][0].get("height") for step in (1, 5))
    assert first == last
    with pytest.raises(TraceError, match="no step 6"):
        view.to_svg(6)


def test_same_trace_gives_the_same_bytes_also_after_saving(tmp_path):
    trace = naive(4, 6)
    trace.save(tmp_path / "work.jsonl")
    assert AttentionWorkView(Trace.load(tmp_path / "work.jsonl")).to_svg() == AttentionWorkView(trace).to_svg()
    assert repr(AttentionWorkView(trace)) == "<AttentionWorkView>"


@pytest.mark.parametrize("numbers", [(3, 4, 1), (3, 1, 2), (3, 1, 0)])
def test_impossible_work_is_refused(numbers):
    with pytest.raises(TraceError, match="no more rows than tokens"):
        ForwardWork(*numbers)


def test_empty_trace_is_an_empty_picture():
    svg = AttentionWorkView(Trace(), num_steps=8, max_tokens=20).to_svg()
    assert found(svg, "forward") == found(svg, "queries") == []


def test_live_picture_stays_small_and_does_not_jump():
    frames: list[dict[str, str]] = []

    class Handle:
        def update(self, obj: dict[str, str], *, raw: bool) -> None:
            frames.append(obj)

    trace = Trace()
    view = AttentionWorkView(trace, num_steps=40, max_tokens=60)
    with LiveView(view, show=lambda frame: Handle(), clock=lambda: float(len(trace))):
        for step, work in enumerate(naive(21, 40), 1):
            trace.append(work)
            trace.append(StepFinished(step, 0.0, 0.0, 0.0, 0))
    assert len(frames) == 40 + 1
    assert max(len(frame["text/html"].encode()) for frame in frames[:-1]) < 50_000, "all but the replay"
    heights = {found(frame["text/html"], "forward")[0][0].get("height") for frame in frames[:-1]}
    assert heights == {"84"}, "21 of 60 tokens in 240 px"
