"""Requests that the lessons run step by step: after the stop button none of them is left in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from minillm import LLM, SamplingParams
from minillm.teaching.submitted import submitted
from minillm.teaching.workshop.l06_pools import average_waste, examine
from minillm.teaching.workshop.l07_serving import serve, serve_late_prompt
from minillm.teaching.workshop.l10_engine import rounds_of
from minillm.trace import Event
from tests.conftest import TinyPair

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LATE = {"prompt_token_ids": list(range(20, 60))}
RUNS: dict[str, Callable[[LLM], object]] = {
    "serve": lambda llm: serve(llm, ["a", "b", "c"], [PARAMS] * 3),
    "serve, one every two steps": lambda llm: serve(llm, ["a", "b", "c"], [PARAMS] * 3, every=2),
    "serve_late_prompt": lambda llm: serve_late_prompt(llm, ["a", "b"], [PARAMS] * 2, LATE),
    "average_waste": lambda llm: average_waste(llm, ["a", "b"], PARAMS),
    "examine": lambda llm: examine(llm, [[([30, 31], PARAMS), ([40], PARAMS)], [([50], PARAMS)]]),
    "rounds_of": lambda llm: list(rounds_of(llm, "a", PARAMS)),
}


@pytest.fixture
def llm(tiny: TinyPair) -> LLM:
    drafts = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 2, "adaptive": False}
    return LLM(
        str(tiny.target),
        num_kv_blocks=64,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        enforce_eager=True,
        speculative_config=drafts,
    )


@contextmanager
def interrupted_at(llm: LLM, place: int) -> Iterator[list[Event]]:
    """The stop button is pressed at event number `place` of the engine; gives the events."""
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        if len(events) == place:
            raise KeyboardInterrupt

    llm.engine.listeners.append(note)
    try:
        yield events
    finally:
        llm.engine.listeners.remove(note)


def nothing_is_left(llm: LLM) -> bool:
    return (
        not (llm.llm_engine.has_unfinished_requests() or llm.llm_engine.metrics.requests) and llm.reset_prefix_cache()
    )


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_an_interrupt_leaves_no_request_in_the_engine(run: Callable[[LLM], object], llm: LLM):
    listeners = list(llm.engine.listeners)
    with interrupted_at(llm, 0) as events:
        run(llm)
    assert nothing_is_left(llm)
    for place in range(1, len(events), len(events) // 8):
        with interrupted_at(llm, place), pytest.raises(KeyboardInterrupt):
            run(llm)
        assert nothing_is_left(llm)
        assert list(llm.engine.listeners) == listeners
    run(llm)


def test_rounds_that_nobody_reads_to_the_end_leave_no_request(llm: LLM):
    rounds = rounds_of(llm, "a", PARAMS)
    next(rounds)
    assert llm.engine.has_requests
    rounds.close()
    assert nothing_is_left(llm)
    assert list(rounds_of(llm, "a", PARAMS))


def test_several_completions_of_one_prompt_leave_with_the_block(llm: LLM):
    with submitted(llm, ["a", "b"], SamplingParams(n=2, max_tokens=8, ignore_eos=True)) as requests:
        llm.engine.step()
        assert len(requests) == 4
    assert all(request.finish_reason == "abort" for request in requests)
    assert nothing_is_left(llm)
