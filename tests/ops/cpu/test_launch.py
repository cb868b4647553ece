"""Calls of compiled entry points: what cannot be cached runs, and so do steps where numba has no threads."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import get_num_threads, prange, set_num_threads
from numba.core.caching import IndexDataCacheFile

from minillm.ops.cpu import compiled, launch
from minillm.ops.cpu.compiled import entry_point
from minillm.ops.cpu.launch import NUMBA_NUM_THREADS, Launcher
from minillm.ops.cpu.team import barrier, call_at, join_team

THREADS = [1, pytest.param(2, marks=pytest.mark.skipif(NUMBA_NUM_THREADS < 2, reason="numba has one thread here"))]


def count_threads(sync, threads, out):
    """Write 1 and the number of threads."""
    team = join_team(sync, threads)
    if team.thread_id < 0:
        return
    barrier(team)
    if team.thread_id == 0:
        out[0], out[1] = 1, team.num_threads


def launcher() -> Launcher:
    """Of entry points that are not compiled yet."""
    run = entry_point()(count_threads)

    @entry_point(parallel=True)
    def run_together(address, sync, threads, out):
        for _ in prange(threads):
            call_at(address, (sync, threads, out))

    return Launcher(run, run_together)


@pytest.mark.parametrize("threads", THREADS)
def test_a_step_that_cannot_be_saved_is_compiled_once_and_runs(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, say."""
    tried = []

    def save(self: Any, name: str, data: object) -> None:
        tried.append(name)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", save)
    made = launcher()
    for _ in range(3):
        out = np.zeros(2, np.int64)
        assert made.call(threads, out) > 0
        assert out[0] == 1 and 1 <= out[1] <= threads
    assert len(tried) == threads and not list(tmp_path.rglob("*.nbc"))


def test_an_error_that_comes_again_is_raised() -> None:
    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        Launcher(broken, broken).call(1)


@pytest.mark.skipif(NUMBA_NUM_THREADS < 2, reason="numba has one thread here")
def test_the_number_of_threads_of_numbas_other_users_stays() -> None:
    made, out = launcher(), np.zeros(2, np.int64)
    before = get_num_threads()
    set_num_threads(1)
    try:
        made.call(2, out)
        assert out[0] == 1 and get_num_threads() == 1
    finally:
        set_num_threads(before)


def test_where_numba_cannot_start_threads_steps_run_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`NUMBA_THREADING_LAYER` asks for a library that is not installed."""

    def missing() -> int:
        raise ValueError("No threading layer could be loaded.")

    monkeypatch.setattr(launch, "get_num_threads", missing)
    monkeypatch.setattr(Launcher, "threaded_process", None)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr(launch, "NUMBA_NUM_THREADS", 2)
    made, out = launcher(), np.zeros(2, np.int64)
    made.usable_processors = 2
    assert made.threads("any") == 2
    with pytest.warns(RuntimeWarning, match="steps run on one thread: No threading layer"):
        made.call(2, out)
    assert out.tolist() == [1, 1] and made.threads("any") == 1
    made.call(2, out)  # without another warning
