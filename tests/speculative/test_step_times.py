"""How long steps turn out to take, without drafts and with them."""

from __future__ import annotations

import pytest

from minillm.speculative import step_times
from minillm.speculative.step_costs import StepCosts
from minillm.speculative.step_times import (
    FRESH_STEPS,
    MOST_SKIPPED,
    SETTLING_STEPS,
    STALE_STEPS_KEPT,
    DraftingOverhead,
    PlainTimes,
)

COSTS = StepCosts({1: 1.0, 64: 64.0}, context_token=0.1)


def told(times: PlainTimes, num_requests: int, num_context: int, seconds: float, steps: int = 60) -> None:
    for _ in range(steps):
        times.add(num_requests, num_context, seconds)


def test_nothing_is_known_before_a_step_was_counted() -> None:
    times = PlainTimes(COSTS)
    told(times, 1, 0, 3.0, SETTLING_STEPS)
    assert times.seconds(1, 0) is None
    told(times, 1, 0, 3.0, 1)
    assert times.seconds(1, 0) == 3.0


def test_steps_take_as_much_longer_as_the_latest_of_so_many_requests() -> None:
    times = PlainTimes(COSTS)
    told(times, 1, 10, 3.0)  # by the costs: 2.0
    told(times, 8, 10, 4.5)  # 9.0
    assert times.seconds(1, 10) == pytest.approx(3.0) and times.seconds(1, 30) == pytest.approx(6.0)
    assert times.seconds(8, 10) == pytest.approx(4.5) and times.seconds(7, 10) == pytest.approx(4.0)
    assert times.seconds(2, 10) == pytest.approx(4.5)  # as of one
    told(times, 1, 10, 1.5, 10)  # the machine has become faster
    assert times.seconds(1, 10) == pytest.approx(1.5, rel=0.01)


def test_the_first_steps_behind_drafts_are_not_counted() -> None:
    times = PlainTimes(COSTS)
    told(times, 1, 0, 1.0)
    for _ in range(20):
        times.other_work()
        told(times, 1, 0, 1.9, SETTLING_STEPS)
        told(times, 1, 0, 1.0, 4)
    assert times.seconds(1, 0) == pytest.approx(1.0)


def test_steps_are_counted_even_if_all_are_soon_behind_a_prompt() -> None:
    times = PlainTimes(COSTS)
    for _ in range(MOST_SKIPPED + 1):
        times.other_work()
        told(times, 1, 0, 1.9, 1)
    assert times.seconds(1, 0) == pytest.approx(1.9)
    times.other_work()
    told(times, 1, 0, 9.0, SETTLING_STEPS)
    assert times.seconds(1, 0) == pytest.approx(1.9)


def test_one_step_without_drafts_that_was_interrupted_changes_little() -> None:
    times = PlainTimes(COSTS)
    told(times, 1, 0, 1.0)
    told(times, 1, 0, 1e6, 1)
    assert times.seconds(1, 0) <= 1.1


def test_a_slow_one_among_the_first_steps_without_drafts_changes_nothing() -> None:
    times = PlainTimes(COSTS)
    for seconds in (*[9.0] * SETTLING_STEPS, 1.0, 2.0, 1.0, 1.0):
        told(times, 1, 0, seconds, 1)
    assert times.seconds(1, 0) == 1.0


def test_what_was_measured_long_ago_is_believed_only_until_the_next_measurements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: now)
    times = PlainTimes(COSTS)
    assert times.ratio(1, 0, 6.0) is None
    told(times, 1, 0, 2.0)
    now = 2.0 * FRESH_STEPS
    assert times.ratio(1, 0, 6.0) == pytest.approx(3.0)
    now += 1.0
    assert times.ratio(1, 0, 6.0) is None and times.seconds(1, 0) == pytest.approx(2.0)
    told(times, 1, 0, 1.0, STALE_STEPS_KEPT + 1)  # the machine has become faster
    assert times.ratio(1, 0, 6.0) == pytest.approx(6.0)


def test_what_drafts_add_is_learned() -> None:
    overhead = DraftingOverhead()
    assert overhead.added(0.5) == 0.5
    for i in range(500):
        expected = 0.4 + 0.1 * (i % 5)
        overhead.add(0.1 + 1.5 * expected, expected)
    assert [overhead.added(x) for x in (0.4, 0.8)] == pytest.approx([0.7, 1.3], rel=0.05)


def test_the_measured_costs_are_believed_at_first() -> None:
    overhead = DraftingOverhead()
    overhead.add(0.9, 0.5)
    assert 0.5 < overhead.added(0.5) < 0.6
    for _ in range(100):
        overhead.add(0.9, 0.5)
    assert overhead.added(0.5) == pytest.approx(0.9, abs=0.06)


def test_after_forgetting_the_next_steps_weigh_more() -> None:
    changes = []
    for forgets in (False, True):
        overhead = DraftingOverhead()
        for _ in range(40):
            overhead.add(0.5, 0.5)
        if forgets:
            overhead.forget_half()
        for _ in range(6):
            overhead.add(1.0, 0.5)
        changes.append(overhead.added(0.5) - 0.5)
    assert changes[1] > 1.4 * changes[0] > 0


def test_one_step_with_drafts_that_was_interrupted_changes_little() -> None:
    overhead = DraftingOverhead()
    for _ in range(40):
        overhead.add(0.5, 0.5)
    overhead.add(1e6, 0.5)
    assert 0.5 < overhead.added(0.5) < 0.55


def test_drafts_that_should_cost_nothing_say_nothing_about_a_ratio() -> None:
    overhead = DraftingOverhead()
    for _ in range(200):
        overhead.add(0.0, 0.0)
    assert overhead.added(0.3) == pytest.approx(0.3)
