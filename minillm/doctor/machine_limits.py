"""The measured limits of this machine: memory bandwidth in bytes per second, and FLOP/s.

Lessons compare speeds with these limits (the roofline), never with numbers from a data sheet. A limit is the speed of
the fastest kernel that the engine can use. With only one kernel tried, other work could exceed the roofline.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minillm.doctor import LOW_MEMORY_BYTES
from minillm.errors import ConfigError
from minillm.hardware import gpu, half_dtype, memory, unusable_reason
from minillm.ops.linear import PackedWeight, can_pack

CPU_COPY_BYTES = 256 * 2**20
"""Size of the copied buffer: several times the last-level cache of most processors, so that memory is measured and not
the cache. Some servers have more; there the figure is too high."""
GPU_COPY_BYTES = 2**30
CPU_MATMUL_SIZE = 1024
GPU_MATMUL_SIZE = 8192


@dataclass(frozen=True)
class MachineLimit:
    """One measured limit: the median of `repeats` runs, and their spread."""

    name: str
    device: str
    unit: str
    """`B/s` or `FLOP/s`."""
    median: float
    low: float
    high: float
    repeats: int
    kernel: str = ""
    """The fastest of the kernels that were tried; empty if there is only one."""

    def __str__(self) -> str:
        giga = [value / 1e9 for value in (self.median, self.low, self.high)]
        by = f", {self.kernel}" if self.kernel else ""
        return "{:,.1f} G{} ({:,.1f} to {:,.1f}, {} runs{})".format(giga[0], self.unit, *giga[1:], self.repeats, by)


def measure(repeats: int = 7) -> list[MachineLimit]:
    """Memory bandwidth and matrix-product rate of the CPU and, if there is one, the GPU. Takes a few seconds.

    A GPU that cannot be used, or has less than `LOW_MEMORY_BYTES` free, is left out; the check `device` reports it.

    Raises `ConfigError` for fewer than 5 repeats, too few for a median.
    """
    if repeats < 5:
        raise ConfigError(f"repeats={repeats} is too few for a median; use at least 5")
    found = [memory_bandwidth("cpu", repeats), matmul_rate("cpu", torch.float32, repeats)]
    device = gpu()
    if device is not None and device.free >= LOW_MEMORY_BYTES and not unusable_reason("cuda"):
        found += [memory_bandwidth("cuda", repeats), matmul_rate("cuda", half_dtype(), repeats)]
    return found


def memory_bandwidth(device: str, repeats: int = 7, num_bytes: int | None = None) -> MachineLimit:
    """Bytes per second of a large copy or a large sum, whichever is faster. A sum only reads, as decode mostly does.

    `num_bytes`: see `copy_bandwidth`.
    """
    source = _large(device, num_bytes)
    read = _limit("memory bandwidth", device, "B/s", source.nbytes, _time(source.sum, device, repeats), "a sum")
    del source
    copied = copy_bandwidth(device, repeats, num_bytes)
    return _best([read, replace(copied, name=read.name, kernel="a copy")])


def copy_bandwidth(device: str, repeats: int = 7, num_bytes: int | None = None) -> MachineLimit:
    """Bytes read plus bytes written per second by one large copy.

    `num_bytes`: size of the copied buffer, to use less memory than the default. It must be several times the
    last-level cache; otherwise the cache is measured.
    """
    source = _large(device, num_bytes)
    target = torch.empty_like(source)
    seconds = _time(lambda: target.copy_(source), device, repeats)
    return _limit("copy bandwidth", device, "B/s", 2 * source.nbytes, seconds)


def matmul_rate(device: str, dtype: torch.dtype, repeats: int = 7) -> MachineLimit:
    """FLOP/s of a product of random matrices; a multiply-add counts as two operations.

    In float32 on a CPU, three kernels of the engine are tried: `torch.mm`, oneDNN with packed weights (x86), and the
    tiles of the compiled step (with numba). The fastest is the limit.
    """
    name = f"matrix product, {str(dtype).removeprefix('torch.')}"
    kernels = _products(device, dtype)
    found = []
    for kernel, (work, run) in kernels.items():
        seconds = _time(run, device, repeats)
        found.append(_limit(name, device, "FLOP/s", work, seconds, kernel if len(kernels) > 1 else ""))
    return _best(found)


def _large(device: str, num_bytes: int | None) -> Tensor:
    """Random numbers that fill `num_bytes` (None: the default), but at most an eighth of the free memory."""
    spare = memory().free if device == "cpu" else torch.cuda.mem_get_info()[0]
    num_bytes = min(num_bytes or (CPU_COPY_BYTES if device == "cpu" else GPU_COPY_BYTES), spare // 8)
    return torch.rand(num_bytes // 4, device=device)


def _products(device: str, dtype: torch.dtype) -> dict[str, tuple[int, Callable[[], object]]]:
    """Kernel → (operations per run, the function to run)."""
    size = CPU_MATMUL_SIZE if device == "cpu" else GPU_MATMUL_SIZE
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    work = 2 * size**3
    products: dict[str, tuple[int, Callable[[], object]]] = {"torch.mm": (work, lambda: torch.mm(a, b, out=out))}
    if device != "cpu" or dtype != torch.float32:
        return products
    if can_pack():
        packed = PackedWeight.of(b)
        products["oneDNN, packed weights"] = (work, lambda: packed.product(a, None))
    with suppress(ImportError):
        from minillm.ops.cpu.tile_rate import tile_product

        products["the compiled step's tiles"] = tile_product(torch.get_num_threads())
    return products


def _best(limits: list[MachineLimit]) -> MachineLimit:
    return max(limits, key=lambda limit: limit.median)


def _limit(name: str, device: str, unit: str, work: int, seconds: list[float], kernel: str = "") -> MachineLimit:
    median = statistics.median(seconds)
    return MachineLimit(
        name, device, unit, work / median, work / max(seconds), work / min(seconds), len(seconds), kernel
    )


def _time(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs, after two warm-up runs."""
    clock = _clock(device)
    seconds = []
    for _ in range(repeats + 2):
        _wait(device)
        began = clock()
        run()
        _wait(device)
        seconds.append(clock() - began)
    return seconds[2:]


def _clock(device: str) -> Callable[[], float]:
    """Wall-clock time; with a single CPU thread its CPU time, which other load on the machine does not affect.

    Windows counts CPU time in steps of 16 milliseconds, which is too coarse. On macOS products may run on threads of
    Apple's Accelerate, which PyTorch does not limit.
    """
    one_thread = device == "cpu" and torch.get_num_threads() == 1 and sys.platform == "linux"
    return time.thread_time if one_thread else time.perf_counter


def _wait(device: str) -> None:
    """Wait for the GPU, whose kernel launches return before the kernels finish."""
    if device != "cpu":
        torch.cuda.synchronize()
