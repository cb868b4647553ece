"""What a whole run comes to, in numbers taken from its trace or from its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.trace import Trace
from minillm.viz.acceptance_state import AcceptanceState
from minillm.viz.cache_state import CacheState

if TYPE_CHECKING:
    from minillm import LLM, SamplingParams
    from minillm.outputs import RequestOutput


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


def tokens_per_forward(outputs: Sequence[RequestOutput]) -> float:
    """Output tokens of all requests / decoding forwards of the target that they took."""
    forwards = sum(output.metrics.num_decode_forwards for output in outputs)
    return sum(output.metrics.num_output_tokens for output in outputs) / forwards


def speed_ratios(
    one: LLM, other: LLM, batches: Sequence[list[str]], params: SamplingParams, pairs: int = 5
) -> list[float]:
    """How many times as fast `one` is as `other`, sorted: `pairs` pairs of runs in turn, after one that is not counted.

    Each batch of prompts is generated in turn; only time inside the engines counts."""

    def speed(engine: LLM) -> float:
        with engine.trace() as run:
            for batch in batches:
                engine.generate(batch, params, use_tqdm=False)
        return RunFigures.of(run).tokens_per_second

    return sorted([speed(one) / speed(other) for _ in range(pairs + 1)][1:])
