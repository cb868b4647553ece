"""`ServerMetrics` from made-up events at made-up times: each number is what its name says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from minillm.serve.metrics import ServerMetrics
from minillm.trace import (
    BlocksShared,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepRan,
    StepStarted,
    TokensCommitted,
    Work,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr("minillm.serve.metrics.time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


@pytest.fixture
def metrics() -> ServerMetrics:
    config = SimpleNamespace(enable_prefix_caching=True)
    inner = SimpleNamespace(
        listeners=[],
        scheduler=SimpleNamespace(running=[], waiting=[], config=config),
        pool=SimpleNamespace(num_used=0, num_blocks=1),
    )
    engine: Any = SimpleNamespace(llm_engine=SimpleNamespace(engine=inner, max_model_len=130), num_unfinished=9)
    return ServerMetrics(engine, "tiny")


def values(metrics: ServerMetrics, end: str) -> dict[str, float]:
    """The values whose names end like this."""
    found = re.findall(rf'^vllm:(\w+){end}{{model_name="tiny"}} (\S+)$', metrics.text().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def run_requests(metrics: ServerMetrics, clock: SimpleNamespace, reason: Any, *names: str) -> None:
    """In the same steps: three prompt tokens and, after a first chunk without one, three tokens in two steps."""

    def tell(now: float, *events: Any) -> None:
        clock.now = now
        for event in events:
            metrics(event)

    def work(kind: Any, start: int, count: int) -> list[Work]:
        return [Work(name, kind, start, count) for name in names]

    def committed(tokens: list[int], length: int) -> list[TokensCommitted]:
        texts, origins = ["x"] * len(tokens), ["sampled"] * len(tokens)
        return [TokensCommitted(name, tokens, texts, origins, 0, 0, length) for name in names]

    tell(1, *(RequestAdded(name, "def", [5, 6, 7]) for name in names))
    tell(3, StepStarted(1, 0, len(names)))
    tell(4, StepRan(1, work("prefill", 0, 2)))
    tell(4, StepRan(1, work("prefill", 0, 2)))
    tell(5, StepStarted(2, len(names), 0))
    tell(6, StepRan(2, work("prefill", 2, 1)))
    tell(8, *committed([9], 3))
    tell(10, StepStarted(3, len(names), 0))
    tell(11, StepRan(3, work("decode", 3, 1)))
    tell(24, *committed([9, 9], 5))
    tell(25, *(RequestFinished(name, reason, 3, 3) for name in names))


def test_every_sum_is_the_difference_of_the_right_two_times(metrics: ServerMetrics, clock: SimpleNamespace) -> None:
    run_requests(metrics, clock, "length", "a")
    assert values(metrics, "_sum") == {
        "time_to_first_token_seconds": 7,
        "e2e_request_latency_seconds": 23,
        "request_queue_time_seconds": 2,
        "request_prefill_time_seconds": 5,
        "request_decode_time_seconds": 16,
        "request_inference_time_seconds": 21,
        "inter_token_latency_seconds": 16,
        "request_time_per_output_token_seconds": 8,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
    }
    assert set(values(metrics, "_count").values()) == {1}


def test_every_choice_of_a_prompt_is_counted(metrics: ServerMetrics, clock: SimpleNamespace) -> None:
    run_requests(metrics, clock, "length", "a#0", "a#1")
    assert set(values(metrics, "_count").values()) == {2}
    assert values(metrics, "_sum")["e2e_request_latency_seconds"] == 2 * 23


def test_a_request_that_was_aborted_has_only_the_times_of_its_tokens(
    metrics: ServerMetrics, clock: SimpleNamespace
) -> None:
    run_requests(metrics, clock, "abort", "a")
    assert {name: value for name, value in values(metrics, "_sum").items() if value} == {
        "time_to_first_token_seconds": 7,
        "inter_token_latency_seconds": 16,
    }


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_a_request_is_counted_under_what_ended_it(metrics: ServerMetrics, clock: SimpleNamespace, reason: str) -> None:
    run_requests(metrics, clock, reason, "a")
    found = re.findall(r'request_success_total{finished_reason="(\w+)",\S+} (\S+)', metrics.text().decode())
    assert {name: float(value) for name, value in found} == {**dict.fromkeys(["stop", "length", "abort"], 0), reason: 1}


def test_a_prompt_is_counted_when_it_has_its_first_token(metrics: ServerMetrics) -> None:
    """One that leaves the queue before that costs no prefill."""
    counts = []
    for event in (
        RequestAdded("a", "def", [5, 6, 7]),
        RequestAdded("b", "de", [5, 6]),
        RequestFinished("b", "abort", 2, 0),
        TokensCommitted("a", [9], ["x"], ["sampled"], 0, 0, 3),
        RequestPreempted("a", 3),
        TokensCommitted("a", [9], ["x"], ["sampled"], 0, 0, 4),
    ):
        metrics(event)
        counts.append(values(metrics, "_total")["prompt_tokens"])
    assert counts == [0, 0, 0, 3, 3, 3]


def test_a_preempted_request_that_finds_its_own_blocks_has_no_further_hit(metrics: ServerMetrics) -> None:
    metrics(RequestAdded("a", "def", [5, 6, 7, 8, 9]))
    metrics(BlocksShared("a", [1], 4, "prefix"))
    metrics(StepStarted(1, 0, 1))
    metrics(StepRan(1, [Work("a", "prefill", 4, 1)]))
    metrics(RequestPreempted("a", 5))
    metrics(BlocksShared("a", [1], 4, "prefix"))
    assert values(metrics, "_total")["prefix_cache_hits"] == 4


def test_only_what_the_scheduler_has_not_started_is_waiting(metrics: ServerMetrics) -> None:
    """Of nine unfinished sequences others may have ended, or may be on their way to the engine."""
    scheduler: Any = metrics.engine.llm_engine.engine.scheduler
    scheduler.running, scheduler.waiting = ["a", "b"], ["c", "d", "e"]
    assert values(metrics, "")["num_requests_running"] == 2
    assert values(metrics, "")["num_requests_waiting"] == 3


def test_numbers_of_tokens_have_vllms_buckets(metrics: ServerMetrics) -> None:
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        ends = re.findall(rf'vllm:{name}_bucket{{le="([^"]+)"', metrics.text().decode())
        assert [float(end) for end in ends] == [1, 2, 5, 10, 20, 50, 100, float("inf")]
