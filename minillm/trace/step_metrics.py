"""Metrics per step, computed from a trace: how full the batch and the cache were.

They depend only on the events, so the same trace always gives the same metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minillm.trace import (
    BlocksShared,
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepRan,
    StepStarted,
    TokensCommitted,
    Work,
)
from minillm.trace.cache_state import CacheState


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step. Blocks and slots are counted at its end."""

    step: int
    num_running: int
    """Requests that went through the model."""
    num_waiting: int
    """Unfinished requests that did not: in the queue, preempted, or without a share of the budget."""
    num_prefill_tokens: int
    """Prompt tokens that went through the model, and tokens recomputed after a preemption."""
    num_decode_tokens: int
    num_verify_tokens: int
    """Drafts, and the last committed token of each request that verifies."""
    num_reused_tokens: int
    """Tokens found in the prefix cache or shared by a fork, which did not go through the model."""
    num_committed_tokens: int
    """Tokens that requests gained."""
    num_preemptions: int
    used_blocks: int
    cached_blocks: int
    """Blocks without an owner that are in the prefix cache."""
    free_blocks: int
    """Blocks without an owner that are not. Used, cached and free blocks together are all blocks."""
    valid_slots: int
    """Slots of used blocks that hold the keys and values of a token; a shared slot counts once."""
    allocated_slots: int
    """All slots of used blocks."""
    seconds: float

    @property
    def num_tokens(self) -> int:
        """The number of tokens that went through the model."""
        return self.num_prefill_tokens + self.num_decode_tokens + self.num_verify_tokens

    @property
    def kv_slot_utilisation(self) -> float | None:
        """Valid / allocated slots; the rest is waste. None if nothing is allocated."""
        return self.valid_slots / self.allocated_slots if self.allocated_slots else None


def step_metrics(trace: Iterable[Event]) -> list[StepMetrics]:
    """Return the metrics of every finished step of a trace (or of its first events), in order.

    Raises `TraceError` if events contradict each other, for example if the first events are missing.
    """
    counter = _Counter()
    return [metrics for number, event in enumerate(trace, 1) if (metrics := counter.take(event, number))]


@dataclass
class _Counter:
    """Counts within a step, and creates its `StepMetrics` when it ends."""

    cache: CacheState = field(default_factory=CacheState)
    alive: set[str] = field(default_factory=set)
    present: set[str] = field(default_factory=set)
    """Requests that were unfinished at some point of this step."""
    work: list[Work] = field(default_factory=list)
    reused: int = 0
    committed: int = 0
    preemptions: int = 0

    def take(self, event: Event, number: int) -> StepMetrics | None:
        self.cache.fold_numbered(number, event)
        match event:
            case RequestAdded(request_id=request_id):
                self.alive.add(request_id)
                self.present.add(request_id)
            case StepStarted():
                self.present = set(self.alive)
                self.work, self.reused, self.committed, self.preemptions = [], 0, 0, 0
            case BlocksShared(num_tokens=num_tokens):
                self.reused += num_tokens
            case RequestPreempted():
                self.preemptions += 1
            case StepRan(work=work):
                self.work = work
            case TokensCommitted(token_ids=token_ids):
                self.committed += len(token_ids)
            case RequestFinished(request_id=request_id):
                self.alive.discard(request_id)
            case StepFinished():
                return self._metrics(event)
        return None

    def _metrics(self, event: StepFinished) -> StepMetrics:
        cache = self.cache
        tokens = {
            kind: sum(w.num_tokens for w in self.work if w.kind == kind) for kind in ("prefill", "decode", "verify")
        }
        return StepMetrics(
            step=event.step,
            num_running=len(self.work),
            num_waiting=len(self.present - {w.request_id for w in self.work}),
            num_prefill_tokens=tokens["prefill"],
            num_decode_tokens=tokens["decode"],
            num_verify_tokens=tokens["verify"],
            num_reused_tokens=self.reused,
            num_committed_tokens=self.committed,
            num_preemptions=self.preemptions,
            used_blocks=cache.used_blocks,
            cached_blocks=cache.cached_blocks,
            free_blocks=cache.free_blocks - cache.cached_blocks,
            valid_slots=cache.used_slots - cache.waste_slots if cache.keeps_every_token else 0,
            allocated_slots=cache.used_slots if cache.keeps_every_token else 0,
            seconds=event.seconds,
        )
