"""The figures per step are those that can be counted by hand in the events."""

from __future__ import annotations

import pytest

from minillm.errors import TraceError
from minillm.trace import (
    BlocksShared,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepRan,
    StepStarted,
    TokensCommitted,
    Trace,
)
from minillm.trace.step_metrics import step_metrics
from tests.trace.traces import Script, busy, decode, prefill, sharing, story, verify


def by_step(trace, *kinds):
    """The events of each step, counted by nothing but the borders of the steps."""
    steps, current = [], None
    for event in trace:
        if isinstance(event, StepStarted):
            current = []
        if current is not None and isinstance(event, kinds):
            current.append(event)
        if isinstance(event, StepFinished):
            steps.append(current)
    return steps


@pytest.mark.parametrize("trace", [story(), sharing(), sharing(40), busy(4, 100, steps=3)])
def test_every_figure_agrees_with_the_events(trace):
    metrics = step_metrics(trace)
    assert [m.step for m in metrics] == [event.step for event in trace.of(StepFinished)]
    for m, events in zip(
        metrics, by_step(trace, StepRan, TokensCommitted, BlocksShared, RequestPreempted), strict=True
    ):
        [ran] = [event for event in events if isinstance(event, StepRan)]
        assert m.num_running == len(ran.work)
        assert m.num_tokens == sum(work.num_tokens for work in ran.work)
        assert m.num_verify_tokens == sum(work.num_tokens for work in ran.work if work.kind == "verify")
        assert m.num_committed_tokens == sum(len(e.token_ids) for e in events if isinstance(e, TokensCommitted))
        assert m.num_reused_tokens == sum(e.num_tokens for e in events if isinstance(e, BlocksShared))
        assert m.num_preemptions == sum(isinstance(e, RequestPreempted) for e in events)
    for m, ended in zip(metrics, trace.of(StepFinished), strict=True):
        assert m.cached_blocks + m.free_blocks == ended.num_free_blocks
        assert m.used_blocks + m.cached_blocks + m.free_blocks == trace.events[0].num_blocks
        assert m.seconds == ended.seconds


def test_one_step_counted_by_hand():
    m = step_metrics(story())[3]
    # Step 4: C and A decode, B verifies 4 drafts of which 1 is right; 139 of the 160 slots of 10 blocks are valid.
    assert (m.num_running, m.num_waiting) == (3, 0)
    assert (m.num_prefill_tokens, m.num_decode_tokens, m.num_verify_tokens, m.num_committed_tokens) == (0, 2, 5, 4)
    assert (m.used_blocks, m.valid_slots, m.allocated_slots) == (10, 139, 160)
    assert m.kv_slot_utilisation == 139 / 160


def test_waiting_requests_are_those_that_got_no_share_of_the_step():
    # Request C arrives after step 1, is preempted in step 6, and waits in step 7.
    assert [m.num_waiting for m in step_metrics(story())] == [0, 1, 0, 0, 0, 1, 1, 0, 0]


def test_request_that_finishes_or_is_aborted_waits_no_more():
    s = Script(16, 24)
    s.add("a", "a", 5)
    s.add("b", "b", 5)
    s.step(prefill("a", 5))
    s.trace.append(RequestFinished("b", "abort", 5, 0))
    s.step(decode("a", finish="stop"))
    s.add("c", "c", 5)
    s.step(prefill("c", 5))
    assert [m.num_waiting for m in step_metrics(s.trace)] == [1, 0, 0]


def test_shared_slots_count_once():
    m = step_metrics(sharing())[2]
    # Step 3: A 62, B 61, C 59 and D 58 tokens, of which 48 are the same; 7 blocks.
    assert (m.valid_slots, m.allocated_slots) == (48 + 14 + 13 + 11 + 10, 7 * 16)


def test_step_that_frees_everything_has_no_slot_utilisation():
    last = step_metrics(story())[-1]
    assert (last.used_blocks, last.kv_slot_utilisation) == (0, None)


def test_unfinished_step_is_left_out():
    events = story().events
    assert len(step_metrics(events[:-1])) == len(step_metrics(events)) - 1


def test_saved_trace_gives_the_same_figures(tmp_path):
    trace = busy(4, 100, steps=3)
    trace.save(tmp_path / "trace.jsonl")
    assert step_metrics(Trace.load(tmp_path / "trace.jsonl")) == step_metrics(trace)


def test_trace_without_its_beginning_is_refused():
    s = Script()
    s.add("a", "a", 5)
    s.step(prefill("a", 5))
    s.step(verify("a", ["x"], 1))
    with pytest.raises(TraceError, match="contradicts earlier events"):
        step_metrics(s.trace.events[2:])
