"""How many threads a step gets: as many as make it fastest, judged by the steps before it.

The threads of a step wait for each other by looking (`team.py`). That is quick as long as each has a processor to
itself. Where others want to run too, a thread may wait for one that has no processor, and two threads can take ten
times as long as one. Nothing tells beforehand; what recent steps took does.

So a few steps now and then try half as many threads, or twice as many, and the count with the smallest mean is taken.
The mean, for a few long waits are what crowding costs. Numbers of threads change no bit of what is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import fmean

KEPT = 128
"""Steps that are remembered. A number of threads that none of them had is tried again."""
TURN = 4
"""Steps of a trial."""
JUDGED = 8
"""The latest steps with a number of threads, by which it is judged."""
HOPELESS = 1.25
"""A trial that is so many times slower ends at once."""

Step = tuple[int, float]
"""A step that was: its threads, and the seconds that it took."""


def choose(recent: Sequence[Step], limit: int) -> int:
    """The number of threads for the next step, after `recent` ones of the same kind, the oldest first.

    It is `limit`, or that halved some times.
    """
    levels = [limit]
    while levels[-1] > 1:
        levels.append(levels[-1] // 2)
    means = {level: fmean(times[-JUDGED:]) for level in levels if (times := [s for n, s in recent if n == level])}
    if not means:
        return limit
    best = min(means, key=means.__getitem__)
    current = recent[-1][0]
    turn = _length_of_turn(recent)
    if current in means and turn < TURN and means[current] < HOPELESS * means[best]:
        return current
    at = levels.index(best)
    untried = [level for level in levels[max(0, at - 1) : at + 2] if level not in means]
    return untried[0] if untried else best


def _length_of_turn(recent: Sequence[Step]) -> int:
    """How many of the latest steps had the same number of threads as the last."""
    return next((i for i, (n, _) in enumerate(reversed(recent)) if n != recent[-1][0]), len(recent))


class ThreadChoice:
    """Remembers what steps took. Only those of one kind, which do about as much, are compared."""

    def __init__(self) -> None:
        self.recent: dict[Hashable, deque[Step]] = {}
        self.latest: int | None = None
        """The number of threads of the step before, of whatever kind."""

    def threads(self, kind: Hashable, limit: int) -> int:
        """For a step of this kind, at most `limit`."""
        recent = self.recent.get(kind)
        if recent is None:
            return limit if self.latest is None else min(limit, self.latest)
        return choose(recent, limit)

    def took(self, kind: Hashable, threads: int, seconds: float) -> None:
        """Remember a step."""
        self.latest = threads
        self.recent.setdefault(kind, deque(maxlen=KEPT)).append((threads, seconds))
