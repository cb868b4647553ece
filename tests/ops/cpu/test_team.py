"""The threads of a step: none passes a barrier before all have reached it, and a late thread has nothing to do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import njit

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.team import ARRIVED, NUM_THREADS, Team, barrier, join_team, new_sync, thread_range

ROUNDS = 300
TRIES = 200
"""Of runs until all threads take part: each has less than a millisecond to arrive, and may need a processor first."""


@njit(**OPTIONS)
def work(sync, wanted, marks, wrong):
    """In each round every thread writes its mark, waits at the barrier, and counts the marks that it does not see."""
    team = join_team(sync, wanted)
    if team.thread_id < 0:
        return team.thread_id, team.num_threads
    for turn in range(ROUNDS):
        marks[team.thread_id * 16] = turn + 1
        barrier(team)
        for other in range(team.num_threads):
            if marks[other * 16] != turn + 1:
                wrong[team.thread_id] += 1
        barrier(team)
    return team.thread_id, team.num_threads


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_no_thread_passes_a_barrier_before_all_have_reached_it(threads: int) -> None:
    work(new_sync(), 1, np.zeros(16, np.int64), np.zeros(1, np.int64))  # compiled before the threads start
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(TRIES):
            sync, marks, wrong = new_sync(), np.zeros(16 * threads, np.int64), np.zeros(threads, np.int64)
            found = [f.result() for f in [pool.submit(work, sync, threads, marks, wrong) for _ in range(threads)]]
            arrived = [thread_id for thread_id, _ in found if thread_id >= 0]
            assert sorted(arrived) == list(range(len(arrived))) and arrived
            assert {num_threads for thread_id, num_threads in found if thread_id >= 0} == {len(arrived)}
            assert not wrong.any()
            if len(arrived) == threads:
                return
    pytest.fail(f"in {TRIES} runs the {threads} threads were never all there")


def test_the_first_thread_stops_waiting_and_late_threads_return() -> None:
    sync, marks, wrong = new_sync(), np.zeros(32, np.int64), np.zeros(2, np.int64)
    assert work(sync, 2, marks, wrong) == (0, 1)
    assert sync[NUM_THREADS] == 1 and sync[ARRIVED] > 2
    assert work(sync, 2, marks, wrong) == (-1, 0)


@pytest.mark.parametrize(("count", "num_threads"), [(40, 2), (7, 3), (1, 4), (0, 2)])
def test_thread_ranges_cover_everything_once(count: int, num_threads: int) -> None:
    parts = [thread_range.py_func(Team(thread_id, num_threads, new_sync()), count) for thread_id in range(num_threads)]
    assert [i for first, last in parts for i in range(first, last)] == list(range(count))
