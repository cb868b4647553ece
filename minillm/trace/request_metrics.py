"""Metrics per request, updated from the engine's events as they are emitted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from copy import copy
from dataclasses import dataclass

from minillm.trace import (
    BlocksAllocated,
    BlocksFreed,
    BlocksShared,
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepRan,
    StepStarted,
    TokensCommitted,
)

MAX_ENDED_PROMPTS = 1000
"""How many ended prompts keep their metrics although nobody waits for their outputs, as after `LLM.submit`."""


@dataclass
class RequestMetrics:
    """The metrics of one prompt, over all its completions. Times are seconds on a monotonic clock."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    """The beginning of its first step."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    decoding_time: float = 0.0
    """Seconds from a completion's first tokens to its last ones, summed over the completions."""
    num_output_tokens: int = 0
    num_first_tokens: int = 0
    """Those that a completion gained with its first step that gained any, summed over the completions."""
    num_target_forwards: int = 0
    """Target forwards of the request, including prefill chunks."""
    num_decode_forwards: int = 0
    """Target forwards that gained tokens; the one that completes a prompt (or, after a preemption, all tokens so far)
    does not count."""
    num_decode_tokens: int = 0
    """Tokens that those forwards gained."""
    num_drafts: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache before the first forward; forks do not count."""
    num_blocks: int = 0
    """Entries of the completions' block tables: a block that they share counts once for each."""
    peak_blocks: int = 0
    """The most of them at a time."""

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the beginning of the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, in seconds, including the queue time."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token of a completion after its first, in seconds; None before any has a second."""
        num_later = self.num_output_tokens - self.num_first_tokens
        return self.decoding_time / num_later if num_later else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None without drafts."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def tokens_per_forward(self) -> float | None:
        """τ: tokens per decode forward of the target; None before the first."""
        return self.num_decode_tokens / self.num_decode_forwards if self.num_decode_forwards else None


class MetricsWatcher:
    """Keeps `RequestMetrics` up to date. The completions of one prompt (`7#0`, `7#1`) are counted together (`7`)."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestMetrics] = {}
        self.awaited: set[str] = set()
        """Prompts whose outputs somebody waits for. They are kept until `forget`."""
        self._running: Counter[str] = Counter()
        """The number of unfinished completions of each prompt."""
        self._ended: set[str] = set()
        """Awaited prompts that have ended and are not forgotten yet."""
        self._left_over: dict[str, None] = {}
        """The other prompts that have ended and are not forgotten yet, from the first that ended on."""
        self._prefilled: set[str] = set()
        """Completions with a prefill in this step."""
        self._step_began = 0.0
        self._latest: dict[str, float] = {}
        """When each unfinished completion gained its latest tokens."""

    def __call__(self, event: Event) -> None:
        """Update the metrics with one event."""
        now = time.perf_counter()
        match event:
            case RequestFinished():
                self._latest.pop(event.request_id, None)
                self._end(prompt_id_of(event.request_id))
            case RequestAdded():
                self._drop_oldest()
                name = prompt_id_of(event.request_id)
                if not self.is_running(name):  # an ended prompt may have had the same id
                    self.forget(name)
                    self.requests[name] = RequestMetrics(arrival_time=now)
                self._running[name] += 1
            case StepStarted():
                self._step_began = now
            case StepRan():
                self._drop_oldest()
                self._prefilled = {work.request_id for work in event.work if work.kind == "prefill"}
                for work in event.work:
                    metrics = self.requests[prompt_id_of(work.request_id)]
                    metrics.num_target_forwards += 1
                    if metrics.first_scheduled_time is None:
                        metrics.first_scheduled_time = self._step_began
            case TokensCommitted():
                metrics = self.requests[prompt_id_of(event.request_id)]
                metrics.num_output_tokens += len(event.token_ids)
                if event.request_id not in self._prefilled:
                    metrics.num_decode_forwards += 1
                    metrics.num_decode_tokens += len(event.token_ids)
                metrics.num_drafts += event.num_drafts
                metrics.num_accepted += event.num_accepted
                latest = self._latest.get(event.request_id)
                if latest is None:
                    metrics.num_first_tokens += len(event.token_ids)
                else:
                    metrics.decoding_time += now - latest
                self._latest[event.request_id] = metrics.last_token_time = now
                if metrics.first_token_time is None:
                    metrics.first_token_time = now
            case BlocksAllocated():
                metrics = self.requests[prompt_id_of(event.request_id)]
                metrics.num_blocks += len(event.block_ids)
                metrics.peak_blocks = max(metrics.peak_blocks, metrics.num_blocks)
            case BlocksShared():
                metrics = self.requests[prompt_id_of(event.request_id)]
                metrics.num_blocks += len(event.block_ids)
                metrics.peak_blocks = max(metrics.peak_blocks, metrics.num_blocks)
                if event.source == "prefix" and metrics.first_scheduled_time is None:
                    metrics.num_cached_tokens = max(metrics.num_cached_tokens, event.num_tokens)
            case BlocksFreed():
                self.requests[prompt_id_of(event.request_id)].num_blocks -= len(event.block_ids)
            case RequestPreempted():
                self.requests[prompt_id_of(event.request_id)].num_preemptions += 1

    def _end(self, name: str) -> None:
        """Count an ended completion."""
        self._running[name] -= 1
        if self._running[name] > 0:
            return
        del self._running[name]
        if name in self.awaited:
            self._ended.add(name)
        else:
            self._left_over[name] = None

    def _drop_oldest(self) -> None:
        """Keep `MAX_ENDED_PROMPTS` of those that nobody waits for. Not called when a prompt ends: a step may end more
        than these, and the caller may ask for their metrics after it."""
        while len(self._left_over) > MAX_ENDED_PROMPTS:
            self.forget(next(iter(self._left_over)))

    def is_running(self, name: str) -> bool:
        """Whether a completion of this prompt is unfinished, or ended in a step that was interrupted before the event
        `RequestFinished`."""
        return name in self._running

    @property
    def num_unfinished(self) -> int:
        """Completions of all prompts that are unfinished, or ended in a step that was interrupted before the event
        `RequestFinished`."""
        return self._running.total()

    def ended_among(self, names: Container[str]) -> list[str]:
        """Those of the awaited prompts `names` that have ended and are not forgotten yet."""
        return [name for name in self._ended if name in names]

    def of(self, name: str) -> RequestMetrics:
        """A copy of the metrics of a prompt as they are now."""
        return copy(self.requests.get(name) or RequestMetrics())

    def forget(self, name: str) -> None:
        """Forget an ended prompt."""
        self.awaited.discard(name)
        self._ended.discard(name)
        self._left_over.pop(name, None)
        self._running.pop(name, None)  # it may have ended in a step that was interrupted before `RequestFinished`
        self.requests.pop(name, None)


def prompt_id_of(request_id: str) -> str:
    """Return the id of the prompt that a request completes: completion `7#1` belongs to prompt `7`."""
    return request_id.split("#", 1)[0]
