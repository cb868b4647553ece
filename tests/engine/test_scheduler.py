"""Scheduling decisions, seen through the trace of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.kv_cache_manager import KVCacheManager
from minillm.engine.scheduler import Scheduler
from minillm.errors import ConfigError
from minillm.request import Request
from minillm.speculative.draft_policy import DraftPlan, FixedDrafts
from minillm.trace import (
    BlocksAllocated,
    DraftProposed,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepRan,
    StepStarted,
    TokensCommitted,
    Trace,
    Work,
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


def test_drafts_never_cost_another_request_its_place(tiny: TinyPair) -> None:
    """The first request alone could fill the pool with drafts, and the second needs a block in the same step."""
    draft = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 6}
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=6, speculative_config=draft)
    with llm.trace() as trace:
        arrive(llm, 8, 8)
        arrive(llm, 8, 3)
        finish(llm)
    assert not trace.of(RequestPreempted)
    assert max(len(e.token_ids) for e in trace.of(DraftProposed)) > 3, "with room in the pool there are more"


# ------------------------------------------------------------------------------------------------- arrivals on the way


FIRST_TOKENS = count()


def arrive(llm: LLM, length: int, max_tokens: int, priority: int = 0, n: int = 1) -> list[Request]:
    """Queue a prompt of so many tokens, unlike all others; returns its completions."""
    first = 7 + next(FIRST_TOKENS) % 250
    params = SamplingParams(n=n, temperature=float(n > 1), seed=1, max_tokens=max_tokens, ignore_eos=True)
    return llm.submit({"prompt_token_ids": [first] * length}, params, priority=[priority])


def finish(llm: LLM) -> int:
    """Run until nothing is left; returns the number of steps."""
    steps = 0
    while llm.engine.has_requests:
        llm.engine.step()
        llm.engine.scheduler.check_integrity()
        steps += 1
    return steps


def steps_of(trace: Trace, request_id: str) -> list[tuple[int, Work]]:
    """The steps in which a request took part, and what it did."""
    return [(event.step, work) for event in trace.of(StepRan) for work in event.work if work.request_id == request_id]


def first_steps(trace: Trace, count: int) -> list[int]:
    """In which step each of the first `count` requests began."""
    return [steps_of(trace, str(number))[0][0] for number in range(count)]


@pytest.mark.parametrize(
    "policy, order", [("priority", ["3", "1", "4", "0", "2"]), ("fcfs", ["0", "1", "2", "3", "4"])]
)
def test_the_most_urgent_goes_first_and_among_equals_the_oldest(tiny: TinyPair, policy: str, order: list[str]) -> None:
    llm = LLM(str(tiny.target), max_num_seqs=1, scheduling_policy=policy)
    with llm.trace() as trace:
        for priority in (1, 0, 1, -5, 0):
            arrive(llm, 5, 3, priority)
        finish(llm)
    assert [event.request_id for event in trace.of(RequestFinished)] == order


@pytest.mark.parametrize(
    "policy, order", [("priority", ["3", "1", "4", "0", "2"]), ("fcfs", ["0", "1", "2", "3", "4"])]
)
def test_generate_takes_a_priority_for_each_prompt(tiny: TinyPair, policy: str, order: list[str]) -> None:
    llm = LLM(str(tiny.target), max_num_seqs=1, scheduling_policy=policy)
    prompts = [{"prompt_token_ids": [7 + i] * 5} for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with llm.trace() as trace:
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=[1, 0, 1, -5, 0])
    assert [event.request_id for event in trace.of(RequestFinished)] == order
    assert [output.prompt_token_ids[0] for output in outputs] == [7, 8, 9, 10, 11]


def test_an_urgent_arrival_overtakes_who_waits_but_not_who_runs(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), max_num_seqs=1, scheduling_policy="priority")
    with llm.trace() as trace:
        arrive(llm, 5, 6)
        arrive(llm, 5, 6)
        llm.engine.step()
        arrive(llm, 5, 6, priority=-1)
        finish(llm)
    assert [event.request_id for event in trace.of(RequestFinished)] == ["0", "2", "1"]
    assert not trace.of(RequestPreempted)


@pytest.mark.parametrize("policy, victims", [("priority", {"0"}), ("fcfs", {"1"})])
def test_who_loses_its_blocks_is_the_least_urgent(tiny: TinyPair, policy: str, victims: set[str]) -> None:
    """Two requests that cannot both grow to their full length. The first to come is the less urgent one."""
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=9, scheduling_policy=policy, enable_prefix_caching=False)
    with llm.trace() as trace:
        arrive(llm, 9, 15, priority=3)
        arrive(llm, 9, 15, priority=1)
        finish(llm)
    assert {event.request_id for event in trace.of(RequestPreempted)} == victims


@pytest.mark.parametrize("threshold, first_step_of_the_short_one", [(0, 7), (16, 1)])
def test_a_chunk_limit_lets_short_prompts_in_beside_a_long_one(
    tiny: TinyPair, threshold: int, first_step_of_the_short_one: int
) -> None:
    """200 tokens by 32 a step: six full steps, and room beside the last eight tokens."""
    llm = LLM(
        str(tiny.target),
        max_num_seqs=8,
        max_num_batched_tokens=32,
        long_prefill_token_threshold=threshold,
        block_size=8,
    )
    with llm.trace() as trace:
        arrive(llm, 200, 4)
        arrive(llm, 6, 4)
        finish(llm)
    assert steps_of(trace, "1")[0][0] == first_step_of_the_short_one
    chunks = [work.num_tokens for _, work in steps_of(trace, "0") if work.kind == "prefill"]
    assert sum(chunks) == 200 and max(chunks) == (threshold or 32)


def test_a_chunk_limit_without_chunks_is_refused(tiny: TinyPair) -> None:
    with pytest.raises(ConfigError, match="long_prefill_token_threshold=16 cuts prompts into chunks"):
        LLM(str(tiny.target), enable_chunked_prefill=False, long_prefill_token_threshold=16)


def test_no_decoding_request_stalls_while_long_prompts_stream_in(tiny: TinyPair) -> None:
    """A prompt of 60 tokens arrives in every step, eight times as much as a step can take: yet all decode on."""
    llm = LLM(str(tiny.target), block_size=8, max_num_seqs=6, max_num_batched_tokens=16)
    with llm.trace() as trace:
        decoding = [arrive(llm, 3, 30)[0] for _ in range(3)]
        llm.engine.step()
        for _ in range(29):
            arrive(llm, 60, 1)
            gained = [request.num_output_tokens for request in decoding]
            llm.engine.step()
            assert [request.num_output_tokens for request in decoding] == [count + 1 for count in gained]
        assert all(request.finished for request in decoding)
        finish(llm)
    busy = [event for event in trace.of(StepRan) if event.step <= 30]
    assert all(sum(work.num_tokens for work in event.work) == 16 for event in busy[1:]), "no budget is left unused"


@pytest.mark.parametrize("priority, overtakes", [(0, False), (-1, True)], ids=["equal", "more urgent"])
def test_nobody_overtakes_the_head_of_the_queue_unless_more_urgent(
    tiny: TinyPair, priority: int, overtakes: bool
) -> None:
    """The head needs more blocks than are free. One behind it would fit, and must wait all the same."""
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=12, scheduling_policy="priority")
    with llm.trace() as trace:
        arrive(llm, 24, 8)
        llm.engine.step()
        arrive(llm, 24, 8)
        arrive(llm, 4, 4, priority)
        finish(llm)
    running, head, small = first_steps(trace, 3)
    assert running == 1 and head == 9, "the head waits until the first request has made its eight tokens"
    assert (small == 2) if overtakes else (small >= head)


def test_nothing_starves_under_a_stream_of_long_prompts(tiny: TinyPair) -> None:
    """Every step brings a prompt that takes six steps. Each request, long or short, begins in its turn: after the work
    that came before it, which is counted, however much has come behind it."""
    budget, seqs = 12, 3
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=40, max_num_seqs=seqs, max_num_batched_tokens=budget)
    requests: list[Request] = []
    arrived: list[int] = []
    with llm.trace() as trace:
        for number in range(24):
            requests += arrive(llm, *((5, 4) if number % 8 == 5 else (64, 2)))
            arrived.append(llm.engine.num_steps)
            llm.engine.step()
        finish(llm)
    ended = {event.request_id: step for step, event in by_step(trace, RequestFinished)}
    begun = first_steps(trace, len(requests))
    assert begun == sorted(begun), "first come, first served"
    for number, request in enumerate(requests):
        ahead = [r for r, came in zip(requests, arrived, strict=True) if came <= arrived[number]]
        # In every step the oldest request moves on by what the others (at most two) leave of the budget.
        most = sum(-(-r.num_prompt_tokens // (budget - seqs + 1)) + r.max_tokens for r in ahead)
        assert ended[request.request_id] - arrived[number] <= most
    assert any(len(event.work) == seqs for event in trace.of(StepRan)), "they do run together"


def by_step(trace: Trace, kind: type) -> list[tuple[int, RequestFinished]]:
    """The events of this kind, each with the number of its step."""
    step, found = 0, []
    for event in trace:
        if isinstance(event, StepRan):
            step = event.step
        if isinstance(event, kind):
            found.append((step, event))
    return found


def test_completions_that_wait_for_their_prompt_do_not_block_those_behind(tiny: TinyPair) -> None:
    """n=3 of a prompt of ten chunks: the second and third wait for it, and the request behind them does not."""
    llm = LLM(str(tiny.target), block_size=4, max_num_seqs=4, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    with llm.trace() as trace:
        parent, *forks = arrive(llm, 80, 5, n=3)
        arrive(llm, 6, 2)
        finish(llm)
    assert steps_of(trace, "1")[0][0] == 1
    assert [steps_of(trace, fork.request_id)[0][0] for fork in forks] == [11, 11]
    assert [work.num_tokens for _, work in steps_of(trace, forks[0].request_id)] == [1] * 5
    assert steps_of(trace, parent.request_id)[9][1].num_tokens == 8


def test_completions_whose_first_one_is_aborted_compute_for_themselves(tiny: TinyPair) -> None:
    """Without the prefix cache nothing is left of the first; the second then is nobody's fork."""
    llm = LLM(str(tiny.target), block_size=4, enable_prefix_caching=False)
    with llm.trace() as trace:
        parent, *forks = arrive(llm, 10, 3, n=3)
        llm.engine.abort(parent.request_id)
        finish(llm)
    assert [steps_of(trace, fork.request_id)[0][1].num_tokens for fork in forks] == [10, 10]


def test_a_preempted_request_returns_before_newer_ones_begin(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=9, enable_prefix_caching=False)
    with llm.trace() as trace:
        arrive(llm, 9, 15)
        arrive(llm, 9, 15)
        while not trace.of(RequestPreempted):
            llm.engine.step()
        arrive(llm, 4, 2)
        finish(llm)
    assert {event.request_id for event in trace.of(RequestPreempted)} == {"1"}
    preempted = min(step for step, _ in steps_of(trace, "2"))
    assert [work.start for step, work in steps_of(trace, "1") if step <= preempted].count(0) >= 2


def test_who_loses_its_place_in_a_step_leaves_it_to_nobody_in_that_step(tiny: TinyPair) -> None:
    """What preemption frees is for those who run; a newcomer would only be the next victim."""
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=9, enable_prefix_caching=False)
    with llm.trace() as trace:
        for _ in range(4):
            arrive(llm, 5, 12)
        finish(llm)
    assert trace.of(RequestPreempted)
    begun: set[str] = set()
    for event in trace:
        if isinstance(event, RequestPreempted):
            begun = {event.request_id}
        if isinstance(event, StepRan) and begun:
            assert all(work.start > 0 for work in event.work)
            begun = set()


def test_nobody_drafts_while_more_requests_are_there_than_was_said(tiny: TinyPair) -> None:
    """Three requests on two seats: with a limit of 2 drafts begin when the first has ended, with a limit of 1 for the
    last alone. The tokens do not change."""
    prompts = [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(3)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 10, 16)]
    plain = [o.outputs[0].token_ids for o in LLM(str(tiny.target)).generate(prompts, params, use_tqdm=False)]
    for limit, most_drafting in ((None, 2), (2, 2), (1, 1)):
        draft = {"model": str(tiny.draft), "num_speculative_tokens": 3, "disable_by_batch_size": limit}
        llm = LLM(str(tiny.target), max_num_seqs=2, speculative_config=draft)
        with llm.trace() as trace:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == plain
        there, drafting, seen = 3, 0, set()
        for event in trace:
            if isinstance(event, StepStarted):
                there, drafting = event.num_running + event.num_waiting, 0
            elif isinstance(event, DraftProposed):
                drafting += 1
                seen.add(drafting)
                assert limit is None or there <= limit
        assert max(seen) == most_drafting


def test_the_draft_policy_is_told_of_the_rows_that_can_run(tiny: TinyPair) -> None:
    """Prompts that wait for a seat or for blocks are no rows of this step."""
    told = list[tuple[int, int]]()

    class Asked(FixedDrafts):
        def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
            told.append((len(requests), num_rows))
            return super().plan(requests, num_rows)

    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for few in ({"max_num_seqs": 2}, {"num_kv_blocks": 17}):
        told.clear()
        llm = LLM(str(tiny.target), block_size=4, enable_prefix_caching=False, speculative_config=ngram, **few)
        llm.engine.scheduler.draft_policy = Asked(2)
        llm.generate([{"prompt_token_ids": [7 + i] * 20} for i in range(8)], params, use_tqdm=False)
        assert told and all(rows == requests for requests, rows in told if requests == 2), few
        assert any(requests == 2 for requests, _ in told)
    for options, length, n, num_rows in (
        ({}, 20, 1, 1 + 20),
        ({}, 20, 2, 1 + 20),  # the second completion waits for the prompt of the first
        ({"max_num_batched_tokens": 32}, 60, 1, 32),
        ({"long_prefill_token_threshold": 16}, 60, 1, 1 + 16),
    ):
        llm = LLM(str(tiny.target), block_size=4, max_num_seqs=3, speculative_config=ngram, **options)
        llm.engine.scheduler.draft_policy = Asked(2)
        told.clear()
        arrive(llm, 12, 10)
        llm.engine.step()
        arrive(llm, length, 10, n=n)
        llm.engine.step()
        assert told == [(1, num_rows)], options


def test_the_rows_of_drafts_that_get_no_blocks_are_there_for_a_prompt(tiny: TinyPair) -> None:
    class NoDraftBlocks(KVCacheManager):
        """Gives blocks to committed tokens only."""

        def allocate_slots(self, request: Request, start: int, num_tokens: int) -> bool:
            return start + num_tokens <= request.num_tokens and super().allocate_slots(request, start, num_tokens)

    class OwnScheduler(Scheduler):
        kv_cache_manager_cls = NoDraftBlocks

    draft = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 6}
    llm = LLM(
        str(tiny.target), max_num_seqs=2, max_num_batched_tokens=8, speculative_config=draft, scheduler_cls=OwnScheduler
    )
    arrive(llm, 4, 10)
    llm.engine.step()
    arrive(llm, 20, 10)
    with llm.trace() as trace:
        llm.engine.step()
    assert [work.num_tokens for work in trace.of(StepRan)[0].work] == [1, 7]


def test_a_last_token_that_is_computed_again_is_no_decoding() -> None:
    """After a preemption the rest of a request may be one token; a new one is decoding again."""
    request = Request("a", "", [5, 6, 7, 8, 9], 3, SamplingParams(), 9, seed=0)
    request.num_computed_tokens = 4
    assert request.is_decoding
    request.drop_cache()
    request.num_computed_tokens = 4
    assert not request.is_decoding
    request.token_ids.append(10)
    request.num_computed_tokens = 5
    assert request.is_decoding
