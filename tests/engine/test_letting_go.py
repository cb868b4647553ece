"""An engine that nobody holds is gone at once, weights and cache and all: nothing waits for the garbage collector.

A lesson makes one engine after the other, and a collector that has not run yet would keep the weights of several.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.trace import Event, StepRan
from tests.conftest import TinyPair

PROMPTS = ["def add(a, b):", "def add(a, c):"]
TWICE = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def no_collector() -> Iterator[None]:
    """Reference counting alone. The collector runs once before: it looks at all that other tests have made."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def parts(llm: LLM) -> dict[str, weakref.ref[Any]]:
    """Everything of an engine that is large, and everything that leads to it."""
    engine = llm.engine
    found = {"llm": llm, "llm_engine": llm.llm_engine, "engine": engine}
    found |= {"scheduler": engine.scheduler, "pool": engine.pool, "tokenizer": engine.tokenizer}
    runners = {"target": engine.runner}
    if engine.drafter is not None:
        found["drafter"] = engine.drafter
        runners["draft"] = engine.drafter.runner
    for name, runner in runners.items():
        found |= {f"{name} runner": runner, f"{name} model": runner.model, f"{name} cache": runner.cache}
        found[f"{name} weights"] = runner.model.embed_tokens.weight
    return {name: weakref.ref(part) for name, part in found.items()}


def nothing(llm: LLM) -> None:
    """Not used at all."""


def generate(llm: LLM) -> None:
    """Used."""
    llm.generate(PROMPTS, TWICE, use_tqdm=False)


def traced(llm: LLM) -> None:
    """Watched."""
    with llm.trace() as trace:
        generate(llm)
    assert len(trace)


def interrupted(llm: LLM) -> None:
    """Stopped in the middle of a step."""

    def stop(event: Event) -> None:
        if isinstance(event, StepRan):
            raise KeyboardInterrupt

    llm.engine.listeners.append(stop)
    with pytest.raises(KeyboardInterrupt):
        generate(llm)


def left_waiting(llm: LLM) -> None:
    """Dropped with requests in its queues, some of them running."""
    llm.submit(PROMPTS, TWICE)
    llm.engine.step()


def half_streamed(llm: LLM) -> None:
    """Dropped while it streams."""
    next(llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))


@pytest.mark.parametrize("kind", ["plain", "drafted", "without prefix caching"])
@pytest.mark.parametrize("use", [nothing, generate, traced, interrupted, left_waiting, half_streamed])
def test_a_dropped_engine_is_gone_without_the_collector(tiny: TinyPair, kind: str, use: Callable[[LLM], None]) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": kind != "without prefix caching"}
    if kind == "drafted":
        options["speculative_config"] = {"model": str(tiny.draft), "num_speculative_tokens": 3}
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=24, **options)
    use(llm)
    held = parts(llm)
    assert all(part() is not None for part in held.values())
    del llm
    assert [name for name, part in held.items() if part() is not None] == []
