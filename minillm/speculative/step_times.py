"""How long steps turn out to take, relative to `StepCosts`: without drafts, and how much drafts add.

With all that an engine does around a forward, a step takes longer than its parts, and many requests are not as much
work as one with as many rows.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from minillm.speculative.step_costs import SETTLING_STEPS, StepCosts

LARGEST_CHANGE = 2.0
"""A step counts as at most so many times what is usual, or so small a part of it: it may have been interrupted."""
PLAIN_STEPS_KEPT = 16
"""Steps without drafts are judged by the median of so many of the latest. Few, because the speed of a machine changes;
the median, because some were interrupted or tried fewer threads."""
FRESH_STEPS = 100
"""What steps without drafts take is known for as long as so many of them take. Later the machine may have another
speed: steps with drafts are not compared with them, and of the earlier ones few are kept."""
STALE_STEPS_KEPT = 2
"""Of those measured longer ago, so many are kept when one is measured again: it may have been interrupted."""
DRAFTED_WEIGHT = 0.02
"""What the latest step with drafts weighs at least in means over them."""
MOST_SKIPPED = 64
"""At most so many steps are left out one after the other (`SETTLING_STEPS`): where prompts come every few steps, all
steps are such."""
PRIOR_STEPS = 8
"""How many steps with drafts the measured costs weigh as much as."""
NOISE = 0.15
"""What drafts add, as a share of a step, below which it says little: about the error of a step's time on a shared
machine."""
LEAST_SHARE = 0.1
"""Drafts add at least this share of what they should: they are never free."""


def within(found: float, usual: float) -> float:
    """`found`, at most `LARGEST_CHANGE` times what is usual, and at least that part of it."""
    return min(max(found, usual / LARGEST_CHANGE), usual * LARGEST_CHANGE)


@dataclass
class PlainSlowdown:
    """Measured / predicted time of the latest steps without drafts, for one batch size."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=PLAIN_STEPS_KEPT))
    usual: float = 0.0
    """The median of `latest`. It is asked for more often than it changes."""
    fresh_until: float = 0.0
    """As `time.perf_counter` counts."""

    @property
    def is_fresh(self) -> bool:
        """Whether the latest is from not long ago."""
        return time.perf_counter() <= self.fresh_until

    def add(self, ratio: float, seconds: float) -> None:
        """Count a step of so many `seconds`."""
        while len(self.latest) > STALE_STEPS_KEPT and not self.is_fresh:
            self.latest.popleft()
        self.latest.append(ratio)
        self.usual = statistics.median(self.latest)
        self.fresh_until = time.perf_counter() + FRESH_STEPS * seconds


@dataclass
class PlainTimes:
    """What steps without drafts take: what `costs` say, times how much longer the latest of them took."""

    costs: StepCosts
    _slowdowns: dict[int, PlainSlowdown] = field(init=False, default_factory=dict)
    """By number of requests."""
    _settling: int = field(init=False, default=SETTLING_STEPS)
    """Steps without drafts that are not counted any more before those that are."""
    _skipped: int = field(init=False, default=0)
    """Steps left out since one was counted."""

    def add(self, num_requests: int, num_context: int, seconds: float) -> None:
        """Count a step without drafts."""
        if self._settling and self._skipped < MOST_SKIPPED:
            self._settling -= 1
            self._skipped += 1
            return
        self._skipped = 0
        slowdown = self._slowdowns.setdefault(num_requests, PlainSlowdown())
        slowdown.add(seconds / self.costs.target(num_requests, num_context), seconds)

    def other_work(self) -> None:
        """Called after each step with drafts, and once prompts were computed."""
        self._settling = SETTLING_STEPS

    def seconds(self, num_requests: int, num_context: int) -> float | None:
        """What a step without drafts should take; None before any was counted."""
        if not self._slowdowns:
            return None
        return self._nearest(num_requests).usual * self.costs.target(num_requests, num_context)

    def ratio(self, num_requests: int, num_context: int, seconds: float) -> float | None:
        """A step of so many `seconds` that has just ended, over one without drafts; None if none was counted lately."""
        plain = self.seconds(num_requests, num_context)
        return seconds / plain if plain and self._nearest(num_requests).is_fresh else None

    def _nearest(self, num_requests: int) -> PlainSlowdown:
        found = self._slowdowns.get(num_requests)
        return found or self._slowdowns[min(self._slowdowns, key=lambda known: abs(known - num_requests))]


@dataclass
class DraftingOverhead:
    """How much more drafts add to a step than their `StepCosts` say, both as shares of a step without drafts.

    What drafts will add lies on a line through the means of what they added and of what they should have added. Its
    slope is the quotient of these means, but close to 1 where both are no more than noise.
    """

    num_steps: int = 0
    """Steps with drafts so far."""
    _added: float = 0.0
    _expected: float = 0.0

    def added(self, expected: float) -> float:
        """What drafts add to a step that, by the measured costs, should add `expected` of it."""
        slope = (self._added + NOISE) / (self._expected + NOISE)
        return max(self._added + slope * (expected - self._expected), LEAST_SHARE * expected)

    def add(self, found: float, expected: float) -> None:
        """Count a step to which drafts added `found`, and should have added `expected`."""
        found = within(1 + found, 1 + self.added(expected)) - 1
        if not self._expected:
            self._added = self._expected = expected  # what is believed before
        self.num_steps += 1
        weight = max(DRAFTED_WEIGHT, 1 / (self.num_steps + PRIOR_STEPS))
        self._added += weight * (found - self._added)
        self._expected += weight * (expected - self._expected)

    def forget_half(self) -> None:
        """Let the next steps weigh more than those so far."""
        self.num_steps //= 2
