"""Measured limits: the accounting, not the speed of this machine."""

from __future__ import annotations

import sys

import pytest
import torch

from minillm.doctor import machine_limits
from minillm.errors import ConfigError
from minillm.hardware import Gpu
from minillm.ops.cpu import tile_rate
from minillm.ops.linear import can_pack


def test_rate_is_work_over_median_time():
    limit = machine_limits._limit("copy bandwidth", "cpu", "B/s", 100, [4.0, 1.0, 2.0])
    assert (limit.median, limit.low, limit.high, limit.repeats) == (50, 25, 100, 3)


def test_warm_up_runs_are_not_counted():
    runs = []
    seconds = machine_limits._time(lambda: runs.append(1), "cpu", repeats=5)
    assert (len(runs), len(seconds)) == (7, 5)


def test_copy_counts_bytes_read_and_bytes_written(monkeypatch):
    monkeypatch.setattr(machine_limits, "CPU_COPY_BYTES", 4096)
    monkeypatch.setattr(machine_limits, "_time", lambda run, device, repeats: [1.0] * repeats)
    assert machine_limits.copy_bandwidth("cpu").median == 2 * 4096


def test_product_counts_multiplications_and_additions(monkeypatch):
    monkeypatch.setattr(machine_limits, "CPU_MATMUL_SIZE", 10)
    monkeypatch.setattr(machine_limits, "_time", lambda run, device, repeats: [1.0] * repeats)
    assert machine_limits.matmul_rate("cpu", torch.bfloat16).median == 2 * 10**3


def test_the_limit_is_what_the_fastest_kernel_reaches_not_the_first(monkeypatch):
    """Prefill once lay a third above a roof that was measured with `torch.mm` alone."""
    kernels = {"torch.mm": (100, lambda: 1.0), "another": (300, lambda: 2.0), "a slow one": (100, lambda: 4.0)}
    monkeypatch.setattr(machine_limits, "_products", lambda device, dtype: kernels)
    monkeypatch.setattr(machine_limits, "_time", lambda run, device, repeats: [run()] * repeats)
    limit = machine_limits.matmul_rate("cpu", torch.float32)
    assert (limit.median, limit.kernel) == (150, "another")
    assert str(limit).endswith("7 runs, another)")


def test_every_product_that_the_engine_can_use_is_tried_and_counts_its_own_work(monkeypatch):
    monkeypatch.setattr(machine_limits, "CPU_MATMUL_SIZE", 64)
    products = machine_limits._products("cpu", torch.float32)
    assert "torch.mm" in products
    assert ("oneDNN, packed weights" in products) == can_pack()
    assert "the compiled step's tiles" in products
    for work, run in products.values():
        run()
        assert work > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_alone_make_the_product_that_they_count(threads: int, monkeypatch):
    monkeypatch.setattr(tile_rate, "TIMES", 1)
    seen = []
    compiled = tile_rate._multiply
    monkeypatch.setattr(tile_rate, "_multiply", lambda *args: (compiled(*args), seen.append(args)))
    work, run = tile_rate.tile_product(threads)
    run()
    outputs = tile_rate.GROUPS * tile_rate.PANELS * tile_rate.LANES
    assert work == threads * 2 * tile_rate.CHUNK * tile_rate.COLUMNS * outputs
    for weights, x, y, times in seen:
        panels = torch.from_numpy(weights).view(-1, tile_rate.COLUMNS, tile_rate.LANES)
        matrix = panels.transpose(1, 2).reshape(outputs, tile_rate.COLUMNS)
        want = torch.from_numpy(x).view(tile_rate.CHUNK, -1) @ matrix.T
        torch.testing.assert_close(torch.from_numpy(y).view_as(want), want, rtol=1e-4, atol=1e-3)
        assert times == 1


def test_bandwidth_is_that_of_a_copy_or_of_a_sum_whichever_moves_more(monkeypatch):
    for faster, seconds in (("a sum", [1.0, 3.0]), ("a copy", [1.0, 1.5])):
        times = iter(seconds)
        monkeypatch.setattr(machine_limits, "_time", lambda run, device, repeats, times=times: [next(times)] * repeats)
        found = machine_limits.memory_bandwidth("cpu", num_bytes=8192)
        assert (found.kernel, found.name) == (faster, "memory bandwidth")
        assert found.median == max(8192 / seconds[0], 2 * 8192 / seconds[1])


def test_both_limits_of_a_cpu_are_measured(monkeypatch):
    monkeypatch.setattr(machine_limits, "CPU_COPY_BYTES", 2**20)
    monkeypatch.setattr(machine_limits, "CPU_MATMUL_SIZE", 64)
    monkeypatch.setattr(machine_limits, "gpu", lambda: None)
    found = machine_limits.measure(repeats=5)
    assert [(c.device, c.unit) for c in found] == [("cpu", "B/s"), ("cpu", "FLOP/s")]
    assert all(0 < c.low <= c.median <= c.high for c in found)


@pytest.mark.parametrize("reason", [None, "CUDA error: no kernel image is available"])
def test_a_gpu_that_another_process_has_filled_or_that_cannot_be_used_is_left_out(monkeypatch, reason):
    monkeypatch.setattr(machine_limits, "CPU_COPY_BYTES", 2**20)
    monkeypatch.setattr(machine_limits, "CPU_MATMUL_SIZE", 64)
    monkeypatch.setattr(machine_limits, "gpu", lambda: Gpu("Tesla P100", (6, 0), 2**34, 2**33 if reason else 0))
    monkeypatch.setattr(machine_limits, "unusable_reason", lambda device: reason)
    assert [limit.device for limit in machine_limits.measure(repeats=5)] == ["cpu", "cpu"]


def test_median_of_few_runs_is_refused():
    with pytest.raises(ConfigError, match="repeats=4"):
        machine_limits.measure(repeats=4)


def test_one_thread_is_timed_by_its_cpu_time_and_everything_else_by_the_clock_on_the_wall(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for device, threads, clock in (("cpu", 1, "thread_time"), ("cpu", 2, "perf_counter"), ("cuda", 1, "perf_counter")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert machine_limits._clock(device) is getattr(machine_limits.time, clock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for system in ("darwin", "win32"):
        monkeypatch.setattr(sys, "platform", system)
        assert machine_limits._clock("cpu") is machine_limits.time.perf_counter


def test_copied_buffer_can_be_made_smaller(monkeypatch):
    monkeypatch.setattr(machine_limits, "_time", lambda run, device, repeats: [1.0] * repeats)
    assert machine_limits.copy_bandwidth("cpu", num_bytes=8192).median == 2 * 8192
