"""Lesson 11: run one engine with different numbers of drafts; count what the rounds did, and what their steps cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minillm import LLM, SamplingParams
from minillm.input_processor import Prompt
from minillm.request import Request
from minillm.speculative.draft_policy import DraftPolicy, FixedDrafts
from minillm.speculative.drafter import Draft, Drafter
from minillm.speculative.step_costs import StepCosts
from minillm.teaching.latency import CLOCK
from minillm.trace import DraftProposed, Event, StepFinished, StepRan, StepStarted, TokensCommitted, Trace
from minillm.viz.speculation.position_acceptance import PositionAcceptance


@dataclass(frozen=True)
class StepTime:
    """One step in which every request decodes; seconds of this thread's processor time."""

    requests: int
    drafts: int
    """Drafts that were verified, of all requests."""
    drafting: float
    rest: float
    """The target's forward, the verdicts, Python."""


@dataclass
class StepClock:
    """An event listener that times steps without prompts."""

    steps: list[StepTime] = field(default_factory=list)
    _began: float = 0.0
    _drafted: float = 0.0
    _kinds: set[str] = field(default_factory=set)
    _rows: tuple[int, int] = (0, 0)

    def __call__(self, event: Event) -> None:
        """Read the clock at the event."""
        if isinstance(event, StepStarted):
            self._began = self._drafted = CLOCK()
        elif isinstance(event, DraftProposed):
            self._drafted = CLOCK()
        elif isinstance(event, StepRan):
            self._kinds = {work.kind for work in event.work}
            self._rows = len(event.work), sum(work.num_tokens for work in event.work)
        elif isinstance(event, StepFinished) and "prefill" not in self._kinds:
            requests, rows = self._rows
            times = self._drafted - self._began, CLOCK() - self._drafted
            self.steps.append(StepTime(requests, rows - requests, *times))


@dataclass(frozen=True)
class DraftRun:
    """One run over some prompts."""

    trace: Trace
    outputs: list[list[int]]
    """The new tokens of each prompt."""
    steps: list[StepTime]

    @property
    def acceptance(self) -> PositionAcceptance:
        """The drafts by position. Raises `TraceError` if there were none, or trees."""
        return PositionAcceptance.of(self.trace)

    @property
    def decoded(self) -> list[TokensCommitted]:
        """What each request gained in each step after its prompt's last."""
        found, prefilled = [], set[str]()
        for event in self.trace.events:
            if isinstance(event, StepRan):
                prefilled = {work.request_id for work in event.work if work.kind == "prefill"}
            elif isinstance(event, TokensCommitted) and event.request_id not in prefilled:
                found.append(event)
        return found

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per request and forward of the target, prompts excluded."""
        return sum(len(event.token_ids) for event in self.decoded) / len(self.decoded)

    def rounds_with(self, num_drafts: int) -> list[TokensCommitted]:
        """The rounds after the prompt that had exactly so many drafts; the end of a request cuts the others short."""
        return [event for event in self.decoded if event.num_drafts == num_drafts]

    @property
    def share_with_drafts(self) -> float:
        """Of a request's steps after its prompt, the share with at least one draft."""
        return sum(event.num_drafts > 0 for event in self.decoded) / len(self.decoded)

    @property
    def seconds(self) -> float:
        """Processor time of all steps without prompts."""
        return sum(step.drafting + step.rest for step in self.steps)


def run(llm: LLM, prompts: Sequence[Prompt], policy: DraftPolicy, *, batch: int = 8, new_tokens: int = 48) -> DraftRun:
    """Complete the prompts greedily, `batch` at a time, with as many drafts as `policy` says."""
    engine, clock, outputs = llm.engine, StepClock(), []
    before, engine.scheduler.draft_policy = engine.scheduler.draft_policy, policy
    engine.listeners.append(clock)
    try:
        with llm.trace() as trace:
            for first in range(0, len(prompts), batch):
                some = prompts[first : first + batch]
                params = [
                    SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, seed=first + i)
                    for i in range(len(some))
                ]
                outputs += [out.outputs[0].token_ids for out in llm.generate(some, params, use_tqdm=False)]
    finally:
        engine.listeners.remove(clock)
        engine.scheduler.draft_policy = before
    return DraftRun(trace, outputs, clock.steps)


class ConstantDrafter(Drafter):
    """Always drafts token 0: for runs in which the verdicts are drawn from given rates (`synthetic`)."""

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        return [Draft([0] * most) for most in num_drafts]


@dataclass(frozen=True)
class Prices:
    """Seconds of the parts of a step with `batch` requests."""

    batch: int
    gamma: int
    plain: float
    """A step without drafts."""
    drafting: float
    """Drafting γ tokens for every request."""
    verifying: float
    """The rest of a step with γ drafts for every request."""

    @property
    def c(self) -> float:
        """Drafting one token, in plain steps."""
        return self.drafting / self.gamma / self.plain

    @property
    def row(self) -> float:
        """What each position of the drafts adds to a step when verified, in plain steps; 0 if nothing."""
        return max(0.0, (self.verifying / self.plain - 1) / self.gamma)


def prices(llm: LLM, prompts: Sequence[str], batch: int, gamma: int, new_tokens: int = 16) -> Prices:
    """Measure them: medians of the steps in which all requests have no draft, or γ drafts each."""
    times: dict[int, list[StepTime]] = {0: [], gamma: []}
    for _ in range(2):
        for count, found in times.items():
            steps = run(llm, prompts[:batch], FixedDrafts(count), batch=batch, new_tokens=new_tokens).steps
            found += [step for step in steps[1:] if (step.requests, step.drafts) == (batch, count * batch)]
    drafting = statistics.median(step.drafting for step in times[gamma])
    verifying = statistics.median(step.rest for step in times[gamma])
    plain = statistics.median(step.drafting + step.rest for step in times[0])
    return Prices(batch, gamma, plain, drafting, max(verifying, plain))


def costs_of(one: Sequence[Prices], many: Sequence[Prices], has_model: bool = True) -> StepCosts:
    """The same prices for `AdaptiveDrafts`: of one request and of several, each with one draft and with more.

    The first draft of a round takes longer than the others: the draft model first reads the tokens that the target
    added. Without a draft model, drafting costs nothing.
    """
    one, many = _at_one_speed(one), _at_one_speed(many)
    rows: dict[int, float] = {}
    for price in (*one, *many):
        rows[price.batch] = price.plain
        rows[price.batch * (1 + price.gamma)] = price.verifying
    forward, longest = dict(sorted(rows.items())), 0.0
    for count, seconds in forward.items():
        forward[count] = longest = max(longest, seconds)
    if not has_model:
        return StepCosts(forward)
    first, all_of_one, all_of_many = one[0], one[-1], many[-1]
    each = max(0.0, (all_of_one.drafting - first.drafting) / (all_of_one.gamma - 1))
    drafts_of_others = all_of_many.gamma * (all_of_many.batch - 1)
    more = max(0.0, (all_of_many.drafting - all_of_one.drafting) / drafts_of_others)
    return StepCosts(forward, 0.0, first.drafting, each, more)


def _at_one_speed(measured: Sequence[Prices]) -> list[Prices]:
    """Prices of one batch with the same plain step, the fastest: in plain steps they cost what they did. The machine
    may have been faster or slower while the others were timed."""
    plain = min(price.plain for price in measured)
    return [
        replace(
            price,
            plain=plain,
            drafting=price.drafting * plain / price.plain,
            verifying=price.verifying * plain / price.plain,
        )
        for price in measured
    ]


def predicted_speed_up(found: DraftRun, costs: StepCosts, batch: int, new_tokens: int) -> float:
    """The seconds of plain steps over those of the steps that ran, by `costs` and by counts alone.

    `found` ran `batch` requests at a time, with `new_tokens` each; plain steps need one per token after the first.
    """
    plain = len(found.outputs) / batch * (new_tokens - 1) * costs.target(batch, 0)
    cost = 0.0
    for step in found.steps:
        each = -(-step.drafts // step.requests)
        cost += costs.draft(step.requests, each) + costs.target(step.requests + step.drafts, 0)
    return plain / cost


def speedups(survival: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Predicted speed-up with the m most probable drafts, for m = 0, 1, …"""
    chances = sorted((p for chances in survival for p in chances), reverse=True)
    tokens = float(len(survival))
    found = [1.0]
    for m, p in enumerate(chances, start=1):
        tokens += p
        found.append(tokens / len(survival) * seconds[0] / seconds[m])
    return found
