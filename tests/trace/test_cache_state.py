"""The pool as the trace tells it: every number follows from the events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.errors import TraceError
from minillm.trace import BlocksAllocated, BlocksShared, RequestAdded, StepFinished, StepStarted, Trace
from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.cache_state import CacheState
from minillm.trace.replay import Replay
from minillm.trace.request_state import StepChanges
from minillm.trace.timeline_state import TimelineState
from minillm.viz.pages.cache_changes import changes
from minillm.viz.pages.cache_words import describe
from tests.conftest import TinyPair

from .traces import Script, busy, decode, prefill, sharing, slot_counts, story, verify


def state_at(trace, step):
    return Replay(trace, CacheState).at(step)


def check(state):
    """What holds at any moment of any trace."""
    assert state.used_blocks + state.free_blocks == state.num_blocks
    counts = slot_counts(state.pages())
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
    assert state.page(0).slots == (("fresh", 16),)


def test_newest_token_is_not_yet_in_the_cache():
    state = state_at(story(), 3)
    assert all(r.num_tokens == r.num_computed + 1 for r in state.requests.values())


def test_rolled_back_slots_are_marked_in_their_step_and_only_there():
    trace = story()
    marked = {step: slot_counts(state_at(trace, step).pages())["rolled_back"] for step in range(1, 10)}
    # Rejected drafts of the script, step by step: 4 - 3, 4 - 4, 4 - 1, 4 - 4, 4 - 0, 4 - 2.
    assert marked == {1: 0, 2: 1, 3: 0, 4: 3, 5: 0, 6: 4, 7: 2, 8: 0, 9: 0}


def test_roll_back_across_a_block_border_frees_the_tail_block_and_shows_what_was_in_it():
    state = state_at(story(), 6)
    page = state.page(6)
    assert (page.state, page.owners) == ("freed", ("req-1",))
    assert page.slots == (("rolled_back", 1), ("free", 15))
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
    assert state.totals.preemptions == 1
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


def test_prefix_hit_starts_with_its_tokens_in_the_cache_and_marks_the_blocks_as_reused():
    state = state_at(sharing(), 2)
    hit = state.requests["1#0"]
    assert (hit.marks.reused, hit.marks.forked_from, hit.num_computed) == (48, None, 58)
    assert hit.marks.written == range(48, 58)
    assert [page.block_id for page in state.pages() if page.reused] == [0, 1, 2, 3]
    assert not any(page.reused for page in state_at(sharing(), 4).pages()), "only in the step of the hit"


def test_fork_shares_the_partial_block_and_the_writer_moves_to_a_copy():
    state = state_at(sharing(), 2)
    first, fork = state.requests["0#0"], state.requests["0#1"]
    assert (fork.marks.reused, fork.marks.forked_from) == (59, first.index)
    assert (first.block_table, fork.block_table) == ([0, 1, 2, 4], [0, 1, 2, 3])
    assert (state.page(4).copied_from, state.page(4).owners, state.page(3).owners) == (3, ("0#0",), ("0#1",))
    assert state.page(4).slots == (("written", 12), ("fresh", 1), ("empty", 3))
    assert all(page.copied_from != 3 for page in state_at(sharing(), 3).pages())
    # Step 3 forks 1#1 from 1#0, whose number is 2; blocks 0 to 2 have older owners, and those are not its parent.
    assert state_at(sharing(), 3).requests["1#1"].marks.forked_from == 2


def test_freed_full_blocks_stay_cached_and_count_as_free():
    state = state_at(sharing(), 8)
    assert (state.used_blocks, state.cached_blocks, state.free_blocks) == (0, 6, 16)
    pages = {page.block_id: page for page in state.pages()}
    assert [b for b, page in pages.items() if page.state == "cached"] == [0, 1, 2, 3, 4, 6]
    assert pages[6].owners == ("1#0",), "freed in this step"
    assert pages[3].owners == ()
    assert pages[5].state == "freed"
    assert pages[0].slots == (("cached", 16),)


def test_evicted_blocks_are_told_in_their_step_and_forgotten_for_good():
    state = state_at(sharing(), 11)
    assert state.evicted == {3, 4}
    assert {(page.evicted, page.in_prefix_cache) for page in map(state.page, (3, 4))} == {(True, False), (True, True)}
    assert changes(state)[0] == "cached blocks evicted: 3, 4"
    assert state_at(sharing(), 13).evicted == set()


def test_cached_block_taken_without_an_eviction_counts_as_evicted():
    """A learner's own allocator may forget to tell; the picture must not show contents that are gone."""
    s = Script(4, 4, caching=True)
    s.add("a", "a", 8)
    s.step(prefill("a", 8))
    s.step(decode("a", finish="stop"))
    events = [*s.trace, BlocksAllocated("b", [0])]
    events.insert(-1, RequestAdded("b", "b", [1, 2]))
    state = Replay(Trace(events), CacheState).at()
    assert state.page(0).slots == (("empty", 4),)
    assert (state.cached_blocks, state.evicted) == (1, {0})


def test_cached_block_is_full_even_if_its_owner_uses_all_but_one_token_of_it():
    """A prompt that is found whole must still compute its last token: the engine may count one token fewer."""
    s = Script(4, 4, caching=True)
    s.add("a", "a", 8)
    s.step(prefill("a", 8))
    s.step(decode("a", finish="stop"))
    events = [*s.trace, RequestAdded("b", "b", list(range(8))), BlocksShared("b", [0, 1], 7, "prefix")]
    state = Replay(Trace(events), CacheState).at()
    assert state.page(1).slots == (("written", 4),)
    assert state.waste_slots == 0
    check(state)


def test_totals_tell_what_sharing_saved():
    totals = state_at(sharing(), 13).totals
    assert (totals.prefix_hit_tokens, totals.forked_tokens) == (48 + 48, 59 + 57)


def test_words_tell_hits_forks_copies_and_what_stays_cached():
    assert changes(state_at(sharing(), 2)) == [
        "C found 48 tokens, computed 10",
        "B forked from A: 59 tokens shared, computed 1",
        "A copied block 3 to 4",
        "A wrote 1 slot",
    ]
    assert changes(state_at(sharing(), 7))[0] == "A finished, 5 blocks back (1 cached, 3 in use by others)"


def test_places_of_whole_sequences_are_told_from_pages():
    assert Replay(Script(1024, 4, layout="contiguous").trace, CacheState).at().whole_sequences
    assert not Replay(Script(256, 4, layout="paged int8").trace, CacheState).at().whole_sequences
    assert not Replay(Script(16, 4, layout="PagedByMe").trace, CacheState).at().whole_sequences


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({"kv_cache_config": {"layout": "contiguous"}, "max_model_len": 64}, True),
        ({"kv_cache_config": {"layout": "lorc"}, "block_size": 128}, False),
    ],
)
def test_an_engine_says_whether_its_blocks_hold_whole_sequences(
    tiny: TinyPair, options: dict[str, Any], whole: bool
) -> None:
    """A guess by name and size would be wrong for both."""
    llm = LLM(str(tiny.target), device="cpu", enforce_eager=True, **options)
    with llm.trace() as trace:
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    state = Replay(trace, CacheState).at()
    assert state.whole_sequences is trace.events[0].whole_sequences is whole


def test_everything_is_free_at_the_end():
    state = Replay(story(), CacheState).at()
    assert (state.used_blocks, state.free_blocks, state.waste_slots) == (0, 24, 0)
    assert {r.status for r in state.requests.values()} == {"finished"}
    assert state.totals.peak_blocks == 4 + 3 + 3


def test_finished_request_holds_nothing_even_if_an_interrupt_swallowed_the_event():
    events = [event for event in story() if getattr(event, "reason", None) != "finished"]
    state = Replay(Trace(events), CacheState).at()
    assert (state.used_blocks, state.waste_slots) == (0, 0)


def test_free_blocks_agree_with_the_engine_at_every_step():
    for trace in (story(), story(4, 80), busy(), sharing(), sharing(40)):
        replay = Replay(trace, CacheState)
        for event in trace.of(StepFinished):
            state = replay.at(event.step)
            check(state)
            assert state.free_blocks == event.num_free_blocks


def test_a_step_does_not_look_at_requests_that_finished_before_it():
    """A server's trace has many thousand requests, of which few are alive."""

    class Requests(dict):
        def values(self):
            raise AssertionError("all requests were looked at")

        __iter__ = items = values

    s = Script()
    s.add("old", "old", 4)
    s.step(prefill("old", 4))
    s.step(decode("old", finish="stop"))
    s.add("new", "new", 4)
    s.step(prefill("new", 4))
    s.step(decode("new"))
    state = CacheState(requests=Requests())
    assert [snapshot.waste_slots for snapshot in state.fold_all(s.trace).history] == [12, 0, 12, 11]
    assert not state.requests["old"].marks.finished


def test_words_of_a_step_name_what_is_remarkable_first():
    assert changes(state_at(story(), 6)) == [
        "C preempted, 46 tokens lost",
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
    with pytest.raises(TraceError, match="no step has finished"):
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


@settings(max_examples=60)
@given(random_traces())
def test_no_possible_trace_breaks_the_books(trace):
    state = CacheState()
    for event in trace:
        state.fold(event)
        if isinstance(event, StepStarted):
            assert all(request.marks == StepChanges() for request in state.requests.values())
        if isinstance(event, StepFinished):
            check(state)
            assert state.free_blocks == event.num_free_blocks


def test_blocks_that_were_cached_before_the_trace_are_cached_once_a_request_has_shared_them(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate("import os\n\n\ndef walk(root):", params, use_tqdm=False)
    with llm.trace() as trace:
        llm.generate("import os\n\n\ndef walk(root):", params, use_tqdm=False)
    state = CacheState().fold_all(trace.events)
    [shared] = trace.of(BlocksShared)
    assert len(shared.block_ids) > 2 and {state.page(block).state for block in shared.block_ids} == {"cached"}


def test_an_id_that_is_used_again_is_another_request(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with llm.trace() as trace:
        for name in ("a", "b", "a"):
            llm.llm_engine.add_request(name, name, params)
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
    cache, accepted = CacheState().fold_all(trace.events), AcceptanceState().fold_all(trace.events)
    timeline = TimelineState().fold_all(trace.events).timeline
    for state in (cache, accepted):
        assert [(name, request.index) for name, request in state.requests.items()] == [("b", 1), ("a", 2)]
    assert [row.index for row in timeline.rows] == [0, 1, 2]
    assert len(accepted.total().tokens) == 9


def test_a_trace_of_an_engine_that_has_run_begins_with_its_cached_blocks(tiny: TinyPair, tmp_path: Path) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    prompt = "import os\n\n\nclass Stack:\n"
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    with llm.trace() as trace:
        before = CacheState().fold_all(trace)
        llm.generate("def add(", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    num_cached = len(trace.events[0].cached_blocks)
    assert num_cached > 2 and before.cached_blocks == num_cached
    assert [page.block_id for page in before.pages() if page.state == "cached"] == trace.events[0].cached_blocks
    assert f"{num_cached} cached" in describe(before)
    trace.save(tmp_path / "late.jsonl")
    assert Trace.load(tmp_path / "late.jsonl").events == trace.events


def test_a_trace_that_was_saved_without_cached_blocks_is_loaded(tmp_path: Path) -> None:
    trace = story()
    trace.save(tmp_path / "new.jsonl")
    old = (tmp_path / "new.jsonl").read_text().replace(', "cached_blocks": []', "")
    (tmp_path / "old.jsonl").write_text(old)
    assert "cached_blocks" not in old and Trace.load(tmp_path / "old.jsonl").events == trace.events
