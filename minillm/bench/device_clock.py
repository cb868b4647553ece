"""One seam to the device that is measured: how long something took, and running it without the host in between.

Everything in the benchmarks of kernels and of the GPU that is CUDA's own (events, waiting, graphs) is in this file, so
the rest of them runs, and is tested, on a machine without a GPU.

A GPU answers before it is done, so time is taken between two events that the device itself writes down. And it may be
done before the host has sent the next launch: a Triton launch takes the host some 10 to 50 µs, many kernels less. What
is measured is therefore recorded once as a CUDA graph and replayed, which is how the engine runs kernels, too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

WARM_UPS = 2
MOST_CALLS = 100_000
TRIAL_S = 2e-4
"""A trial shorter than this tells nothing about a call; it is made longer."""


class Clock(Protocol):
    """What a benchmark asks of its device."""

    device: str

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long `run()` takes until the device is done with it."""

    def recorded(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Something that does on the device what `run()` does, without its Python."""

    def free(self) -> None:
        """Give memory that nothing holds any more back to the device."""


class CpuClock:
    """A processor: done when it returns. A team of one thread is timed by the time it ran, not by the wall's, so that
    a busy machine looks no slower."""

    device = "cpu"

    def seconds(self, run: Callable[[], Any]) -> float:
        """See `Clock.seconds`."""
        # Windows counts a thread's time in steps of 16 ms.
        alone = torch.get_num_threads() == 1 and os.name == "posix"
        clock = time.thread_time if alone else time.perf_counter
        began = clock()
        run()
        return clock() - began

    def recorded(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """There is nothing to record: `run` itself."""
        return run

    def free(self) -> None:
        """Memory goes back by itself."""


class CudaClock:
    """The current CUDA device."""

    device = "cuda"

    def seconds(self, run: Callable[[], Any]) -> float:
        """See `Clock.seconds`."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended) / 1000

    def recorded(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """A CUDA graph of `run()`, after warm-up runs on a side stream: kernels are compiled while nothing records.

        Raises `RuntimeError` (PyTorch's) for something that cannot be recorded, such as one that waits for the device.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def free(self) -> None:
        """See `Clock.free`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def clock_for(device: str) -> Clock:
    """The clock of `cpu` or `cuda`."""
    return CpuClock() if device == "cpu" else CudaClock()


@dataclass(frozen=True)
class Way:
    """One way of doing something, as often as it is told to."""

    name: str
    run: Callable[[int], Any]
    """`run(count)` does it `count` times, each time on the next copy of its inputs."""
    multiple: int = 1
    """It is done so many times in one go, or a multiple of that."""
    is_recorded: bool = False
    """Whether `run` replays a graph."""


@dataclass
class Timing:
    """Seconds that one call took, in each round."""

    calls: int
    """In a row, in one round."""
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds)


def in_turn(clock: Clock, ways: Sequence[Way], rounds: int, seconds: float) -> dict[str, Timing]:
    """Time every way, one after the other, `rounds` times (A B C A B C …), in runs of about `seconds` each.

    How many calls that takes is tried out first, which also warms everything up. Returns name → `Timing`.
    """
    timings = {way.name: Timing(_calls(clock, way, seconds)) for way in ways}
    for _ in range(rounds):
        for way in ways:
            timing = timings[way.name]
            took = clock.seconds(partial(way.run, timing.calls))
            timing.seconds.append(took / timing.calls)
    return timings


def _calls(clock: Clock, way: Way, seconds: float) -> int:
    """How many calls take about `seconds`: a multiple of the way's own."""
    calls = way.multiple
    way.run(calls)
    while True:
        took = clock.seconds(partial(way.run, calls))
        if took >= min(TRIAL_S, seconds / 4) or calls >= MOST_CALLS:
            wanted = min(calls * seconds / max(took, 1e-9), MOST_CALLS)
            return way.multiple * max(1, round(wanted / way.multiple))
        calls *= 4


def ratios(timings: Mapping[str, Timing], name: str, baseline: str) -> list[float]:
    """How many times as fast as `baseline` `name` was, in each round."""
    pairs = zip(timings[baseline].seconds, timings[name].seconds, strict=True)
    return [base / own for base, own in pairs]


def last_cache_bytes(device: str) -> int:
    """Size of the largest cache that stands before the device's memory; 64 MiB where the system does not tell."""
    if device != "cpu":
        return torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    sizes = [_parse(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=2**26)


def _parse(path: Path) -> int:
    text = path.read_text().strip()
    return int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1)
