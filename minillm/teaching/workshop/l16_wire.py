"""Lesson 16: how long an all-reduce between two processes of this machine takes, by its size."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist

from minillm.errors import EngineDeadError
from minillm.parallel.group import Group, local_store
from minillm.parallel.workers import import_path

WARM_UP = 3
ROUNDS = 200
READY = "ready"
"""What the other process sets in the store when its imports are done."""


def measured_seconds(sizes: Sequence[int], rounds: int = ROUNDS) -> list[float]:
    """The least time of an all-reduce of so many bytes, for each size (in bytes, multiples of 4): what takes longer was
    delayed by other work on the machine. Raises `EngineDeadError` if the other process ends before it connects."""
    store = local_store(2)
    program = f"import sys; sys.path[:] = {import_path()!r}; from {__name__} import run_other; "
    program += f"run_other({store.port}, {list(sizes)!r}, {rounds})"
    with subprocess.Popen([sys.executable, "-c", program]) as other:
        try:
            while not store.check([READY]):
                if other.poll() is not None:
                    raise EngineDeadError(
                        f"the other process has ended with status {other.returncode}; its error is where the notebook "
                        "server prints"
                    )
                time.sleep(0.01)
            return _run(0, store, sizes, rounds)
        finally:
            other.terminate()


def free_processors(seconds: float = 0.5) -> float:
    """How many of the processors that this process may use were idle in the next `seconds`."""
    busy = psutil.cpu_percent(seconds, percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(busy))
    return sum(1 - busy[i] / 100 for i in usable if i < len(busy))


def latency_and_bandwidth(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds per step and bytes per second of a link between two ranks: 2 steps, in each half of the bytes cross.

    The smallest size gives the latency, the difference between the largest two the bandwidth.
    """
    latency = seconds[0] / 2
    more = max(seconds[-1] - seconds[-2], 1e-9)
    return latency, (sizes[-1] - sizes[-2]) / more


def run_other(port: int, sizes: Sequence[int], rounds: int) -> None:
    """What the other process does."""
    torch.set_num_threads(1)
    store = local_store(2, port)
    store.set(READY, "")
    _run(1, store, sizes, rounds)


def _run(rank: int, store: dist.Store, sizes: Sequence[int], rounds: int) -> list[float]:
    group = Group(rank, 2, torch.device("cpu"))
    group.connect(store)
    fastest = []
    for size in sizes:
        x = torch.ones(size // 4)
        taken = []
        for _ in range(WARM_UP + rounds):
            began = time.perf_counter()
            group.all_reduce(x)
            taken.append(time.perf_counter() - began)
            x.fill_(1.0)
        fastest.append(min(taken[WARM_UP:]))
    return fastest
