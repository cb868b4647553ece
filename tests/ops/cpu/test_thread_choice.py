"""The number of threads that is chosen after recent steps, with made-up times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from minillm.ops.cpu.thread_choice import FIRST_REST, LONGEST_REST, TRIAL_STEPS, RecentSteps, ThreadChoice

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


def interrupted(at: int) -> Times:
    return lambda step, threads: quiet(step, threads) + 20 * (step == at)


def busy(step: int, threads: int) -> float:
    """Two threads often wait for a processor."""
    return 1.0 if threads == 1 else 0.6 + 10 * (random.Random(step).random() < 0.2)


def steps_with(threads: int, steps: Sequence[tuple[int, float]]) -> list[int]:
    return [step for step, (used, _) in enumerate(steps) if used == threads]


def test_a_trial_of_fewer_threads_takes_one_step_and_is_rare() -> None:
    tried = steps_with(1, simulate(quiet, 2))
    assert [later - earlier - 1 for earlier, later in itertools.pairwise(tried)] == [LONGEST_REST] * 3


def test_each_lost_trial_doubles_the_time_until_the_next() -> None:
    steps = simulate(lambda step, threads: (quiet if step < 40 else crowded)(step, threads), 2)
    tried = [step for step in steps_with(2, steps) if step >= 40]
    rests = [rest for earlier, later in itertools.pairwise(tried) if (rest := later - earlier - 1)]
    assert rests == [FIRST_REST, 16, 32, 64, 128, LONGEST_REST, LONGEST_REST]


def test_threads_that_have_to_wake_up_are_not_taken_for_slow() -> None:
    used = [2]

    def waking(step: int, threads: int) -> float:
        slow = threads > used[-1]
        used.append(threads)
        return (5 if slow else 0) + (busy if step < 300 else quiet)(step, threads)

    assert len(steps_with(2, simulate(waking, 2)[600:])) > 350


def test_after_one_long_wait_all_threads_are_used_again_soon() -> None:
    without, once = (len(steps_with(1, simulate(times, 2))) for times in (quiet, interrupted(500)))
    assert once - without <= FIRST_REST + 5


def test_so_they_are_on_a_machine_that_was_busy_before() -> None:
    steps = simulate(lambda step, threads: (busy if step < 300 else interrupted(900))(step, threads), 2)
    assert len([step for step in steps_with(1, steps) if step > 900]) <= FIRST_REST + 5


def test_on_a_busy_machine_more_threads_are_tried_ever_less_often() -> None:
    assert len(steps_with(2, simulate(busy, 2)[500:])) < 0.1 * 500


def test_a_trial_that_is_much_slower_ends_after_its_first_counted_step() -> None:
    recent = [(1, 1.0)] * TRIAL_STEPS
    assert choose(recent, 2) == 2
    assert choose([*recent, (2, 9.0)], 2) == 2
    assert choose([*recent, (2, 9.0), (2, 1.2)], 2) == 2
    assert choose([*recent, (2, 0.5), (2, 10.0)], 2) == 1


def test_a_number_of_threads_that_was_slow_is_tried_again() -> None:
    recent = [(2, 10.0), (2, 10.0), *[(1, 1.0)] * (FIRST_REST - 1)]
    assert choose(recent, 2) == 1
    assert choose([*recent, (1, 1.0)], 2) == 2


def test_one_slow_step_among_many_changes_nothing() -> None:
    recent = [*[(1, 1.0)] * TRIAL_STEPS, *[(2, 0.6)] * (FIRST_REST - 2), (2, 2.0)]
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
