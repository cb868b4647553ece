"""The picture of rows written, copied and left empty."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from minillm.errors import ConfigError, TraceError
from minillm.trace import StepFinished, Trace
from minillm.viz.draw.colours import BLUE
from minillm.viz.live.live_view import LiveView
from minillm.viz.pages.cache_rows import CacheRowsView, RowsWritten, Totals, _cell

SVG = "{http://www.w3.org/2000/svg}"


def growth(policy: str, every: int, chunks: list[int]) -> list[RowsWritten]:
    events, capacity, past = [], 0, 0
    for new in chunks:
        copied = 0
        if past + new > capacity:
            capacity, copied = -(-(past + new) // every) * every, past
        events.append(RowsWritten(policy, past, new, copied, capacity))
        past += new
    return events


def three_policies() -> Trace:
    chunks = [5, 1, 1, 1, 1, 1]
    return Trace([e for name, r in (("concat", 1), ("every 4", 4), ("all", 10)) for e in growth(name, r, chunks)])


def parts(svg: str, testid: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(svg).iter() if e.get("data-testid") == testid]


def test_totals_are_those_counted_by_hand():
    assert Totals.of(growth("concat", 1, [5, 1, 1])) == Totals(written=7, copied=5 + 6, empty=0, allocations=3)
    assert Totals.of(growth("every 4", 4, [5, 1, 1, 1, 1])) == Totals(9, 8, empty=3 + 2 + 1 + 0 + 3, allocations=2)
    assert Totals.of(growth("all", 10, [5, 1, 1])) == Totals(written=7, copied=0, empty=5 + 4 + 3, allocations=1)


def test_columns_add_up_to_the_capacity_and_name_their_states():
    svg = CacheRowsView(three_policies()).to_svg()
    policies = parts(svg, "policy")
    assert [p.get("data-policy") for p in policies] == ["concat", "every 4", "all"]
    for policy, run in zip(policies, CacheRowsView(three_policies()).steps().values(), strict=True):
        columns = [e for e in policy.iter() if e.get("data-testid") == "step"]
        assert len(columns) == len(run) == 6
        for column, step in zip(columns, run, strict=True):
            heights = {e.get("data-state"): float(e.get("height")) for e in column.iter(f"{SVG}rect")}
            assert sum(heights.values()) == pytest.approx(16.6 * step.capacity, abs=0.2), "12 rows in 200 px"
            assert ("copied" in heights) == (step.copied > 0)
            assert heights["written"] == pytest.approx(16.6 * step.written, abs=0.1)


def test_states_differ_by_more_than_colour():
    svg = CacheRowsView(three_policies()).to_svg()
    tiles = {e.get("id").split("-")[0]: e for e in ET.fromstring(svg).iter(f"{SVG}pattern")}
    assert {"kept", "written", "copied", "empty"} == tiles.keys()
    assert [shape.tag.removeprefix(SVG) for shape in tiles["copied"]] == ["rect", "line"]
    assert tiles["empty"][0].get("stroke") and tiles["empty"][0].get("fill") == "#ffffff"
    assert tiles["written"][0].get("fill-opacity") is None and tiles["kept"][0].get("fill-opacity") == ".45"


def test_picture_says_itself_in_words():
    view = CacheRowsView(three_policies())
    root = ET.fromstring(view.to_svg())
    assert root.get("role") == "img"
    assert root.find(f"{SVG}desc").text == view.describe()
    assert "concat: 6 steps, 10 rows written, 35 copied, 0 empty rows" in view.describe()


def test_numbers_in_the_picture_are_the_totals():
    svg = CacheRowsView(three_policies()).to_svg()
    shown = [e.text for e in parts(svg, "policy")[0].iter(f"{SVG}text")]
    assert "10 rows written, allocated 6×" in shown
    assert shown[shown.index("copied rows") + 1] == "35"
    assert shown[shown.index("empty rows") + 1] == "0"


def test_earlier_step_hides_what_came_later_but_keeps_the_scale():
    view = CacheRowsView(three_policies())
    assert len(parts(view.to_svg(2), "step")) == 3 * 2
    first = [float(e.get("height")) for e in parts(view.to_svg(1), "step")[0].iter(f"{SVG}rect")]
    assert first == [float(e.get("height")) for e in parts(view.to_svg(), "step")[0].iter(f"{SVG}rect")]
    with pytest.raises(TraceError, match="no step 7"):
        view.to_svg(7)


def test_same_trace_gives_the_same_bytes_also_after_saving(tmp_path):
    trace = three_policies()
    trace.save(tmp_path / "rows.jsonl")
    assert CacheRowsView(Trace.load(tmp_path / "rows.jsonl")).to_svg() == CacheRowsView(trace).to_svg()
    assert repr(CacheRowsView(trace)) == "<CacheRowsView>"


def test_names_are_escaped_and_numbers_are_plain():
    svg = CacheRowsView(Trace(growth('<r> & "1"', 1, [1, 1]))).to_svg()
    assert parts(svg, "policy")[0].get("data-policy") == '<r> & "1"'
    assert not re.search(r"nan|inf|e-\d", svg)


def test_empty_trace_is_an_empty_picture():
    assert parts(CacheRowsView(Trace()).to_svg(), "policy") == []


def test_a_fourth_policy_is_refused():
    trace = Trace([e for name in "abcd" for e in growth(name, 1, [1])])
    with pytest.raises(ConfigError, match="4 growth policies"):
        CacheRowsView(trace).to_svg()


def test_live_picture_of_a_whole_lesson_stays_small():
    frames: list[dict[str, str]] = []

    class Handle:
        def update(self, obj: dict[str, str], *, raw: bool) -> None:
            frames.append(obj)

    trace = Trace()
    view = CacheRowsView(trace, num_steps=32, max_rows=48)
    runs = [growth(name, r, [17] + [1] * 31) for name, r in (("concat", 1), ("every 8", 8), ("all", 48))]
    with LiveView(view, show=lambda frame: Handle(), clock=lambda: float(len(trace))):
        for step, events in enumerate(zip(*runs, strict=True), 1):
            for event in events:
                trace.append(event)
            trace.append(StepFinished(step, 0.0, 0.0, 0.0, 0))
    assert len(frames) == 32 + 1
    assert max(len(frame["text/html"].encode()) for frame in frames[:-1]) < 50_000, "all but the replay"


@pytest.mark.parametrize("num_steps", [0, 200])
def test_the_legend_shows_empty_rows_as_the_grid_does(num_steps: int):
    """Small cells are dots; a hollow sample would not be found in the grid."""
    svg = CacheRowsView(three_policies(), num_steps=num_steps).to_svg()
    empty = parts(svg, "legend")[3]
    tile = next(e for e in ET.fromstring(svg).iter(f"{SVG}pattern") if e.get("id").startswith("empty"))
    hollow = empty[0].get("stroke") is not None
    assert hollow == (tile[0].get("stroke") is not None) == (num_steps == 0)
    assert hollow or empty[0].get("fill") == f"url(#{tile.get('id')})"


def test_a_wide_empty_row_has_dots_over_all_its_width():
    """With one in its middle, the area of empty rows is hard to see, and the legend's sample, 16 wide, has none."""
    places = [float(x) for x in re.findall(r'cx="([\d.]+)"', "".join(_cell("empty", 33.0, 4.0)))]
    assert len(places) == 7 and places[2] < 16 and places[-1] > 28


def test_empty_rows_look_hollow_however_small_they_are():
    """Outlines of small cells touch, and a blue one then looks like a filled cell."""
    for wide, high in ((20.0, 12.0), (9.0, 2.0), (3.0, 3.0)):
        cell = "".join(_cell("empty", wide, high))
        assert BLUE not in cell and 'fill="#ffffff"' in cell
        assert ("stroke" in cell) == (min(wide, high) >= 6)
