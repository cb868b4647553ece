"""Time several things in turn and compare them run by run: what the lessons measure with.

A B C A B C …, so that a slow moment of the machine hits all of them, and ratios of neighbours instead of seconds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)

clock: Callable[[], float] = time.thread_time if os.name == "posix" else time.perf_counter
"""Seconds of CPU time of this thread, so that whatever else runs on the machine does not count. Only for work that one
thread does alone (`torch.set_num_threads(1)`). Windows counts CPU time in steps of 16 ms, so there it is wall time."""


@dataclass(frozen=True)
class Spread:
    """Several measurements of one quantity."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median, the smallest and the largest."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f} to {self.high:.1f})"


def in_turn(runs: Mapping[Key, Callable[[], Any]], rounds: int = 5) -> dict[Key, list[float]]:
    """Seconds that each run took in each of `rounds` rounds; a round before them warms up and is not counted."""
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for turn in range(rounds + 1):
        for key, run in runs.items():
            began = clock()
            run()
            if turn:
                seconds[key].append(clock() - began)
    return seconds


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """How many times longer `slow` took than `fast`, round by round."""
    return Spread.of([a / b for a, b in zip(slow, fast, strict=True)])


def medians(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The median of each list that `in_turn` returned."""
    return {key: statistics.median(each) for key, each in seconds.items()}
