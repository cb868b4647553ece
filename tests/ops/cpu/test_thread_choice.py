"""The number of threads that is chosen after recent steps, with made-up times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from minillm.ops.cpu.thread_choice import REMEMBERED_STEPS, TRIAL_STEPS, RecentSteps, ThreadChoice

STEPS = 1000


def choose(steps: Sequence[tuple[int, float]], limit: int) -> int:
    """The choice after steps of (threads, seconds)."""
    recent = RecentSteps()
    for threads, seconds in steps:
        recent.add(threads, seconds)
    return recent.choose(limit)


Times = Callable[[int, int], float]
"""(step, threads) → seconds."""


def quiet(step: int, threads: int) -> float:
    return 1.0 / threads**0.8


def crowded(step: int, threads: int) -> float:
    """Measured on two busy processors: 1, 2, 4 and 8 threads gave 363, 85, 49 and 27 tokens/s."""
    return {1: 1.0, 2: 4.3, 4: 7.4, 8: 13.4}[threads]


def crowded_by_chance(step: int, threads: int) -> float:
    """Two threads are fast when both have a processor, and slow when one has to wait for a processor."""
    chance = random.Random(f"{step} {threads}").random()
    return 1.0 + 3 * (chance < 0.1) if threads == 1 else 0.6 + 20 * (chance < 0.4)


def crowded_later(step: int, threads: int) -> float:
    return quiet(step, threads) if step < STEPS // 2 else crowded(step, threads)


def crowded_at_first(step: int, threads: int) -> float:
    return crowded(step, threads) if step < STEPS // 2 else quiet(step, threads)


def simulate(times: Times, limit: int) -> list[tuple[int, float]]:
    """Run `STEPS` steps; returns (threads, seconds) of each."""
    choice, steps = ThreadChoice(), []
    for step in range(STEPS):
        threads = choice.threads("decode", limit)
        steps.append((threads, times(step, threads)))
        choice.record("decode", *steps[-1])
    return steps


@pytest.mark.parametrize(
    ("times", "limit"),
    [*itertools.product([quiet, crowded, crowded_later, crowded_at_first], [1, 2, 4, 8]), (crowded_by_chance, 2)],
)
def test_no_limit_loses_much_against_the_best_number_of_threads(times: Times, limit: int) -> None:
    taken = sum(seconds for _, seconds in simulate(times, limit))
    levels = [level for level in (1, 2, 4, 8) if level <= limit]
    halves = range(STEPS // 2), range(STEPS // 2, STEPS)
    best = sum(min(sum(times(step, n) for step in half) for n in levels) for half in halves)
    assert best / taken > 0.7


def test_with_processors_to_itself_a_step_keeps_all_threads() -> None:
    threads = [n for n, _ in simulate(quiet, 8)]
    assert threads.count(8) > 0.95 * STEPS and set(threads) == {8, 4}


def test_trying_fewer_threads_costs_one_step() -> None:
    assert [n for n, _ in simulate(quiet, 2)[:100]].count(1) == 1


def test_a_trial_that_is_much_slower_ends_after_one_step() -> None:
    recent = [(1, 1.0)] * TRIAL_STEPS
    assert choose(recent, 2) == 2
    assert choose([*recent, (2, 1.2)], 2) == 2
    assert choose([*recent, (2, 10.0)], 2) == 1


def test_a_number_of_threads_that_was_slow_long_ago_is_tried_again() -> None:
    recent = [(2, 10.0), *[(1, 1.0)] * (REMEMBERED_STEPS - 1)]
    assert choose(recent, 2) == 1
    assert choose([*recent, (1, 1.0)], 2) == 2


def test_one_slow_step_among_many_changes_nothing() -> None:
    recent = [*[(1, 1.0)] * TRIAL_STEPS, *[(2, 0.6)] * 20, (2, 2.0)]
    assert choose(recent, 2) == 2


def test_a_new_kind_of_step_begins_with_the_threads_of_the_previous_step() -> None:
    choice = ThreadChoice()
    assert choice.threads("prefill", 4) == 4
    choice.record("prefill", 2, 1.0)
    assert choice.threads("decode", 4) == 2
    assert choice.threads("decode", 1) == 1


def test_the_limit_may_change_between_steps() -> None:
    recent = [(8, 1.0)] * 50
    assert choose(recent, 6) == 6
    assert choose([*recent, *[(6, 0.5)] * TRIAL_STEPS], 6) == 3
