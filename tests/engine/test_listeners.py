"""Listeners hear of everything in the middle of a step: what they may ask of the engine there, and what not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.scheduler import Scheduled, Scheduler
from minillm.errors import MinillmError
from minillm.trace import Event, RequestFinished, StepFinished, StepRan, StepStarted, TokensCommitted, request_metrics
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def add(a, b):", "for line in"]


@pytest.mark.parametrize("kind", [TokensCommitted, StepRan, StepFinished])
def test_an_abort_by_a_listener_is_carried_out_after_the_step(tiny: TinyPair, kind: type[Event]) -> None:
    llm = LLM(str(tiny.target))
    alone = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    steps: list[Event] = []

    def abort(event: Event) -> None:
        if isinstance(event, kind) and (kind is not TokensCommitted or event.request_id == first.request_id):
            steps.append(event)
            if len(steps) == 3:
                llm.engine.abort(first.request_id)

    first, second = llm.submit(PROMPTS, GREEDY)
    with llm.trace() as trace:
        trace.watch(abort)
        while llm.engine.has_requests:
            llm.engine.step()
            llm.engine.scheduler.check_integrity()
    assert [(e.request_id, e.reason) for e in trace.of(RequestFinished)] == [
        (first.request_id, "abort"),
        (second.request_id, "length"),
    ]
    assert first.num_output_tokens == 3 and second.output_token_ids == alone


def test_metrics_of_what_a_listener_has_aborted_are_not_kept_for_ever(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_metrics, "MAX_ENDED_PROMPTS", 2)
    engine = LLM(str(tiny.target)).llm_engine

    def abort(event: Event) -> None:
        if isinstance(event, TokensCommitted):
            engine.abort_request(event.request_id)

    for number in range(6):
        engine.add_request(f"{number}", PROMPTS[0], GREEDY)
        with engine.trace() as trace:
            trace.watch(abort)
            engine.step()
    assert not engine.has_unfinished_requests()
    assert not engine.metrics.awaited and len(engine.metrics.requests) <= 3


def test_an_abort_of_what_ends_in_the_same_step_is_without_effect(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target))
    with llm.trace() as trace:
        trace.watch(lambda event: llm.engine.abort("0") if isinstance(event, StepRan) else None)
        [output] = llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=1), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length" and len(trace.of(RequestFinished)) == 1


@pytest.mark.parametrize("call", ["step", "generate"])
def test_a_listener_that_runs_steps_is_told_so_and_the_engine_goes_on(tiny: TinyPair, call: str) -> None:
    llm = LLM(str(tiny.target))
    expected = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    def meddle(event: Event) -> None:
        if isinstance(event, StepRan):
            llm.engine.step() if call == "step" else llm.generate("x", GREEDY, use_tqdm=False)

    with llm.trace() as trace:
        trace.watch(meddle)
        with pytest.raises(MinillmError, match="a listener cannot run steps during a step"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert not llm.engine.has_requests and llm.engine.pool.num_used == 0
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


class EveryOtherStep(Scheduler):
    """Lets every other step pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_calls = 0

    def schedule(self) -> list[Scheduled]:
        self.num_calls += 1
        return super().schedule() if self.num_calls % 2 else []


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_scheduler_may_let_a_step_pass(tiny: TinyPair, enforce_eager: bool) -> None:
    expected = LLM(str(tiny.target)).generate(PROMPTS, GREEDY, use_tqdm=False)
    llm = LLM(str(tiny.target), scheduler_cls=EveryOtherStep, enforce_eager=enforce_eager)
    with llm.trace() as trace:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert (len(trace.of(StepFinished)), len(trace.of(StepRan))) == (23, 12)
    committed: list[int] = []
    for event in trace:
        if isinstance(event, StepStarted):
            committed.append(0)
        elif isinstance(event, TokensCommitted):
            committed[-1] += len(event.token_ids)
    assert committed == [2, *[0, 2] * 11]
