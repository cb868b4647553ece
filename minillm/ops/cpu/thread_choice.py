"""How many threads a step gets: the number that made recent steps fastest.

The threads of a step wait for each other by spinning (`team.py`). That is fast as long as each has a processor to
itself. On a busy machine a thread may wait for one that has no processor, and two threads can take ten times as long as
one. Nothing shows this beforehand, only the times of recent steps.

So a few steps now and then try half as many threads, or twice as many, and the number with the smallest mean time is
used. The mean counts because the cost of a busy machine is a few long waits. But a single long wait says little: the
machine may be quiet again. So a number of threads that lost is tried again soon, and each time that it loses again, its
next trial comes twice as late. The first step with more threads than the step before is not counted: they have to wake
up, which can take longer than the step. The number of threads changes no bit of the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST_REST, LONGEST_REST = 8, 256
"""Steps without a number of threads before it is tried again: at least and at most."""
TRIAL_STEPS = 5
"""Steps that a trial takes, including a first one that is not counted."""
MEAN_STEPS = 8
"""A number of threads is judged by the mean of its latest steps, at most so many."""
TRIAL_GIVES_UP_AT = 1.25
"""A trial that is slower by this factor ends at once."""


@dataclass
class Level:
    """What is known of one number of threads."""

    rest: int
    """Steps without it before it is tried again. Each rest is twice as long as the one before; after as many steps
    with it as the last rest took, the next is `FIRST_REST` again."""
    times: deque[float] = field(default_factory=lambda: deque(maxlen=MEAN_STEPS))
    """Of its latest steps. Empty: to be tried."""
    latest: int = 0
    """Its latest step."""
    used: int = 0
    """Steps with it since its last rest."""


class RecentSteps:
    """The times of recent steps of one kind, by number of threads."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.current = 0
        """The number of threads of the latest step."""
        self.in_a_row = 0
        """How many steps in a row, up to the latest, had that number."""
        self._levels: dict[int, Level] = {}
        """Number of threads → what is known of it."""

    def add(self, threads: int, seconds: float) -> None:
        """Remember the time of a step."""
        self.num_steps += 1
        wakes = threads > self.current > 0
        self.in_a_row = self.in_a_row + 1 if threads == self.current else 1
        self.current = threads
        # The first number is what the machine should have; another is only a trial until it is used for long.
        level = self._levels.setdefault(threads, Level(LONGEST_REST if self._levels else FIRST_REST))
        level.latest = self.num_steps
        level.used += 1
        if not wakes:
            level.times.append(seconds)
        if level.used >= level.rest:
            level.rest = FIRST_REST
        for other in self._levels.values():
            if other.times and self.num_steps - other.latest >= other.rest:
                other.times.clear()
                other.used = 0
                other.rest = min(2 * other.rest, LONGEST_REST)

    def choose(self, limit: int) -> int:
        """The number of threads for the next step: `limit`, or `limit` halved some times."""
        levels = [limit]
        while levels[-1] > 1:
            levels.append(levels[-1] // 2)
        means = {
            level: sum(known.times) / len(known.times)
            for level in levels
            if (known := self._levels.get(level)) and known.times
        }
        if not means:
            return limit
        best = min(means, key=means.__getitem__)
        mean = means.get(self.current)
        if mean is not None and self.in_a_row < TRIAL_STEPS and mean < TRIAL_GIVES_UP_AT * means[best]:
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
