"""Time several functions in turn and compare them round by round. The lessons measure with these functions.

The order A B C A B C … lets a temporary slowdown of the machine affect all of them. Results are ratios of runs of the
same round rather than seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from minillm.trace.run_metrics import RunMetrics

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.sampling import SamplingParams

Key = TypeVar("Key", bound=Hashable)

clock: Callable[[], float] = time.thread_time if sys.platform == "linux" else time.perf_counter
"""CPU time of this thread in seconds, which other load on the machine does not affect. Only for single-threaded work
(`torch.set_num_threads(1)`). It is wall time on Windows, which counts CPU time in steps of 16 ms, and on macOS, where
products may run on threads of Apple's Accelerate, which PyTorch does not limit."""


def clock_for_threads(num_threads: int) -> Callable[[], float]:
    """The clock for work on so many threads: CPU time of this thread for one, wall time for more."""
    return clock if num_threads == 1 else time.perf_counter


@dataclass(frozen=True)
class Spread:
    """The median and range of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median, the smallest and the largest of `values`."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f} to {self.high:.1f})"


def time_in_turn(
    runs: Mapping[Key, Callable[[], Any]], rounds: int = 5, num_threads: int = 1
) -> dict[Key, list[float]]:
    """Time every run once per round, after a warm-up round that is not returned. Returns the seconds of each round.

    `num_threads`: on how many threads the runs work; it decides the clock (`clock_for_threads`)."""
    now = clock_for_threads(num_threads)
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for turn in range(rounds + 1):
        for key, run in runs.items():
            began = now()
            run()
            if turn:
                seconds[key].append(now() - began)
    return seconds


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """How many times as long `slow` took as `fast`, round by round."""
    return Spread.of([a / b for a, b in zip(slow, fast, strict=True)])


def medians(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The median of each list that `time_in_turn` returned."""
    return {key: statistics.median(each) for key, each in seconds.items()}


def speed_ratios(
    one: LLM, other: LLM, batches: Sequence[list[str]], params: SamplingParams, pairs: int = 5
) -> list[float]:
    """How many times as fast `one` is as `other` in each of `pairs` pairs of runs, sorted; after a warm-up pair.

    A run generates all batches of prompts in turn. Only time inside the engines is measured."""

    def speed(engine: LLM) -> float:
        with engine.trace() as run:
            for batch in batches:
                engine.generate(batch, params, use_tqdm=False)
        return RunMetrics.of(run).tokens_per_second

    return sorted([speed(one) / speed(other) for _ in range(pairs + 1)][1:])
