"""What a whole run comes to, in numbers taken from its trace."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.trace import Trace
from minillm.viz.acceptance_state import AcceptanceState
from minillm.viz.cache_state import CacheState


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run; `of` takes them from a trace."""

    output_tokens: int
    seconds: float
    """Time inside steps, drafting included."""
    draft_seconds: float
    tokens_per_forward: float
    """τ of the rounds that judged drafts; 1 without any, as a forward then yields one token per request."""
    kept_drafts: int
    judged_drafts: int
    kept_by_position: tuple[tuple[int, int], ...]
    """Per draft position: kept, out of how many."""
    peak_blocks: int
    num_blocks: int
    waste_share: float
    """Empty slots / slots of used blocks, both summed over the ends of all steps."""
    preemptions: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of stepping; 0 if no time passed."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, trace: Trace) -> RunFigures:
        """The figures of everything that `trace` holds so far."""
        cache = CacheState().fold_all(trace)
        acceptance = AcceptanceState().fold_all(trace).total()
        used_slots = sum(figures.used_blocks for figures in cache.history) * cache.block_size
        waste = sum(figures.waste_slots for figures in cache.history)
        totals = cache.totals
        return cls(
            output_tokens=totals.output_tokens,
            seconds=totals.seconds,
            draft_seconds=totals.draft_seconds,
            tokens_per_forward=acceptance.tokens_per_forward or 1.0,
            kept_drafts=acceptance.kept,
            judged_drafts=acceptance.drafted,
            kept_by_position=tuple(acceptance.kept_by_position()),
            peak_blocks=totals.peak_blocks,
            num_blocks=cache.num_blocks,
            waste_share=waste / used_slots if used_slots else 0.0,
            preemptions=totals.preemptions,
        )
