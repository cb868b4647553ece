"""What this machine can do at most, measured: bytes moved and floating-point operations done per second.

Every "how close to the limit" in a lesson divides by one of these, never by a number from a data sheet. A limit is what
the best kernel reaches that the engine can use: if only one were tried, other work would lie above the roof.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.hardware import gpu, memory
from minillm.ops.linear import PackedWeight, can_pack

CPU_COPY_BYTES = 256 * 2**20
"""Size of a copied buffer: several times the last-level cache of a server, so the bytes come from memory."""
GPU_COPY_BYTES = 2**30
CPU_MATMUL_SIZE = 1024
GPU_MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceiling:
    """One measured limit: the median of `repeats`, and the spread."""

    name: str
    device: str
    unit: str
    """`B/s` or `FLOP/s`."""
    median: float
    low: float
    high: float
    repeats: int
    kernel: str = ""
    """What reached it: the fastest of those that were tried; empty if there is only one."""

    def __str__(self) -> str:
        giga = [value / 1e9 for value in (self.median, self.low, self.high)]
        by = f", {self.kernel}" if self.kernel else ""
        return "{:,.1f} G{} ({:,.1f} to {:,.1f}, {} runs{})".format(giga[0], self.unit, *giga[1:], self.repeats, by)


def measure(repeats: int = 7) -> list[Ceiling]:
    """Memory bandwidth and matrix rates of the CPU and, if there is one, the GPU. Takes a few seconds.

    Raises `ConfigError` for fewer than 5 repeats, from which no median should be quoted.
    """
    if repeats < 5:
        raise ConfigError(f"repeats={repeats} is too few for a median; use at least 5")
    found = [memory_bandwidth("cpu", repeats), matmul_rate("cpu", torch.float32, repeats)]
    device = gpu()
    if device is not None:
        half = torch.bfloat16 if device.capability >= (8, 0) else torch.float16
        found += [memory_bandwidth("cuda", repeats), matmul_rate("cuda", half, repeats)]
    return found


def memory_bandwidth(device: str, repeats: int = 7, num_bytes: int | None = None) -> Ceiling:
    """Bytes per second of one large copy or one large sum, whichever moves more: decoding mostly reads.

    `num_bytes`: see `copy_bandwidth`.
    """
    source = _large(device, num_bytes)
    read = _ceiling("memory bandwidth", device, "B/s", source.nbytes, _time(source.sum, device, repeats), "a sum")
    del source
    copied = copy_bandwidth(device, repeats, num_bytes)
    return _best([read, replace(copied, name=read.name, kernel="a copy")])


def copy_bandwidth(device: str, repeats: int = 7, num_bytes: int | None = None) -> Ceiling:
    """Bytes read plus bytes written per second by one large copy.

    `num_bytes`: size of the copied buffer, where less memory should be used than usual; it must be several times the
    last-level cache, or the cache is measured.
    """
    source = _large(device, num_bytes)
    target = torch.empty_like(source)
    seconds = _time(lambda: target.copy_(source), device, repeats)
    return _ceiling("copy bandwidth", device, "B/s", 2 * source.nbytes, seconds)


def matmul_rate(device: str, dtype: torch.dtype, repeats: int = 7) -> Ceiling:
    """Operations per second of a product of random matrices; a multiplication and an addition are two.

    In float32 on a CPU three kernels are tried that the engine can use: `torch.mm`, oneDNN with packed weights (x86),
    and the tiles of the compiled step (with numba). The fastest is the limit.
    """
    name = f"matrix product, {str(dtype).removeprefix('torch.')}"
    kernels = _products(device, dtype)
    found = []
    for kernel, (work, run) in kernels.items():
        seconds = _time(run, device, repeats)
        found.append(_ceiling(name, device, "FLOP/s", work, seconds, kernel if len(kernels) > 1 else ""))
    return _best(found)


def _large(device: str, num_bytes: int | None) -> Tensor:
    """Random numbers that fill `num_bytes`, or the usual size, and an eighth of the free memory at most."""
    spare = memory().free if device == "cpu" else torch.cuda.mem_get_info()[0]
    num_bytes = min(num_bytes or (CPU_COPY_BYTES if device == "cpu" else GPU_COPY_BYTES), spare // 8)
    return torch.rand(num_bytes // 4, device=device)


def _products(device: str, dtype: torch.dtype) -> dict[str, tuple[int, Callable[[], object]]]:
    """Kernel → (operations of one run, the run)."""
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


def _best(ceilings: list[Ceiling]) -> Ceiling:
    return max(ceilings, key=lambda ceiling: ceiling.median)


def _ceiling(name: str, device: str, unit: str, work: int, seconds: list[float], kernel: str = "") -> Ceiling:
    median = statistics.median(seconds)
    return Ceiling(name, device, unit, work / median, work / max(seconds), work / min(seconds), len(seconds), kernel)


def _time(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs, after two that warm up caches, clocks and libraries."""
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
    """Wall-clock time; where one thread does everything, its CPU time, so that a busy machine looks no slower.

    Windows counts CPU time in steps of 16 milliseconds, too coarse for this.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1 and os.name == "posix"
    return time.thread_time if alone else time.perf_counter


def _wait(device: str) -> None:
    """A GPU answers before it is done; the clock must not."""
    if device != "cpu":
        torch.cuda.synchronize()
