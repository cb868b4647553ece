"""The pool as the trace tells it: every number follows from the events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import TraceError
from minillm.trace import StepFinished, Trace
from minillm.viz.cache_changes import changes
from minillm.viz.cache_state import CacheState
from minillm.viz.replay import Replay

from .traces import Script, busy, decode, prefill, story, verify


def state_at(trace, step):
    return Replay(trace, CacheState).at(step)


def slot_counts(state):
    return Counter(slot for page in state.pages() for slot in page.slots)


def check(state):
    """What holds at any moment of any trace."""
    assert state.used_blocks + state.free_blocks == state.num_blocks
    counts = slot_counts(state)
    assert sum(counts.values()) == state.num_blocks * state.block_size
    valid = counts["written"] + counts["fresh"]
    assert state.used_slots - valid == state.waste_slots
    for request in state.requests.values():
        assert request.num_computed <= request.num_tokens
        assert all(request.request_id in state.owners[block] for block in request.block_table)


def test_chunked_prefill_fills_page_after_page():
    state = state_at(story(), 1)
    first = state.requests["req-0"]
    assert (first.status, first.num_computed, first.num_tokens, first.block_table) == ("prefill", 32, 53, [0, 1])
    assert state.page(0).slots == ("fresh",) * 16


def test_newest_token_is_not_yet_in_the_cache():
    state = state_at(story(), 3)
    assert all(r.num_tokens == r.num_computed + 1 for r in state.requests.values())


def test_rolled_back_slots_are_marked_in_their_step_and_only_there():
    trace = story()
    marked = {step: slot_counts(state_at(trace, step))["rolled_back"] for step in range(1, 10)}
    # Rejected drafts of the script, step by step: 4 - 3, 4 - 4, 4 - 1, 4 - 4, 4 - 0, 4 - 2.
    assert marked == {1: 0, 2: 1, 3: 0, 4: 3, 5: 0, 6: 4, 7: 2, 8: 0, 9: 0}


def test_roll_back_across_a_block_border_frees_the_tail_block_and_shows_what_was_in_it():
    state = state_at(story(), 6)
    page = state.page(6)
    assert (page.state, page.owners) == ("freed", ("req-1",))
    assert page.slots == ("rolled_back",) + ("free",) * 15
    assert state_at(story(), 5).page(6).state != "freed"


def test_waste_is_what_used_blocks_do_not_hold():
    state = state_at(story(), 4)
    held = sum(r.num_computed for r in state.requests.values())
    assert (state.used_slots, held, state.waste_slots) == (160, 139, 21)


def test_preempted_request_loses_its_blocks_and_gets_others_later():
    trace = story()
    state = state_at(trace, 6)
    lost = state.requests["req-2"]
    assert (lost.status, lost.num_computed, lost.block_table) == ("preempted", 0, [])
    assert (state.totals.preemptions, state.totals.recomputed_tokens) == (1, 46)
    assert [state.page(block).state for block in (7, 8)] == ["freed", "freed"]
    back = state_at(trace, 8).requests["req-2"]
    assert (back.status, back.num_computed) == ("prefill", 47)


def test_block_taken_again_in_the_step_that_freed_it_is_not_shown_as_freed():
    s = Script(block_size=4, num_blocks=2)
    s.add("a", "a", 8)
    s.add("b", "b", 8)
    s.step(prefill("a", 8))
    s.step(prefill("b", 8), preempt=["a"])
    state = state_at(s.trace, 2)
    assert {page.state for page in state.pages()} == {"used"}
    assert {page.owners for page in state.pages()} == {("b",)}
    assert state.freed == {}


def test_pages_are_freed_this_step_only_once():
    freed = {step: [p.block_id for p in state_at(story(), step).pages() if p.state == "freed"] for step in (6, 8, 9)}
    assert freed == {6: [6, 7, 8], 8: [0, 1, 4, 5], 9: [2, 3, 6]}


def test_shared_prefix_has_both_owners_and_counts_once():
    s = Script(block_size=4, num_blocks=8)
    s.add("a", "a", 10)
    s.step(prefill("a", 10))
    s.add("b", "b", 11)
    s.share("b", "a")
    s.step(prefill("b", 3))
    state = state_at(s.trace, 2)
    assert [page.owners for page in state.pages()[:4]] == [("a", "b"), ("a", "b"), ("a",), ("b",)]
    assert [page.state for page in state.pages()[:2]] == ["shared", "shared"]
    assert (state.used_blocks, state.waste_slots) == (4, 2 + 1)
    s.step(decode("a", finish="stop"))
    after = state_at(s.trace, 3)
    assert [page.state for page in after.pages()[:4]] == ["used", "used", "freed", "used"]
    check(after)


def test_everything_is_free_at_the_end():
    state = Replay(story(), CacheState).at()
    assert (state.used_blocks, state.free_blocks, state.waste_slots) == (0, 24, 0)
    assert {r.status for r in state.requests.values()} == {"finished"}
    assert state.totals.peak_blocks == 4 + 3 + 3
    assert state.totals.rolled_back_slots == 10


def test_finished_request_holds_nothing_even_if_an_interrupt_swallowed_the_event():
    events = [event for event in story() if getattr(event, "reason", None) != "finished"]
    state = Replay(Trace(events), CacheState).at()
    assert (state.used_blocks, state.waste_slots) == (0, 0)


def test_free_blocks_agree_with_the_engine_at_every_step():
    for trace in (story(), story(4, 80), busy()):
        replay = Replay(trace, CacheState)
        for event in trace.of(StepFinished):
            state = replay.at(event.step)
            check(state)
            assert state.free_blocks == event.num_free_blocks


def test_words_of_a_step_name_what_is_remarkable_first():
    assert changes(state_at(story(), 6)) == [
        "C preempted, 46 tokens to redo",
        "B rolled back 4 slots and 1 block",
        "A wrote 1 slot",
    ]


def test_many_requests_share_a_clause():
    clauses = changes(state_at(busy(gamma=8), 14))
    rejected = [8 - (i * 5 + 11 * 3) % 9 for i in range(10)]  # the script's rule for its last round
    assert clauses[0] == f"{sum(map(bool, rejected))} requests rolled back {sum(rejected)} slots"
    assert len(clauses) <= 4


def test_replay_backwards_equals_replay_from_the_start():
    trace = story()
    replay = Replay(trace, CacheState)
    replay.at()
    assert replay.at(3) == state_at(trace, 3)


def test_unknown_step_names_the_steps_there_are():
    with pytest.raises(TraceError, match=r"step 99 is not in this trace; it has steps 1 to 9"):
        state_at(story(), 99)
    with pytest.raises(TraceError, match="no step of it has finished"):
        state_at(Trace(), 1)


def test_events_that_do_not_fit_together_are_refused_with_their_number():
    events = [event for event in story() if type(event).__name__ != "RequestAdded"]
    with pytest.raises(TraceError, match=r"event 3 \(BlocksAllocated\)"):
        Replay(Trace(events), CacheState).at()


@st.composite
def random_traces(draw):
    """A script of random but possible steps on a small pool."""
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    s = Script(block_size, draw(st.integers(12, 40)) * 16 // block_size, gamma=3)
    for i in range(draw(st.integers(1, 4))):
        s.add(f"r{i}", f"prompt {i}", draw(st.integers(1, 20)))
    alive = set(s.books)
    for _ in range(draw(st.integers(1, 8))):
        preempt = [r for r in sorted(alive) if s.books[r].table and draw(st.integers(0, 9)) == 0]
        parts = [_part(draw, s, r) for r in sorted(alive - {*preempt}) if draw(st.booleans())]
        need = sum(16 // block_size + 8 for _ in parts)
        if need > len(s.free):
            break
        s.step(*parts, preempt=preempt)
        alive -= {part.request_id for part in parts if part.finish}
    return s.trace


def _part(draw, s, request_id):
    books = s.books[request_id]
    left = books.num_tokens - books.num_computed
    if left > 1 or books.num_computed == 0:
        return prefill(request_id, draw(st.integers(1, left)))
    finish = draw(st.sampled_from([None, None, None, "stop", "length"]))
    num_drafts = draw(st.integers(0, 3))
    if not num_drafts:
        return decode(request_id, finish=finish)
    accepted = draw(st.integers(0, num_drafts))
    token = None if finish == "stop" and accepted else "x"
    return verify(request_id, "abc"[:num_drafts], accepted, token, finish)


@settings(max_examples=60, deadline=None)
@given(random_traces())
def test_no_possible_trace_breaks_the_books(trace):
    state = CacheState()
    for event in trace:
        state.fold(event)
        if isinstance(event, StepFinished):
            check(state)
            assert state.free_blocks == event.num_free_blocks
