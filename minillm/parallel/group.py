"""The processes that share one model, and what they send each other: `all_reduce` and `all_gather`, counted.

A process is a rank from 0 to size - 1. All ranks call the same collectives in the same order, with tensors of the same
shape; no rank has the result before all have made the call. On CPUs gloo carries the numbers over TCP. On GPUs it is
NCCL: that path has never been run, because no machine with two GPUs was at hand.

A `ProcessGroup` object is used in place of `torch.distributed`'s default group: of that there is one per process, and a
process may hold two engines.
"""

from __future__ import annotations

import atexit
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.errors import EngineDeadError, first_line

TIMEOUT = timedelta(minutes=5)
"""How long `connect` and each collective wait for the slowest rank. In a collective the end of a process is noticed at
once, by its closed sockets."""


@dataclass
class Traffic:
    """What this rank has sent and received in collectives since it was created or cleared."""

    num_all_reduces: int = 0
    num_all_gathers: int = 0
    num_bytes: int = 0
    """Bytes of this rank's tensors, counted once for each collective: not what its algorithm moves."""
    seconds: float = 0.0
    """Time in collectives, waiting for slower ranks included. On a GPU: the time to launch them."""

    def clear(self) -> None:
        """Start counting from zero."""
        self.num_all_reduces = self.num_all_gathers = self.num_bytes = 0
        self.seconds = 0.0


def local_store(size: int, port: int | None = None) -> dist.TCPStore:
    """The store through which `size` ranks of this machine find each other: a new one, or that at `port`."""
    # PyTorch for Windows is built without libuv, and asks for it unless told otherwise.
    return dist.TCPStore("127.0.0.1", port or 0, size, is_master=port is None, wait_for_workers=False, use_libuv=False)


@cache
def gloo_problem() -> str | None:
    """Why this build of PyTorch cannot use gloo, in one line; None if it can. `torch.distributed` counts gloo as
    available in builds for Windows that have no transport for it."""
    try:
        dist.ProcessGroupGloo.create_default_device()
    except (AttributeError, RuntimeError) as problem:  # the first: a build without gloo
        return first_line(problem)
    return None


class Group:
    """The ranks of one engine, seen from one of them."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.traffic = Traffic()
        self._processes: Any = None
        """The `ProcessGroup`; None until `connect`."""

    def connect(self, store: dist.Store) -> None:
        """Connect to the other ranks; returns when all have called it. `store` is how they find each other.

        Raises `EngineDeadError` if that fails, as it does if another rank does not connect within `TIMEOUT`.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = TIMEOUT
                self._processes = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            else:
                self._processes = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=TIMEOUT)
        except RuntimeError as problem:
            raise self._dead("cannot connect to the other ranks", problem) from None
        atexit.register(_disconnect, weakref.ref(self))

    def disconnect(self) -> None:
        """End the threads of the collectives. While Python ends it would be too late: then they abort the process."""
        self._processes = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` on every rank by its sum over all ranks, and return it. The sum is bit for bit the same on all.

        Raises `EngineDeadError` if another rank has ended.
        """
        began = time.perf_counter()
        self._wait(self._processes.allreduce([x]))
        self._count(x, began)
        self.traffic.num_all_reduces += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks side by side, in the order of ranks: `[rows, columns]` → `[rows, size · columns]`.

        Raises `EngineDeadError` if another rank has ended.
        """
        began = time.perf_counter()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._processes.allgather([parts], [x]))
        self._count(x, began)
        self.traffic.num_all_gathers += 1
        return torch.cat(parts, dim=1)

    def lowest(self, value: int) -> int:
        """The lowest of the values that the ranks pass. Not counted."""
        lowest = torch.tensor([value], device=self.device)
        self._wait(self._processes.allreduce([lowest], dist.ReduceOp.MIN))
        return int(lowest.item())

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as problem:
            raise self._dead("has lost another rank", problem) from None

    def _dead(self, what: str, problem: RuntimeError) -> EngineDeadError:
        [reason, *_] = str(problem).splitlines()
        return EngineDeadError(
            f"rank {self.rank} of {self.size} {what} ({reason}); look for another rank's own error, and start again"
        )

    def _count(self, x: Tensor, began: float) -> None:
        self.traffic.seconds += time.perf_counter() - began
        self.traffic.num_bytes += x.nbytes


def _disconnect(group: weakref.ref[Group]) -> None:
    if (alive := group()) is not None:
        alive.disconnect()
