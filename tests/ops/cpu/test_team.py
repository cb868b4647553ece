"""Threads that meet: nobody goes on before all have come, and who comes too late goes away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import njit

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.team import DOOR, SIZE, join, meet, new_sync, share

ROUNDS = 300


@njit(**OPTIONS)
def work(sync, wanted, marks, wrong):
    """Each round every thread writes its mark, meets the others, and counts the marks it does not see."""
    number, size = join(sync, wanted)
    if number < 0:
        return number, size
    for turn in range(ROUNDS):
        marks[number * 16] = turn + 1
        meet(sync, size)
        for other in range(size):
            if marks[other * 16] != turn + 1:
                wrong[number] += 1
        meet(sync, size)
    return number, size


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_nobody_goes_on_before_all_have_come(threads: int) -> None:
    sync, marks, wrong = new_sync(), np.zeros(16 * threads, np.int64), np.zeros(threads, np.int64)
    work(new_sync(), 1, marks.copy(), wrong.copy())  # compiled before the threads start
    with ThreadPoolExecutor(threads) as pool:
        found = [f.result() for f in [pool.submit(work, sync, threads, marks, wrong) for _ in range(threads)]]
    came = [number for number, _ in found if number >= 0]
    assert sorted(came) == list(range(len(came))) and came
    assert {size for number, size in found if number >= 0} == {len(came)}
    assert not wrong.any()


def test_the_first_does_not_wait_for_ever_and_latecomers_go_away() -> None:
    sync, marks, wrong = new_sync(), np.zeros(32, np.int64), np.zeros(2, np.int64)
    assert work(sync, 2, marks, wrong) == (0, 1)
    assert sync[SIZE] == 1 and sync[DOOR] > 2
    assert work(sync, 2, marks, wrong) == (-1, 0)


@pytest.mark.parametrize(("count", "size"), [(40, 2), (7, 3), (1, 4), (0, 2)])
def test_shares_cover_everything_once(count: int, size: int) -> None:
    parts = [share(count, number, size) for number in range(size)]
    assert [i for first, last in parts for i in range(first, last)] == list(range(count))
