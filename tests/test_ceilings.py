"""Measured ceilings: the accounting, not the speed of this machine."""

from __future__ import annotations

import pytest
import torch

from minillm import ceilings
from minillm.errors import ConfigError


def test_rate_is_work_over_median_time():
    ceiling = ceilings._ceiling("copy bandwidth", "cpu", "B/s", 100, [4.0, 1.0, 2.0])
    assert (ceiling.median, ceiling.low, ceiling.high, ceiling.repeats) == (50, 25, 100, 3)


def test_warm_up_runs_are_not_counted():
    runs = []
    seconds = ceilings._time(lambda: runs.append(1), "cpu", repeats=5)
    assert (len(runs), len(seconds)) == (7, 5)


def test_copy_counts_bytes_read_and_bytes_written(monkeypatch):
    monkeypatch.setattr(ceilings, "CPU_COPY_BYTES", 4096)
    monkeypatch.setattr(ceilings, "_time", lambda run, device, repeats: [1.0] * repeats)
    assert ceilings.copy_bandwidth("cpu").median == 2 * 4096


def test_product_counts_multiplications_and_additions(monkeypatch):
    monkeypatch.setattr(ceilings, "CPU_MATMUL_SIZE", 10)
    monkeypatch.setattr(ceilings, "_time", lambda run, device, repeats: [1.0] * repeats)
    assert ceilings.matmul_rate("cpu", torch.float32).median == 2 * 10**3


def test_both_ceilings_of_a_cpu_are_measured(monkeypatch):
    monkeypatch.setattr(ceilings, "CPU_COPY_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "CPU_MATMUL_SIZE", 64)
    monkeypatch.setattr(ceilings, "gpu", lambda: None)
    found = ceilings.measure(repeats=5)
    assert [(c.device, c.unit) for c in found] == [("cpu", "B/s"), ("cpu", "FLOP/s")]
    assert all(0 < c.low <= c.median <= c.high for c in found)


def test_median_of_few_runs_is_refused():
    with pytest.raises(ConfigError, match="repeats=4"):
        ceilings.measure(repeats=4)


def test_one_thread_is_timed_by_its_cpu_time_and_everything_else_by_the_clock_on_the_wall(monkeypatch):
    monkeypatch.setattr(ceilings.os, "name", "posix")
    for device, threads, clock in (("cpu", 1, "thread_time"), ("cpu", 2, "perf_counter"), ("cuda", 1, "perf_counter")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert ceilings._clock(device) is getattr(ceilings.time, clock)


def test_copied_buffer_can_be_made_smaller(monkeypatch):
    monkeypatch.setattr(ceilings, "_time", lambda run, device, repeats: [1.0] * repeats)
    assert ceilings.copy_bandwidth("cpu", num_bytes=8192).median == 2 * 8192
