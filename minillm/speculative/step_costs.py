"""What a step costs on this machine: a forward of the target by its rows, and drafting.

It is measured when an engine starts. With all that an engine does around a forward, steps with drafts and without take
longer, and not equally so; and many requests are not as much work as one with as many rows. So `DraftingOverhead`
compares steps while the engine runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from minillm.batch import Segment
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.speculative.drafter import Drafter

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows to measure."""
PAST = 64
"""Tokens in the cache before the measured ones."""
LONG_PAST = 384
"""The same for the measurement of what attention adds."""
FEW_ROWS, RARELY = 8, 4
"""Forwards of more rows than `FEW_ROWS` are measured in every `RARELY`-th turn."""
ROUNDS, SECONDS = 60, 0.5
"""Everything is measured in turn, at most so many times and, once it has been twice, for so many seconds."""

COMPARED_STEPS = 6
"""After a switch between drafting and not drafting, the steps up to this one are compared with the steps before the
switch."""
SETTLING_STEPS = 2
"""The first steps after a switch, which are not: they find other code and data in the processor's caches."""
RECENT_WEIGHT = 0.1
"""What the latest step weighs in the mean of the steps of its kind since the change."""
NEWEST_WEIGHT = 0.05
"""What the latest comparison weighs in a `DraftingOverhead`."""
LARGEST_CHANGE = 2.0
"""A step counts as at most so many times what is usual, or so small a part of it: it may have been interrupted."""
PRIOR_COMPARISONS = 4
"""How many comparisons the measured costs weigh as much as."""
NOISE = 0.15
"""What drafts add, as a share of a step, below which it says little: about the error of a step's time on a shared
machine."""
LEAST_SHARE = 0.1
"""Drafts add at least this share of what they should: they are never free."""


@dataclass
class StepCosts:
    """Seconds of the parts of a step."""

    forward: dict[int, float]
    """One forward of the target by its number of rows, ascending."""
    context_token: float = 0.0
    """What each token that a request has in the cache adds to a forward, however many rows the request has."""
    first_draft: float = 0.0
    """Drafting one token for one request."""
    next_draft: float = 0.0
    """Each further token; they are drafted one after the other."""
    next_request: float = 0.0
    """Each further request, per token; requests are drafted together."""

    @cached_property
    def _by_rows(self) -> list[float]:
        """One forward by every number of rows up to the largest measured: between those, on a straight line."""
        rows, seconds = list(self.forward), list(self.forward.values())
        return np.interp(range(rows[-1] + 1), rows, seconds).tolist()

    @cached_property
    def _further_row(self) -> float:
        """What each row beyond the largest measured number adds."""
        (before, shorter), (last, longer) = list(self.forward.items())[-2:]
        return (longer - shorter) / (last - before)

    def target(self, num_rows: float, num_context: int) -> float:
        """One forward of `num_rows` rows, on average, over requests with `num_context` tokens in all."""
        whole, last = int(num_rows), len(self._by_rows) - 1
        if whole < last:
            found = self._by_rows[whole]
            found += (num_rows - whole) * (self._by_rows[whole + 1] - found)
        else:
            found = self._by_rows[last] + (num_rows - last) * self._further_row
        return found + self.context_token * num_context

    def draft(self, num_requests: int, num_drafts: float) -> float:
        """Drafting up to `num_drafts` tokens, at least one, for each of `num_requests` requests."""
        one = self.first_draft + self.next_draft * (num_drafts - 1)
        return one + self.next_request * (num_requests - 1) * num_drafts


@dataclass
class DraftingOverhead:
    """How much more drafts cost than their `StepCosts` say: what they add to a step, relative to what they should.

    Other programs and the processor's clock change from second to second how long every step takes. So steps with
    drafts are compared with the steps without drafts just before or behind them:

        added  =  time with drafts / time without - 1          each in multiples of what it should take without drafts

    What drafts will add lies on a line through the means of what they added and of what they should have added. Its
    slope is the quotient of these means, but close to 1 where both are no more than noise.
    """

    num_comparisons: int = 0
    _added: float = 0.0
    _expected: float = 0.0
    _has_drafts: bool = False
    _num_steps: int = 0
    """Steps of the present kind since the latest change."""
    _recent: tuple[float, float] = (1.0, 0.0)
    """Of these steps without the first few: the mean of their times, and of what drafts should add, both in multiples
    of what they should take without drafts. The latest weigh more."""
    _before: tuple[float, float] | None = None
    """`_recent` of the other kind when it changed."""

    def added(self, expected: float) -> float:
        """What drafts add to a step that, by the measured costs, should add `expected` of it."""
        slope = (self._added + NOISE) / (self._expected + NOISE)
        return max(self._added + slope * (expected - self._expected), LEAST_SHARE * expected)

    @property
    def compares(self) -> bool:
        """Whether the next step, if it is of the present kind, is compared with those before the change."""
        return self._before is not None and self._num_steps < COMPARED_STEPS

    def resume(self) -> None:
        """Begin the means anew, after steps that were not counted."""
        self._before, self._num_steps = None, SETTLING_STEPS

    def forget_half(self) -> None:
        """Let the next comparisons weigh more than those so far."""
        self.num_comparisons //= 2

    def add(self, has_drafts: bool, seconds: float, plain: float, extra: float = 0.0) -> None:
        """Count a step. `plain`: seconds that it should take without drafts; `extra`: what its drafts should add."""
        step = seconds / plain, extra / plain
        if has_drafts is not self._has_drafts:
            self._before = self._recent if self._num_steps > SETTLING_STEPS else None
            self._has_drafts, self._num_steps = has_drafts, 0
        self._num_steps += 1
        if self._num_steps <= SETTLING_STEPS:
            return
        weight = max(RECENT_WEIGHT, 1 / (self._num_steps - SETTLING_STEPS))
        usual = self._recent[0] if weight < 1 else step[0]
        counted = _within(step[0], usual), step[1]
        time, expected = self._recent
        self._recent = time + weight * (counted[0] - time), expected + weight * (counted[1] - expected)
        if self._before is not None and self._num_steps <= COMPARED_STEPS:
            drafted, plainly = (step, self._before) if has_drafts else (self._before, step)
            self._compare(drafted[0] / plainly[0], drafted[1])

    def _compare(self, found: float, expected: float) -> None:
        """Count a comparison: a step with drafts took `found` times one without, and drafts should add `expected`."""
        found = _within(found, 1 + self.added(expected))
        if not self._expected:
            self._added = self._expected = expected  # what is believed before
        self.num_comparisons += 1
        weight = max(NEWEST_WEIGHT, 1 / (self.num_comparisons + PRIOR_COMPARISONS))
        self._added += weight * (found - 1 - self._added)
        self._expected += weight * (expected - self._expected)


def _within(found: float, usual: float) -> float:
    """`found`, at most `LARGEST_CHANGE` times what is usual, and at least that part of it."""
    return min(max(found, usual / LARGEST_CHANGE), usual * LARGEST_CHANGE)


def measure(target: ModelRunner, drafter: Drafter, num_blocks: int, max_drafts: int, max_model_len: int) -> StepCosts:
    """Measure on an engine that has no requests yet. It writes to the cache, and gives all blocks back."""
    size = target.block_size
    room = min(max_model_len, num_blocks * size)
    past, long_past = min(PAST, room // 4), min(LONG_PAST, room - 1)
    rows = [n for n in ROWS if past + n <= room and n <= (target.cache.max_rollback or n)]
    num_drafts = min(max_drafts, room - past - 1)
    if past < 1 or len(rows) < 2 or num_drafts < 1:
        return StepCosts({1: 1.0, 2: 1.0})  # requests of so few tokens are not worth measuring
    length = -(-(past + max(rows[-1], num_drafts + 1)) // size)
    first, second = list(range(length)), list(range(length, 2 * length))
    long = list(range(2 * length, 2 * length + -(-(long_past + 1) // size)))
    tables = [first, second] if second[-1] < num_blocks else [first]
    if long[-1] >= num_blocks:
        long, long_past = first, past
    for table, num_tokens in ((long, long_past), *((table, past) for table in tables)):
        _prefill(target, table, num_tokens)
    requests = [_request(target, table, past + 1) for table in tables]
    if drafter.observes_hidden:
        weight = target.model.norm.weight
        drafter.observe_hidden(requests, weight.new_zeros(len(requests), len(weight)))
    runs: dict[str | int, Callable[[], object]] = {n: partial(_forward, target, first, past, n) for n in rows}
    runs["long"] = partial(_forward, target, long, long_past, 1)
    for name, count, k in (("draft", 1, 1), ("drafts", 1, num_drafts), ("requests", len(requests), num_drafts)):
        runs[name] = partial(drafter.propose_for_timing, requests[:count], [k] * count)
    took = _time_in_turn(runs, plain=runs[1])
    for request in requests:
        drafter.request_dropped(request)
    target.cache.free(range(num_blocks))
    drafter.free_blocks(range(num_blocks))
    return StepCosts(
        never_slower_with_fewer_rows({n: took[n] for n in rows}),
        max(0.0, took["long"] - took[1]) / max(1, long_past - past),
        took["draft"],
        max(0.0, took["drafts"] - took["draft"]) / max(1, num_drafts - 1),
        max(0.0, took["requests"] - took["drafts"]) / num_drafts,
    )


def _forward(runner: ModelRunner, block_table: list[int], past: int, num_rows: int) -> None:
    """Run one forward over tokens `past … past + num_rows - 1` of a request, and wait for its logits."""
    runner.run([Segment([0] * num_rows, past, block_table, num_rows)]).sum().item()


def _prefill(runner: ModelRunner, block_table: list[int], num_tokens: int) -> None:
    for start in range(0, num_tokens, PAST):
        _forward(runner, block_table, start, min(PAST, num_tokens - start))


def _request(runner: ModelRunner, block_table: list[int], num_tokens: int) -> Request:
    """A request that decodes: all but its last token are in the cache."""
    token_ids = [i % runner.model.config.vocab_size for i in range(num_tokens)]
    name = f"costs {block_table[0]}"  # drafters keep what they know of a request under its id
    request = Request(name, "", token_ids, num_tokens, SamplingParams(temperature=0), max_tokens=1, seed=0)
    request.block_table, request.num_computed_tokens = block_table, num_tokens - 1
    return request


def _time_in_turn(
    runs: Mapping[str | int, Callable[[], object]], plain: Callable[[], object]
) -> dict[str | int, float]:
    """Seconds of each run: its usual multiple of the run of `plain` just before, times the usual time of that.

    Other programs and the processor's clock change how long everything takes, so only neighbours are compared. And in
    a step, too, the target has run last, and its weights are what the caches hold. Runs of many rows take long and are
    rarely needed, so they are measured in every `RARELY`-th turn only."""
    for run in runs.values():
        run()  # compiles, and fills caches
    often = {key: run for key, run in runs.items() if not isinstance(key, int) or key <= FEW_ROWS}
    multiples: dict[str | int, list[float]] = {key: [] for key in runs}
    plainly: list[float] = []
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn > RARELY and time.perf_counter() - began > SECONDS:
            break
        for key, run in (often if turn % RARELY else runs).items():
            start = time.perf_counter()
            plain()
            middle = time.perf_counter()
            run()
            plainly.append(middle - start)
            multiples[key].append((time.perf_counter() - middle) / (middle - start))
    usual = statistics.median(plainly)
    return {key: usual * statistics.median(found) for key, found in multiples.items()}


def never_slower_with_fewer_rows(seconds: Mapping[int, float]) -> dict[int, float]:
    """The same without noise that shows: a forward takes at most as long as one with more rows. Neighbours that are in
    the wrong order get their mean (isotonic regression by pooling adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for rows in sorted(seconds):
        total, count = seconds[rows], 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, more = pools.pop()
            total, count = total + before, count + more
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return dict(zip(sorted(seconds), means, strict=True))
