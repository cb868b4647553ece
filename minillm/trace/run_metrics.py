"""Metrics of a whole run, computed from its trace."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.trace import Trace
from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.cache_state import CacheState


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of one run; `of` computes them from a trace."""

    output_tokens: int
    seconds: float
    """Time spent in steps, including drafting."""
    draft_seconds: float
    tokens_per_forward: float
    """τ, see `Acceptance.tokens_per_forward`; 1 without drafts, as a forward then yields one token per request."""
    accepted_drafts: int
    judged_drafts: int
    accepted_by_position: tuple[tuple[int, int], ...]
    """For each draft position: how many drafts were kept, out of how many."""
    peak_blocks: int
    num_blocks: int
    waste_share: float
    """Empty slots / slots of used blocks, both measured at the end of each step and summed over all steps; 0 in a
    layout that drops tokens."""
    preemptions: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second spent in steps; 0 if no time passed."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, trace: Trace) -> RunMetrics:
        """Compute the metrics of all events in `trace` so far."""
        cache = CacheState().fold_all(trace)
        acceptance = AcceptanceState().fold_all(trace).total()
        used_slots = sum(snapshot.used_blocks for snapshot in cache.history) * cache.block_size
        waste = sum(snapshot.waste_slots for snapshot in cache.history)
        totals = cache.totals
        return cls(
            output_tokens=totals.output_tokens,
            seconds=totals.seconds,
            draft_seconds=totals.draft_seconds,
            tokens_per_forward=acceptance.tokens_per_forward or 1.0,
            accepted_drafts=acceptance.num_accepted,
            judged_drafts=acceptance.drafted,
            accepted_by_position=tuple(acceptance.accepted_by_position()),
            peak_blocks=totals.peak_blocks,
            num_blocks=cache.num_blocks,
            waste_share=waste / used_slots if used_slots else 0.0,
            preemptions=totals.preemptions,
        )
