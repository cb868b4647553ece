"""Things timed in turn: the order, the warm-up, and ratios of neighbours."""

from __future__ import annotations

import itertools

from minillm.bench import timing
from minillm.bench.timing import Spread, medians, ratio, time_in_turn


def test_runs_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(timing, "clock", lambda: float(next(ticks)))
    order = []
    seconds = time_in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert "".join(order) == "abababab"
    assert seconds == {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}


def test_a_slow_round_that_hits_both_does_not_change_the_ratio():
    assert ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.0)


def test_spread_and_medians_of_uneven_rounds():
    assert str(Spread.of([1.0, 3.0, 2.0])) == "2.0 (1.0 to 3.0)"
    assert medians({8: [1.0, 9.0, 2.0]}) == {8: 2.0}


def test_work_on_several_threads_is_measured_in_wall_time(monkeypatch):
    """The CPU time of one thread would leave out what the others do."""
    monkeypatch.setattr(timing.time, "perf_counter", itertools.count(0, 5).__next__)
    assert time_in_turn({"a": lambda: None}, rounds=2, num_threads=2) == {"a": [5, 5]}
