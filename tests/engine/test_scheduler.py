"""Scheduling decisions, seen through the trace of real runs."""

from __future__ import annotations

from minillm import LLM, SamplingParams
from minillm.trace import (
    BlocksAllocated,
    DraftProposed,
    RequestAdded,
    RequestPreempted,
    StepRan,
    TokensCommitted,
    Trace,
)
from tests.conftest import TinyPair


def traced(llm: LLM, prompts: list[int], max_tokens: int) -> Trace:
    """Run prompts of these lengths and return the trace."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with llm.trace() as trace:
        llm.generate([{"prompt_token_ids": [7 + i] * n} for i, n in enumerate(prompts)], params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return trace


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), max_num_seqs=4, max_num_batched_tokens=16)
    steps = traced(llm, [4, 100], 20).of(StepRan)
    mixed = [s for s in steps if {w.kind for w in s.work} == {"decode", "prefill"}]
    assert len(mixed) >= 6
    assert all(sum(w.num_tokens for w in s.work) <= 16 for s in steps)
    chunks = [w for s in steps for w in s.work if w.request_id == "1" and w.kind == "prefill"]
    assert [w.start for w in chunks] == [sum(c.num_tokens for c in chunks[:i]) for i in range(len(chunks))]
    assert sum(w.num_tokens for w in chunks) == 100


def test_without_chunked_prefill_a_prompt_runs_in_one_piece(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), max_num_seqs=4, max_num_batched_tokens=256, enable_chunked_prefill=False)
    steps = traced(llm, [100, 120, 90], 4).of(StepRan)
    prefills = [w.num_tokens for s in steps for w in s.work if w.kind == "prefill"]
    assert sorted(prefills) == [90, 100, 120]
    assert max(sum(w.num_tokens for w in s.work) for s in steps) <= 256


def test_a_new_request_takes_a_finished_ones_place_at_once(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), max_num_seqs=2)
    steps = traced(llm, [4] * 6, 5).of(StepRan)
    assert [len(s.work) for s in steps] == [2] * len(steps)
    assert len(steps) == 3 * 5


def test_the_last_to_come_is_preempted_and_first_to_return(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=12, enable_prefix_caching=False)
    trace = traced(llm, [12, 12, 12], 16)
    order = [e.request_id for e in trace.of(RequestPreempted)]
    assert order and "0" not in order
    first = trace.events.index(trace.of(RequestPreempted)[0])
    later = [w.request_id for e in trace.events[first:] if isinstance(e, StepRan) for w in e.work if w.start == 0]
    assert later[0] == min(set(order))


def test_drafts_never_cost_another_request_its_blocks(tiny: TinyPair) -> None:
    """With the pool just large enough for the committed tokens, drafts shrink and nobody is preempted."""
    draft = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 6}
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=12, speculative_config=draft)
    trace = traced(llm, [8, 8], 16)
    assert not trace.of(RequestPreempted)
    assert {len(e.token_ids) for e in trace.of(DraftProposed)} - {6}


def test_no_draft_is_made_for_the_last_token(tiny: TinyPair) -> None:
    draft = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 5}
    llm = LLM(str(tiny.target), speculative_config=draft)
    trace = traced(llm, [8], 12)
    gained = 0
    for event in trace:
        if isinstance(event, DraftProposed):
            assert len(event.token_ids) <= 12 - gained - 1
        if isinstance(event, TokensCommitted):
            gained += len(event.token_ids)
    assert gained == 12


def test_every_running_request_gets_a_token_before_anyone_gets_drafts(tiny: TinyPair) -> None:
    draft = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 6}
    llm = LLM(str(tiny.target), max_num_seqs=8, max_num_batched_tokens=8, speculative_config=draft)
    trace = traced(llm, [1] * 8, 6)
    full = [s for s in trace.of(StepRan) if len(s.work) == 8]
    assert full and all(w.num_tokens == 1 for s in full for w in s.work)


def test_blocks_grow_only_as_tokens_need_them(tiny: TinyPair) -> None:
    trace = traced(LLM(str(tiny.target), block_size=4), [6], 11)
    assert len(trace.of(RequestAdded)) == 1
    assert [len(e.block_ids) for e in trace.of(BlocksAllocated)] == [2, 1, 1]
