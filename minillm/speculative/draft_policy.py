"""How many drafts each request gets in a step.

`FixedDrafts` gives every request the same number. `AdaptiveDrafts` gives as many as pay: a draft is worth the
probability that it and all drafts before it are accepted, and costs what another row of the forward costs. So it drafts
a lot where text repeats, a little where the draft model is often wrong, and not at all where verifying costs more than
it saves: a small model in INT8 on a CPU, or a large batch. vLLM calls this adaptive verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from minillm.request import Request
from minillm.speculative.step_costs import StepCosts

MIN_GAIN = 1.02
"""Speed-up, as predicted, below which nothing is drafted: a prediction is not better than this."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Steps without any drafts before a request tries again; doubled each time that does not pay."""

PRIOR_WEIGHT = 4.0
"""How many of a request's own drafts at a position weigh as much as what is known from all requests."""


@dataclass(frozen=True)
class DraftPlan:
    """The decision of one step."""

    num_drafts: list[int]
    """Most drafts of each request."""
    survival: list[list[float]] = field(default_factory=list)
    """Per request, by position: the estimated probability that this draft and all before it are accepted."""
    speedups: list[float] = field(default_factory=list)
    """`speedups[m]`: predicted tokens per second with the m most promising drafts of all requests, as a multiple of
    plain decoding. Empty: nothing was predicted."""


class DraftPolicy(Protocol):
    """Decides the number of drafts."""

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """Decide for the decoding `requests`. `num_rows`: tokens of the step without any drafts, prefills included."""

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Called with each verdict on at least one draft."""

    def ran(self, num_rows: int, num_context: int, seconds: float) -> None:
        """Called after a forward of `num_rows` rows over requests with `num_context` tokens in all."""


@dataclass(frozen=True)
class FixedDrafts:
    """The same number for every request."""

    num_drafts: int

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`."""
        return DraftPlan([self.num_drafts] * len(requests))

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""

    def ran(self, num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.ran`."""


@dataclass
class Acceptance:
    """How often drafts at each position were accepted, given that all before them were; older rounds count less."""

    accepted: list[float]
    judged: list[float]

    @classmethod
    def prior(cls, num_positions: int, rate: float, weight: float) -> Acceptance:
        """What is believed before anything was judged: `weight` drafts at each position, of which `rate` accepted."""
        return cls([rate * weight] * num_positions, [weight] * num_positions)

    def add(self, num_drafts: int, num_accepted: int, memory: float) -> None:
        """Count one round. `memory`: the weight of earlier rounds, below 1."""
        for i in range(min(num_drafts, num_accepted + 1)):
            self.judged[i] = memory * self.judged[i] + 1
            self.accepted[i] = memory * self.accepted[i] + (i < num_accepted)


@dataclass
class AdaptiveDrafts:
    """As many drafts as raise the predicted number of tokens per second.

        tokens  =  requests + the sum of the chosen drafts' survival probabilities
        seconds =  drafting + one forward with a row for each request and each chosen draft

    Survival is estimated per request and position from its own verdicts and, while there are few, from those of all
    requests. Costs are measured (`StepCosts`). A request that samples with a seed of its own gets all drafts,
    because the number of drafts changes which random numbers choose a token, and its text should not depend on the
    speed of the machine.
    """

    max_drafts: int
    costs: StepCosts
    drafts_trees: bool = False
    """Whether drafts come as trees: then all of them or none, worth the usual number of accepted ones."""
    memory: float = 0.97
    """Weight of a request's earlier rounds against the next; of all requests together the square root of it."""
    _all: Acceptance = field(init=False)
    _own: WeakKeyDictionary[Request, Acceptance] = field(init=False, default_factory=WeakKeyDictionary)
    _idle_steps: int = field(init=False, default=0)
    """Steps since something was drafted."""
    _pause: int = field(init=False, default=FIRST_PAUSE)

    def __post_init__(self) -> None:
        self._all = Acceptance.prior(self.max_drafts, rate=0.7, weight=4)

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`."""
        if not requests:
            return DraftPlan([])
        if 0 < self._idle_steps < self._pause and not any(map(_is_seeded, requests)):
            self._idle_steps += 1
            return DraftPlan([0] * len(requests))
        survival = [self.survival(request) for request in requests]
        order = self._by_survival(survival)
        speedups = self._speedups(requests, survival, order, num_rows)
        best = max(range(len(speedups)), key=speedups.__getitem__)
        if speedups[best] < MIN_GAIN:
            best = 0
        counts = [0] * len(requests)
        for i, j in order[:best]:
            counts[i] = j + 1
        counts = self._try_again(survival, counts)
        counts = [self.max_drafts if _is_seeded(r) else n for r, n in zip(requests, counts, strict=True)]
        return DraftPlan(counts, survival, speedups)

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = Acceptance.prior(self.max_drafts, 0, 0)
        if self.drafts_trees:  # a node's place in the tree says nothing; its share of the usual number does
            share = num_accepted / num_drafts
            for seen, memory in ((own, self.memory), (self._all, self.memory**0.5)):
                seen.judged[0] = memory * seen.judged[0] + 1
                seen.accepted[0] = memory * seen.accepted[0] + share
            return
        own.add(num_drafts, num_accepted, self.memory)
        self._all.add(num_drafts, num_accepted, self.memory**0.5)

    def ran(self, num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.ran`."""
        self.costs.saw(num_rows, num_context, seconds)

    def survival(self, request: Request) -> list[float]:
        """The estimated probability, by position, that a draft of `request` and all before it are accepted."""
        own, every = self._own.get(request), self._all
        chances, product = [], 1.0
        for i in range(self.max_drafts):
            rate = every.accepted[i] / every.judged[i]
            if own is not None:
                rate = (PRIOR_WEIGHT * rate + own.accepted[i]) / (PRIOR_WEIGHT + own.judged[i])
            if self.drafts_trees:
                return [rate] * self.max_drafts
            product *= rate
            chances.append(product)
        return chances

    def _by_survival(self, survival: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
        """All (request, position), the most promising first; a request's own stay in order."""
        slots = [(i, j) for i, of_request in enumerate(survival) for j in range(len(of_request))]
        return sorted(slots, key=lambda slot: -survival[slot[0]][slot[1]])

    def _speedups(
        self,
        requests: Sequence[Request],
        survival: Sequence[Sequence[float]],
        order: Sequence[tuple[int, int]],
        num_rows: int,
    ) -> list[float]:
        """See `DraftPlan.speedups`."""
        context = sum(request.num_tokens for request in requests)
        plain = self.costs.target(num_rows, context)
        tokens, longest, drafting = float(len(requests)), 0, 0
        found = [1.0]
        for m, (i, j) in enumerate(order, start=1):
            tokens += survival[i][j]
            longest, drafting = max(longest, j + 1), drafting + (j == 0)
            seconds = self.costs.draft(drafting, longest) + self.costs.target(num_rows + m, context)
            whole = not self.drafts_trees or j + 1 == self.max_drafts
            found.append(tokens / len(requests) * plain / seconds if whole else 0.0)
        return found

    def _try_again(self, survival: Sequence[Sequence[float]], counts: list[int]) -> list[int]:
        """After a pause without drafts, give one request some, to see whether they would be accepted by now."""
        if any(counts):
            self._idle_steps, self._pause = 0, FIRST_PAUSE
            return counts
        if self._idle_steps >= self._pause:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._idle_steps = 1
            likeliest = max(range(len(counts)), key=lambda i: survival[i][0])
            counts[likeliest] = self.max_drafts if self.drafts_trees else 1
            return counts
        self._idle_steps += 1
        return counts


def _is_seeded(request: Request) -> bool:
    return request.params.seed is not None and not request.takes_argmax
