"""The Gantt chart of requests and steps: its cells are those of the trace, and its numbers follow from them."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from minillm.errors import ConfigError, TraceError
from minillm.trace import RequestFinished, StepFinished, StepRan, Trace
from minillm.trace.timeline_state import Cell, Row, Timeline, TimelineState
from minillm.viz import CachePagesView
from minillm.viz.timeline import timeline_view
from minillm.viz.timeline.timeline_lanes import Columns, Lanes, fitted
from minillm.viz.timeline.timeline_view import MAX_COMPARED, TimelineComparison, TimelineView
from tests.trace.traces import Script, busy, decode, prefill, sharing, story, verify
from tests.viz.pictures import description, found, parse, states, text_of


def timeline_of(trace):
    return TimelineState().fold_all(trace).timeline


def kinds(row):
    return " ".join(cell.kind for _, cell in sorted(row.cells.items()))


def drawn(svg):
    counts = Counter()
    for path in found(svg, "cells"):
        counts[path.get("data-state")] += int(path.get("data-count"))
    return counts


def test_rows_tell_what_each_request_did_step_by_step():
    rows = timeline_of(story()).rows
    assert kinds(rows[0]) == "prefill prefill decode decode decode decode decode decode"
    assert kinds(rows[1]) == "prefill verify verify verify verify verify verify"
    assert kinds(rows[2]) == "waiting prefill decode decode preempted waiting recompute decode"
    assert [(row.arrival, row.end, row.reason) for row in rows] == [(1, 8, "length"), (1, 7, "stop"), (2, 9, "stop")]


def test_only_tokens_that_were_in_the_cache_before_are_recomputed():
    s = Script(4, 20)
    s.add("a", "a", 12)
    s.step(prefill("a", 8))
    s.step(preempt=["a"])
    s.step(prefill("a", 8))
    s.step(prefill("a", 4))
    assert kinds(timeline_of(s.trace).rows[0]) == "prefill preempted recompute prefill"


def test_utilisation_and_tokens_follow_from_the_work_events():
    trace = story()
    timeline = timeline_of(trace)
    work = [w for ran in trace.of(StepRan) for w in ran.work]
    # One of them, the prefill of 47 tokens in step 8, computes again what a preemption threw away.
    assert timeline.useful_slots == len(work) - 1 == 19
    assert timeline.slots == 8 * 9
    assert timeline.batch_slot_utilisation == pytest.approx(19 / 72)
    assert timeline.tokens_per_step == pytest.approx(sum(w.num_tokens for w in work) / 9)
    assert [load.requests for load in timeline.loads()] == [len(ran.work) for ran in trace.of(StepRan)]


def test_reused_tokens_stand_where_they_were_not_computed():
    rows = timeline_of(sharing()).rows
    assert [(step, c.num_cached, c.num_tokens) for step, c in rows[1].cells.items() if c.num_cached] == [(2, 59, 1)]
    assert [(step, c.num_cached, c.num_tokens) for step, c in rows[2].cells.items() if c.num_cached] == [(2, 48, 10)]


@pytest.mark.parametrize("trace", [story(), sharing(), busy(4, 100, steps=3)])
def test_picture_has_every_cell_of_the_trace(trace):
    svg, timeline = TimelineView(trace).to_svg(), timeline_of(trace)
    expected = Counter(cell.kind for row in timeline.rows for cell in row.cells.values())
    expected["cached"] = sum(cell.num_cached > 0 for row in timeline.rows for cell in row.cells.values())
    assert drawn(svg) == +expected
    reasons = Counter(event.reason for event in trace.of(RequestFinished))
    assert Counter(states(svg, "end")) == reasons


def test_numbers_stand_in_the_cells():
    rows = found(TimelineView(story()).to_svg(), "request")
    assert text_of(rows[0]).endswith("3221")
    assert text_of(rows[1]).endswith("283/44/41/44/40/42/4")
    assert text_of(rows[2]).endswith("44✗47")


def test_legend_explains_what_is_there_and_nothing_else():
    told = text_of(found(TimelineView(story()).to_svg(), "legend")[0])
    assert "verify" in told and "preempted" in told
    assert "reused" not in told and "idle" not in told and "aborted" not in told
    told = text_of(found(TimelineView(story()).to_svg(1), "legend")[0])
    assert "verify" not in told and "prefill" in told


def test_headline_agrees_with_the_words():
    svg = TimelineView(story()).to_svg()
    assert text_of(found(svg, "utilisation")[0]) == "26%"
    assert "slot utilisation 26% (19 of 72 request-steps), 23.4 tokens per step" in description(svg)
    assert (
        "C 'class·Stack:⏎····def·push(self' from step 2: steps waiting 2, prefill 1" in TimelineView(story()).describe()
    )


def random_timeline(num_rows, num_steps, seed=0):
    """The worst for size: no two neighbouring cells alike."""
    chance = random.Random(seed)
    kinds = ["prefill", "recompute", "decode", "verify", "preempted", "waiting"]
    rows = [
        Row(i, "def f():", 1, 9, {s: Cell(chance.choice(kinds), 100, 3, 4, 2, 1) for s in range(1, num_steps + 1)})
        for i in range(num_rows)
    ]
    return Timeline(num_rows, 2048, False, 1, num_steps, rows)


@pytest.mark.parametrize(("num_rows", "num_steps"), [(8, 90), (24, 40), (24, 98), (24, 99), (64, 196), (64, 700)])
def test_pictures_stay_small_however_long_the_run(num_rows, num_steps):
    timeline = random_timeline(num_rows, num_steps)
    [lanes] = fitted([timeline], num_steps, 84)
    assert len(lanes.drawing.encode()) < 46_000
    assert lanes.columns.x(len(list(lanes.columns))) <= 956
    assert lanes.columns.pitch >= 8
    above, below = fitted([timeline, timeline], num_steps, 84, gap=20)
    assert len((above.drawing + below.drawing).encode()) < 46_000
    assert above.columns == below.columns and below.top == above.top + above.height + 20


def test_condensed_columns_show_what_happened_most_and_the_rarer_of_equals():
    cells = dict(enumerate([Cell("decode")] * 3 + [Cell("waiting")], 1)) | {5: Cell("decode"), 6: Cell("preempted")}
    timeline = Timeline(1, 64, False, 1, 8, [Row(0, "a", 1, 4, cells)])
    lanes = Lanes(timeline, Columns(1, 8, 4, 8.0), 0)
    assert [lanes.column_kind(timeline.rows[0], column) for column in (0, 1)] == ["decode", "preempted"]
    lanes = Lanes(timeline, Columns(1, 8, 2, 8.0), 0)
    assert [lanes.column_kind(timeline.rows[0], c) for c in range(4)] == ["decode", "decode", "preempted", None]


def test_trace_that_begins_late_keeps_its_step_numbers():
    s = Script(16, 24)
    s.step_number = 40
    s.add("a", "a", 5)
    s.step(prefill("a", 5))
    s.step(decode("a", finish="stop"))
    timeline = timeline_of(s.trace)
    assert (timeline.steps, timeline.rows[0].arrival, timeline.rows[0].end) == (range(41, 43), 41, 42)
    assert drawn(TimelineView(s.trace).to_svg(41)) == {"prefill": 1}


def test_abort_before_the_first_step_has_no_cells():
    s = Script()
    s.add("a", "a", 5)
    s.trace.append(RequestFinished("a", "abort", 5, 0))
    svg = TimelineView(s.trace).to_svg()
    assert not found(svg, "cells") and len(found(svg, "end")) == 1


def test_growing_trace_gives_the_same_pictures_as_a_complete_one():
    whole, growing = story(), Trace()
    view, reference = TimelineView(growing), TimelineView(whole)
    for event in whole:
        growing.append(event)
        parse(view.to_svg())
        if isinstance(event, StepFinished):
            assert view.to_svg() == reference.to_svg(event.step)


def test_fixed_scale_keeps_columns_in_place():
    trace = story()
    early, late = (TimelineView(trace, num_steps=50).to_svg(step) for step in (2, 9))
    first = [found(svg, "cells")[0].get("d")[:30] for svg in (early, late)]
    assert first[0] == first[1]


def test_unknown_step_is_refused():
    with pytest.raises(TraceError, match="steps 1 to 9"):
        TimelineView(story()).to_svg(10)


def test_comparison_shows_both_and_says_which_is_a_model():
    s = Script(16, 40, gamma=0, seqs=2)
    for name, length in (("a", 8), ("b", 8), ("c", 8)):
        s.add(name, name, length)
    s.step(prefill("a", 8), prefill("b", 8))
    s.step(decode("a", finish="length"), decode("b"))
    s.step(decode("b"), prefill("c", 8))
    s.step(decode("b", finish="length"), decode("c", finish="length"))
    view = TimelineComparison(s.trace)
    recorded, modelled = view.timelines()
    assert (recorded.num_steps, modelled.num_steps) == (4, 4 + 2)
    assert (recorded.batch_slot_utilisation, modelled.batch_slot_utilisation) == (8 / 8, 8 / 12)
    svg = view.to_svg()
    assert [text_of(e) for e in found(svg, "utilisation")] == ["100%", "67%"]
    assert "modelled: counted, not run" in svg and "recorded" in svg
    assert "The same 3 requests and 8 output tokens: 4 steps continuous, 6 steps static." in description(svg)
    assert drawn(svg) == {"prefill": 6, "decode": 10, "waiting": 2 + 4, "idle": 2}
    assert drawn(view.to_svg(2)) == {"prefill": 4, "decode": 4, "waiting": 2 + 2}
    assert "verify 3" in TimelineComparison(busy(4, 90, steps=3)).describe()


def test_comparison_folds_each_event_once_for_the_whole_and_once_for_a_step(monkeypatch):
    folded, fold = [], TimelineState.fold
    monkeypatch.setattr(TimelineState, "fold", lambda state, event: folded.append(event) or fold(state, event))
    trace = story()
    view = TimelineComparison(trace)
    assert view.to_svg() and view.describe()
    assert len(folded) == len(trace)
    for step in range(1, 10):
        assert view.to_svg(step) and view.describe(step)
    assert len(folded) == 2 * len(trace)


def test_comparison_models_a_trace_again_only_after_it_has_grown(monkeypatch):
    calls = []
    model = timeline_view.static_schedule
    monkeypatch.setattr(timeline_view, "static_schedule", lambda *given: calls.append(given) or model(*given))
    events = story().events
    trace = Trace(events[:40])
    view = TimelineComparison(trace)
    before = view.to_svg()
    assert view.to_svg(1) and view.describe() and view.to_svg(2)
    assert len(calls) == 1
    for event in events[40:]:
        trace.append(event)
    assert before != view.to_svg() == TimelineComparison(story()).to_svg()
    assert len(calls) == 2 + 1


@pytest.mark.parametrize("num_prompt", [16, 40])
def test_the_pages_call_work_after_a_preemption_what_the_timeline_calls_it(num_prompt):
    """Whether the preemption came in the middle of the prompt or after its first token."""
    s = Script(gamma=0, budget=16)
    s.add("a", "def f():", num_prompt)
    s.step(prefill("a", 16))
    s.step(preempt=["a"])
    for num_tokens in (10, 7, 8):
        s.step(prefill("a", min(num_tokens, num_prompt + 1)))
    called = [re.search("recompute|prefill", CachePagesView(s.trace).describe(step))[0] for step in (1, 3, 4, 5)]
    [row] = timeline_of(s.trace).rows
    assert called == [row.cells[step].kind for step in (1, 3, 4, 5)] == ["prefill", "recompute", "recompute", "prefill"]


def test_pages_and_timeline_call_all_that_was_lost_recomputed_after_a_second_preemption():
    s = Script(4, 20)
    s.add("a", "def f():", 12)
    s.step(prefill("a", 12))
    s.step(preempt=["a"])
    s.step(prefill("a", 4))
    s.step(preempt=["a"])
    for num_tokens in (4, 4, 5):
        s.step(prefill("a", num_tokens))
    [row] = timeline_of(s.trace).rows
    assert kinds(row) == "prefill preempted recompute preempted recompute recompute recompute"
    for step, done in ((5, 4), (6, 8), (7, 13)):
        assert f"(recompute {done} of {13 if step < 7 else 14})" in CachePagesView(s.trace).describe(step)


def test_pages_and_timeline_call_what_an_interrupt_cost_recomputed():
    s = Script(4, 20)
    s.add("a", "def f():", 8)
    s.step(prefill("a", 8))
    s.step(decode("a"))
    s.interrupt("a")
    s.step(prefill("a", 10))
    [row] = timeline_of(s.trace).rows
    assert kinds(row) == "prefill decode recompute"
    assert "(recompute 10 of 11)" in CachePagesView(s.trace).describe()


def test_pages_and_timeline_call_what_a_failed_step_had_computed_recomputed():
    """Its request keeps its blocks, and the next step runs the same tokens."""
    s = Script(4, 20)
    s.add("a", "def f():", 12)
    s.step(prefill("a", 4))
    s.step(prefill("a", 4))
    s.books["a"].num_computed = 4
    s.step(prefill("a", 4))
    s.step(prefill("a", 4))
    [row] = timeline_of(s.trace).rows
    assert kinds(row) == "prefill prefill recompute prefill"
    called = [re.search("recompute|prefill", CachePagesView(s.trace).describe(step))[0] for step in range(1, 5)]
    assert " ".join(called) == kinds(row)


def test_a_request_aborted_before_it_could_run_ends_where_it_arrives():
    s = Script(gamma=0)
    s.add("early", "def early():", 4)
    s.trace.append(RequestFinished("early", "abort", 4, 0))
    s.add("a", "def f():", 4)
    s.step(prefill("a", 4), waiting=0)
    s.step(decode("a"), waiting=0)
    s.add("b", "def g():", 4)
    s.trace.append(RequestFinished("b", "abort", 4, 0))
    between = TimelineView(s.trace).describe()
    s.add("c", "def h():", 4)
    s.step(decode("a"), waiting=0)
    early, _, b, _ = timeline_of(s.trace).rows
    assert (early.arrival, early.end, b.arrival, b.end) == (1, 1, 3, 3)
    words = TimelineView(s.trace).describe()
    assert "A 'def·early():' from step 1: never ran; ended (abort)" in words
    assert "C 'def·g():' from step 3: never ran; ended (abort)" in words and words.count("never ran") == 2
    assert "C 'def·g():' from step 3: never ran" in between
    s.add("d", "def i():", 4)
    assert "from step 4: has not run" in TimelineView(s.trace).describe()
    parse(TimelineView(s.trace).to_svg())


@pytest.mark.parametrize("batch_size", [0, -1])
def test_comparison_with_an_impossible_batch_is_refused(batch_size):
    with pytest.raises(ConfigError, match=f"batch_size={batch_size} must be at least 1"):
        TimelineComparison(story(), batch_size).to_svg()


def test_comparison_of_nothing_is_empty_and_not_an_error():
    assert "0 steps" in TimelineComparison(Trace()).describe()
    parse(TimelineComparison(Trace()).to_svg())
    parse(TimelineView(Trace()).to_svg())


def test_prompt_cannot_break_out_of_the_picture():
    s = Script()
    s.add("a", '</text><script>alert("&")</script>\x00\ud800', 5)
    s.step(prefill("a", 5), waiting=0)
    s.step(verify("a", ["x"], 1))
    for view in (TimelineView(s.trace), TimelineComparison(s.trace)):
        assert "<script" not in view.to_svg()
        view.to_svg().encode()


def long_and_short(count=20):
    """Many requests of one step, and after all of them one of many."""
    rows = [Row(i, f"request {i}", 1, 4, {1: Cell("decode", 1)}, 1, "length") for i in range(count)]
    rows.append(Row(count, "the last", 1, 4, {s: Cell("decode", 1) for s in range(1, 40)}, 39, "length"))
    return Timeline(4, 64, False, 1, 39, rows)


def test_request_that_ends_last_has_a_row_however_few_there_are():
    one, two = fitted([long_and_short(), long_and_short()], 39, 0, most_rows=5)
    assert [row.index for row in one.shown] == [0, 1, 2, 3, 20] == [row.index for row in two.shown]
    assert "16 more requests, none of which ends later" in one.drawing


def test_requests_without_a_row_that_still_run_may_end_later():
    running = long_and_short()
    for row in running.rows[10:]:
        row.end = row.reason = None
    [lanes] = fitted([running], 39, 0, most_rows=5)
    assert "and 16 more requests<" in lanes.drawing


def test_two_timelines_fit_one_screen():
    lanes = fitted([long_and_short(32), long_and_short(32)], 240, 112, gap=62, most_rows=MAX_COMPARED)
    assert lanes[1].top + lanes[1].height < 800


def test_end_stands_where_the_work_ends_and_not_inside_an_idle_box():
    """A column of four steps, one of work and three idle, is drawn idle."""
    cells = {s: Cell("decode" if s <= 5 else "idle", 1) for s in range(1, 13)}
    lanes = Lanes(Timeline(4, 64, True, 1, 12, [Row(0, "a", 1, 4, cells, 5, "length")]), Columns(1, 12, 4, 20.0), 0)
    [end] = [e for e in parse(f"<svg>{lanes.drawing}</svg>").iter() if e.get("data-testid") == "end"]
    assert lanes.column_kind(lanes.timeline.rows[0], 1) == "idle"
    assert float(end.get("x")) <= lanes.columns.x(1)


def test_the_legend_of_a_long_run_explains_no_signs_that_are_not_drawn():
    s = Script(num_blocks=99)
    s.add("a", "a", 4)
    s.add("b", "b", 4)
    s.step(prefill("a", 4), prefill("b", 4))
    s.step(verify("a", ["x"], 0), verify("b", ["x"], 0))
    [short] = found(TimelineView(s.trace).to_svg(), "legend")
    assert "prefill, n tokens" in text_of(short) and "verify, accepted/drafted" in text_of(short)
    assert "3/4" in text_of(short)
    [long] = found(TimelineView(s.trace, num_steps=500).to_svg(), "legend")
    told = text_of(long)
    assert "prefill" in told and "n tokens" not in told and "drafted" not in told and "3/4" not in told


def test_of_many_requests_the_description_of_the_picture_names_those_that_are_drawn():
    s = Script(num_blocks=120, seqs=100)
    for i in range(100):
        s.add(str(i), f"request {i}", 10)
    s.step(*(prefill(str(i), 10) for i in range(100)))
    for view, rows in ((TimelineView(s.trace), 24), (TimelineComparison(s.trace), 2 * MAX_COMPARED)):
        words = description(view.to_svg())
        assert words.count("from step 1") == rows and "more requests" in words
        assert view.describe().count("from step 1") in (100, 200) and "more requests" not in view.describe()


def test_requests_that_wait_share_their_cells():
    """A trace of many requests has many more of these than of all others."""
    rows = timeline_of(story()).rows
    waiting = [cell for row in rows for cell in row.cells.values() if cell.kind == "waiting"]
    assert len(waiting) == 2 and waiting[0] is waiting[1] and waiting[0] == Cell()
