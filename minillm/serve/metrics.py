"""`ServerMetrics`: counts and times for Prometheus, from the engine's events, under vLLM's names.

Dashboards that were made for vLLM find what they look for. What vLLM counts and minillm does not have is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from minillm.async_llm import AsyncLLM
from minillm.trace import (
    BlocksShared,
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepRan,
    StepStarted,
    TokensCommitted,
)

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
"""Upper ends of the buckets for the time between two tokens, in seconds."""
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)
"""The same for the times of whole requests."""


def one_two_five(most: int) -> tuple[int, ...]:
    """vLLM's buckets for numbers of tokens: 1, 2, 5, 10, 20, 50, … up to `most`."""
    values = (digit * 10**zeros for zeros in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(value for value in values if value <= most)


class ServerMetrics:
    """Counters and histograms of one engine. Listens to its events from the moment it is made.

    A prompt with several choices is several requests, as in vLLM. Times begin when a request enters the engine's queue,
    as in `RequestOutput.metrics`. vLLM's times to the first and the last token also have what comes before: the
    tokenising, and the rest of the step that runs then.
    """

    def __init__(self, engine: AsyncLLM, model_name: str) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            made = Counter(f"vllm:{name}", what, ["model_name", *labels], registry=self.registry)
            return made if labels else made.labels(model_name)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", what, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of all requests that have their first token.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.preemptions = counter("num_preemptions", "Requests that lost their blocks to others.")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found there, or shared by a fork.")
        self.drafts = counter("spec_decode_num_drafts", "Verified drafts, each of one or more tokens.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        success = counter("request_success", "Ended requests.", "finished_reason")
        self.finished = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort")}
        self.first_token = histogram("time_to_first_token_seconds", "From entering the queue to the first token.", LONG)
        self.between_tokens = histogram("inter_token_latency_seconds", "Between two steps that gain tokens.", SHORT)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Per token after the first, averaged over each request.", SHORT
        )
        self.whole = histogram("e2e_request_latency_seconds", "From entering the queue to the last token.", LONG)
        self.queued = histogram("request_queue_time_seconds", "In the engine's queue, to the first step.", LONG)
        self.prefilled = histogram("request_prefill_time_seconds", "From the first step to the first token.", LONG)
        self.decoded = histogram("request_decode_time_seconds", "From the first token to the last.", LONG)
        self.ran = histogram("request_inference_time_seconds", "From the first step to the last token.", LONG)
        numbers = one_two_five(engine.llm_engine.max_model_len)
        self.tokens_of_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", numbers)
        self.tokens_of_output = histogram("request_generation_tokens", "Generated tokens of a request.", numbers)
        self.registry.register(_Gauges(engine, model_name))
        self._times: dict[str, _Times] = {}
        """Of the unfinished requests."""
        self._step_began = 0.0
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RequestAdded: self._added,
            BlocksShared: self._shared,
            StepStarted: self._step_started,
            StepRan: self._ran,
            TokensCommitted: self._committed,
            RequestPreempted: lambda event: self.preemptions.inc(),
            RequestFinished: self._ended,
        }
        engine.llm_engine.engine.listeners.append(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def __call__(self, event: Event) -> None:
        """Count one event, in the engine's thread."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _added(self, event: RequestAdded) -> None:
        if self._has_prefix_cache:
            self.cache_queries.inc(len(event.prompt_token_ids))
        self._times[event.request_id] = _Times(time.perf_counter(), len(event.prompt_token_ids))

    def _shared(self, event: BlocksShared) -> None:
        times = self._times.get(event.request_id)
        if self._has_prefix_cache and times and times.began is None:  # a preempted request finds its own blocks
            self.cache_hits.inc(event.num_tokens)

    @property
    def _has_prefix_cache(self) -> bool:
        """Without it, forks share blocks all the same, but nothing is looked up."""
        return bool(self.engine.llm_engine.engine.scheduler.config.enable_prefix_caching)

    def _step_started(self, event: StepStarted) -> None:
        self._step_began = time.perf_counter()

    def _ran(self, event: StepRan) -> None:
        for work in event.work:
            times = self._times.get(work.request_id)
            if times and times.began is None:
                times.began = self._step_began

    def _committed(self, event: TokensCommitted) -> None:
        self.generation_tokens.inc(len(event.token_ids))
        if event.num_drafts:
            self.drafts.inc()
            self.draft_tokens.inc(event.num_drafts)
            self.accepted_tokens.inc(event.num_accepted)
        now, times = time.perf_counter(), self._times.get(event.request_id)
        if times is None:
            return
        if times.last is None:
            times.first = now
            self.prompt_tokens.inc(times.num_prompt_tokens)
            self.first_token.observe(now - times.added)
        else:
            self.between_tokens.observe(now - times.last)
        times.last = now

    def _ended(self, event: RequestFinished) -> None:
        self.finished[event.reason].inc()
        times = self._times.pop(event.request_id, None)
        if event.reason == "abort" or not times or times.began is None or times.first is None or times.last is None:
            return
        self.queued.observe(times.began - times.added)
        self.prefilled.observe(times.first - times.began)
        self.decoded.observe(times.last - times.first)
        self.ran.observe(times.last - times.began)
        self.whole.observe(times.last - times.added)
        if event.num_output_tokens > 1:
            self.per_token.observe((times.last - times.first) / (event.num_output_tokens - 1))
        self.tokens_of_prompt.observe(event.num_prompt_tokens)
        self.tokens_of_output.observe(event.num_output_tokens)


@dataclass
class _Times:
    """When something happened to a request."""

    added: float
    num_prompt_tokens: int
    began: float | None = None
    """The beginning of its first step."""
    first: float | None = None
    last: float | None = None
    """Its first and last tokens so far."""


class _Gauges(Collector):
    """The state of the engine at the moment it is asked."""

    def __init__(self, engine: AsyncLLM, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name

    def collect(self) -> Iterator[GaugeMetricFamily]:
        inner = self.engine.llm_engine.engine
        usage = inner.pool.num_used / inner.pool.num_blocks
        for name, what, value in (
            ("num_requests_running", "Requests that the engine runs.", len(inner.scheduler.running)),
            ("num_requests_waiting", "Requests that wait for a seat or for blocks.", len(inner.scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of the cache blocks in use, 0 to 1.", usage),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", what, labels=["model_name"])
            family.add_metric([self.model_name], value)
            yield family
