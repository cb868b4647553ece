"""How many threads a step gets: the number that made recent steps fastest.

The threads of a step wait for each other by spinning (`team.py`). That is fast as long as each has a processor to
itself. On a busy machine a thread may wait for one that has no processor, and two threads can take ten times as long as
one. Nothing shows this beforehand, only the times of recent steps.

So a few steps now and then try half as many threads, or twice as many, and the number with the smallest mean time is
used. The mean counts because the cost of a busy machine is a few long waits. The number of threads
changes no bit of the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import fmean

REMEMBERED_STEPS = 128
"""Recent steps that are remembered. A number of threads that none of them had is tried again."""
TRIAL_STEPS = 4
"""Steps that a trial takes."""
MEAN_STEPS = 8
"""A number of threads is judged by the mean of its latest steps, at most so many."""
TRIAL_GIVES_UP_AT = 1.25
"""A trial that is slower by this factor ends at once."""

Step = tuple[int, float]
"""A past step: (number of threads, seconds)."""


def choose(recent: Sequence[Step], limit: int) -> int:
    """The number of threads for the next step: `limit`, or `limit` halved some times.

    `recent`: the steps of the same kind before it, oldest first.
    """
    levels = [limit]
    while levels[-1] > 1:
        levels.append(levels[-1] // 2)
    means = {level: fmean(times[-MEAN_STEPS:]) for level in levels if (times := [s for n, s in recent if n == level])}
    if not means:
        return limit
    best = min(means, key=means.__getitem__)
    current = recent[-1][0]
    trial = _trial_length(recent)
    if current in means and trial < TRIAL_STEPS and means[current] < TRIAL_GIVES_UP_AT * means[best]:
        return current
    at = levels.index(best)
    untried = [level for level in levels[max(0, at - 1) : at + 2] if level not in means]
    return untried[0] if untried else best


def _trial_length(recent: Sequence[Step]) -> int:
    """How many steps in a row, up to the last, had the same number of threads."""
    return next((i for i, (n, _) in enumerate(reversed(recent)) if n != recent[-1][0]), len(recent))


class ThreadChoice:
    """Remembers the times of steps. Only steps of one kind, which do about the same work, are compared."""

    def __init__(self) -> None:
        self.recent: dict[Hashable, deque[Step]] = {}
        self.latest: int | None = None
        """The number of threads of the previous step, of any kind."""

    def threads(self, kind: Hashable, limit: int) -> int:
        """The number of threads for a step of this kind, at most `limit`."""
        recent = self.recent.get(kind)
        if recent is None:
            return limit if self.latest is None else min(limit, self.latest)
        return choose(recent, limit)

    def record(self, kind: Hashable, threads: int, seconds: float) -> None:
        """Remember the time of a step."""
        self.latest = threads
        self.recent.setdefault(kind, deque(maxlen=REMEMBERED_STEPS)).append((threads, seconds))
