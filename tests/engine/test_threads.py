"""Engines and threads: two engines in two threads, and one engine in several. Tokens are those of each alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest

from minillm import LLM, EngineArgs, LLMEngine, SamplingParams, llm_engine
from minillm.errors import NonFiniteLogitsError, PromptError
from minillm.trace import RequestFinished, RequestPreempted, StepRan, TokensCommitted
from tests.broken_logits import break_logits
from tests.conftest import TinyPair

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "class Stack:"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=7, n=2, max_tokens=16, ignore_eos=True)
pytestmark = pytest.mark.timeout(120)


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """What each job gives, all of them started at the same moment in a thread of their own."""
    start = Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


def tokens(llm: LLM, prompts: list[str], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def made(tiny: TinyPair, way: str, num_kv_blocks: int = 60) -> LLM:
    options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": num_kv_blocks, "enforce_eager": "eager" in way}
    if "draft model" in way:
        options["speculative_config"] = {"model": str(tiny.draft), "num_speculative_tokens": 3}
    if "suffix" in way:
        options["speculative_config"] = {"method": "suffix"}
    return LLM(str(tiny.target), device="cpu", **options)


@pytest.mark.parametrize("way", ["compiled", "eager", "compiled, draft model", "eager, suffix"])
def test_two_engines_in_two_threads_are_as_each_alone(tiny: TinyPair, way: str) -> None:
    alone = [tokens(made(tiny, way), [prompt]) for prompt in PROMPTS[:2]]
    engines = [made(tiny, way) for _ in range(2)]
    for _ in range(3):
        jobs = [lambda i=i: tokens(engines[i], [PROMPTS[i]]) for i in range(2)]
        assert together(jobs) == alone
    assert [llm.engine.pool.num_used for llm in engines] == [0, 0]


def test_two_engines_may_be_made_in_two_threads(tiny: TinyPair) -> None:
    alone = tokens(made(tiny, "compiled"), PROMPTS[:1])
    assert together([lambda: tokens(made(tiny, "compiled"), PROMPTS[:1])] * 3) == [alone] * 3


@pytest.mark.parametrize("way", ["compiled", "eager", "compiled, draft model", "eager, suffix"])
def test_one_engine_in_four_threads_gives_each_what_it_would_give_alone(tiny: TinyPair, way: str) -> None:
    """Some generate and some stream, greedily and by chance; the pool is too small for all of them at once.

    What suffix decoding guesses, and so what chance picks, depends on what was said before: there all are greedy. How
    many drafts of a model fit depends on the others: there chance has one outcome.
    """
    third = GREEDY if "suffix" in way else replace(SAMPLED, top_k=1) if "draft model" in way else SAMPLED
    reference = made(tiny, way)
    alone = [tokens(reference, [prompt]) for prompt in PROMPTS]
    chance = tokens(reference, [PROMPTS[3]], third)
    text = "".join(reference.stream(PROMPTS[2], GREEDY))
    llm = made(tiny, way, num_kv_blocks=24)  # the four of the first job alone need 34
    jobs: list[Callable[[], Any]] = [
        lambda: tokens(llm, PROMPTS),
        lambda: [tokens(llm, [prompt])[0] for prompt in PROMPTS],
        lambda: tokens(llm, [PROMPTS[3]], third),
        lambda: "".join(llm.stream(PROMPTS[2], GREEDY)),
    ]
    every = [completions for [completions] in alone]
    with llm.trace() as trace:
        for _ in range(3):
            assert together(jobs) == [every, every, chance, text]
    assert trace.of(RequestPreempted)
    assert llm.engine.pool.num_used == 0 and not llm.engine.has_requests and not llm.llm_engine.metrics.requests
    llm.engine.scheduler.check_integrity()


def test_threads_share_steps_and_a_trace_holds_them_all(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, all_queued = made(tiny, "eager"), Barrier(3)
    queue = llm.llm_engine.queue

    def queue_and_wait(*args: Any, **options: Any) -> None:
        queue(*args, **options)
        all_queued.wait(10)  # raises BrokenBarrierError if one caller keeps the others out

    monkeypatch.setattr(llm.llm_engine, "queue", queue_and_wait)
    with llm.trace() as trace:
        together([lambda: tokens(llm, PROMPTS)] * 3)
    assert max(len(event.work) for event in trace.of(StepRan)) > len(PROMPTS)
    assert len(trace.of(RequestFinished)) == 12
    assert sum(len(event.token_ids) for event in trace.of(TokensCommitted)) == 12 * 24


def test_a_thread_that_is_refused_disturbs_no_other(tiny: TinyPair) -> None:
    llm = made(tiny, "eager")
    alone = tokens(llm, PROMPTS)

    def refused() -> str:
        with pytest.raises(PromptError) as problem:
            llm.generate([PROMPTS[0], ""], GREEDY, use_tqdm=False)
        return type(problem.value).__name__

    def left() -> str:
        return next(llm.stream(PROMPTS[1], GREEDY))[:0]

    assert together([lambda: tokens(llm, PROMPTS), refused, left]) == [alone, "PromptError", ""]
    assert llm.engine.pool.num_used == 0


def test_requests_may_be_added_and_aborted_while_another_thread_steps(tiny: TinyPair) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(str(tiny.target), device="cpu", block_size=4, enforce_eager=True))
    engine.add_request("first", PROMPTS[0], GREEDY)

    names = {"first", *(f"kept {i}" for i in range(20))}

    def step() -> dict[str, int]:
        ended: dict[str, int] = {}
        while not names <= ended.keys():
            for output in engine.step():
                if output.finished:
                    ended[output.request_id] = len(output.outputs[0].token_ids)
        return ended

    def add() -> None:
        for i in range(20):
            engine.add_request(f"kept {i}", PROMPTS[i % 4], GREEDY)
            engine.add_request(f"dropped {i}", PROMPTS[i % 4], GREEDY)
            engine.abort_request(f"dropped {i}")

    ended, _ = together([step, add])
    assert {ended[name] for name in names} == {24}
    assert engine.engine.pool.num_used == 0


def test_broken_logits_of_one_thread_do_not_end_another(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(tiny, "eager")
    alone = tokens(llm, PROMPTS[:2])

    def broken() -> None:
        with pytest.raises(NonFiniteLogitsError):
            tokens(llm, [PROMPTS[2]])

    break_logits(monkeypatch, lambda request: request.prompt == PROMPTS[2] and request.num_output_tokens > 5)
    for _ in range(5):
        assert together([lambda: tokens(llm, PROMPTS[:2]), broken]) == [alone, None]
    assert not llm.engine.has_requests and llm.engine.pool.num_used == 0
    # If the owner of the broken request takes no step, the caller that does gets the error.
    monkeypatch.setattr(llm_engine, "MAX_FAILED_STEPS", 3)
    [left] = llm.submit(PROMPTS[2:3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    with pytest.raises(NonFiniteLogitsError, match=left.request_id):
        tokens(llm, PROMPTS[:2])
