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
from collections.abc import Hashable

REMEMBERED_STEPS = 128
"""Recent steps that are remembered. A number of threads that none of them had is tried again."""
TRIAL_STEPS = 4
"""Steps that a trial takes."""
MEAN_STEPS = 8
"""A number of threads is judged by the mean of its latest steps, at most so many."""
TRIAL_GIVES_UP_AT = 1.25
"""A trial that is slower by this factor ends at once."""


class RecentSteps:
    """The times of recent steps of one kind, by number of threads."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.current = 0
        """The number of threads of the latest step."""
        self.trial = 0
        """How many steps in a row, up to the latest, had that number."""
        self._times: dict[int, deque[float]] = {}
        self._latest: dict[int, int] = {}
        """Number of threads → its latest step."""

    def add(self, threads: int, seconds: float) -> None:
        """Remember the time of a step."""
        self.num_steps += 1
        self.trial = self.trial + 1 if threads == self.current else 1
        self.current = threads
        self._latest[threads] = self.num_steps
        self._times.setdefault(threads, deque(maxlen=MEAN_STEPS)).append(seconds)
        for forgotten in [n for n, latest in self._latest.items() if latest <= self.num_steps - REMEMBERED_STEPS]:
            del self._latest[forgotten], self._times[forgotten]

    def choose(self, limit: int) -> int:
        """The number of threads for the next step: `limit`, or `limit` halved some times."""
        levels = [limit]
        while levels[-1] > 1:
            levels.append(levels[-1] // 2)
        means = {level: sum(times) / len(times) for level in levels if (times := self._times.get(level))}
        if not means:
            return limit
        best = min(means, key=means.__getitem__)
        mean = means.get(self.current)
        if mean is not None and self.trial < TRIAL_STEPS and mean < TRIAL_GIVES_UP_AT * means[best]:
            return self.current
        at = levels.index(best)
        untried = [level for level in levels[max(0, at - 1) : at + 2] if level not in means]
        return untried[0] if untried else best


class ThreadChoice:
    """Remembers the times of steps. Only steps of one kind, which do about the same work, are compared."""

    def __init__(self) -> None:
        self.recent: dict[Hashable, RecentSteps] = {}
        self.latest: int | None = None
        """The number of threads of the previous step, of any kind."""

    def threads(self, kind: Hashable, limit: int) -> int:
        """The number of threads for a step of this kind, at most `limit`."""
        recent = self.recent.get(kind)
        if recent is None:
            return limit if self.latest is None else min(limit, self.latest)
        return recent.choose(limit)

    def record(self, kind: Hashable, threads: int, seconds: float) -> None:
        """Remember the time of a step."""
        self.latest = threads
        if kind not in self.recent:
            self.recent[kind] = RecentSteps()
        self.recent[kind].add(threads, seconds)
