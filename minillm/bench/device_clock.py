"""The clock of the measured device, and a way to run work on it without the host between kernel launches.

All calls to CUDA (events, synchronisation, graphs) of the kernel and GPU benchmarks are in this file, so the rest runs,
and is tested, on a machine without a GPU.

A kernel launch returns before the kernel is done, so the time is measured between two events that the device records.
And the device may finish before the host's next launch: a Triton launch takes the host some 10 to 50 µs, many kernels
less. The measured work is therefore recorded once as a CUDA graph and replayed, as in the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from minillm.bench.timing import clock_for_threads
from minillm.runtime.cuda_graphs import CudaCapture, Replay

MOST_CALLS = 100_000
TRIAL_S = 2e-4
"""A trial shorter than this is too imprecise and is repeated with more calls."""


class Clock(Protocol):
    """The interface of a benchmark to its device."""

    device: str

    def seconds(self, run: Callable[[], Any]) -> float:
        """Seconds that `run()` takes until the device has finished it."""

    def recorded(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """A function that repeats the device work of `run()` without its Python code.

        It keeps `run`, and so all tensors that `run` uses.
        """

    def free(self) -> None:
        """Return unused memory to the device."""


class CpuClock:
    """The clock of a CPU. On Linux, single-threaded work is measured in CPU time instead of wall time, so that other
    load on the machine does not affect it."""

    device = "cpu"

    def seconds(self, run: Callable[[], Any]) -> float:
        """See `Clock.seconds`."""
        clock = clock_for_threads(torch.get_num_threads())
        began = clock()
        run()
        return clock() - began

    def recorded(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return `run` itself: a CPU has nothing to record."""
        return run

    def free(self) -> None:
        """Do nothing: unused memory is freed automatically."""


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
        """Record `run()` as a CUDA graph (see `CudaCapture`).

        A graph contains the addresses of its inputs but not the tensors. If they were freed, a replay would read memory
        that is no longer theirs, so the returned function keeps `run` as well.

        Raises `CaptureError` for work that cannot be recorded, for example if it waits for the device.
        """
        return partial(_replay, CudaCapture(torch.device("cuda"))(run), run)

    def free(self) -> None:
        """See `Clock.free`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _replay(replay: Replay, run: Callable[[], Any]) -> None:
    replay()


def clock_for(device: str) -> Clock:
    """The clock of `cpu` or `cuda`."""
    return CpuClock() if device == "cpu" else CudaClock()


@dataclass(frozen=True)
class TimedFunction:
    """One implementation of the measured work, with a function that repeats it."""

    name: str
    run: Callable[[int], Any]
    """`run(count)` calls it `count` times, each time on the next copy of its inputs."""
    multiple: int = 1
    """`count` must be a multiple of this."""
    is_recorded: bool = False
    """Whether `run` replays a graph."""


@dataclass
class Timing:
    """The time of one call, in each round."""

    calls: int
    """Number of calls per round."""
    seconds: list[float] = field(default_factory=list)
    """Seconds per call, one entry for each round."""

    @property
    def median(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.seconds)


def time_calls_in_turn(
    clock: Clock, functions: Sequence[TimedFunction], rounds: int, seconds: float
) -> dict[str, Timing]:
    """Time all functions in turn, `rounds` times (A B C A B C …), in runs of about `seconds` each. Returns name →
    `Timing`.

    Trial runs first determine the number of calls per run, which also warms everything up.
    """
    timings = {function.name: Timing(_calls(clock, function, seconds)) for function in functions}
    for _ in range(rounds):
        for function in functions:
            timing = timings[function.name]
            took = clock.seconds(partial(function.run, timing.calls))
            timing.seconds.append(took / timing.calls)
    return timings


def _calls(clock: Clock, function: TimedFunction, seconds: float) -> int:
    """The number of calls that take about `seconds`, a multiple of `function.multiple`."""
    calls = function.multiple
    function.run(calls)
    while True:
        took = clock.seconds(partial(function.run, calls))
        if took >= min(TRIAL_S, seconds / 4) or calls >= MOST_CALLS:
            wanted = min(calls * seconds / max(took, 1e-9), MOST_CALLS)
            return function.multiple * max(1, round(wanted / function.multiple))
        calls *= 4


def ratios(timings: Mapping[str, Timing], name: str, baseline: str) -> list[float]:
    """The speed of `name` divided by that of `baseline`, in each round."""
    pairs = zip(timings[baseline].seconds, timings[name].seconds, strict=True)
    return [base / own for base, own in pairs]


def last_cache_bytes(device: str) -> int:
    """Size of the device's last-level cache in bytes; 64 MiB if the system does not report it."""
    if device != "cpu":
        return torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    sizes = [_parse(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=2**26)


def _parse(path: Path) -> int:
    text = path.read_text().strip()
    return int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1)
