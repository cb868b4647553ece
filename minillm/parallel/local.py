"""Ranks as threads of one process: what each rank computes, without starting processes. For lessons and tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from minillm.parallel.group import Group

PATIENCE_S = 60
"""How long a rank waits for the others before it gives up."""
Result = TypeVar("Result")


class ThreadGroup(Group):
    """A `Group` whose ranks exchange tensors through `board`, which all of them share with `barrier`."""

    def __init__(self, rank: int, size: int, board: list[Tensor | None], barrier: Barrier) -> None:
        super().__init__(rank, size, torch.device("cpu"))
        self.board, self.barrier = board, barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Group.all_reduce`."""
        began = time.perf_counter()
        x.copy_(torch.stack(self._exchange(x)).sum(0))
        self._count(x, began)
        self.traffic.num_all_reduces += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Group.all_gather`."""
        began = time.perf_counter()
        parts = self._exchange(x)
        self._count(x, began)
        self.traffic.num_all_gathers += 1
        return torch.cat(parts, dim=1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        self.board[self.rank] = x.clone()
        self.barrier.wait(PATIENCE_S)
        found = [tensor for tensor in self.board if tensor is not None]
        self.barrier.wait(PATIENCE_S)
        return found


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Run `work` on each of `size` ranks, and return what it returns on each. If it raises on one, all end, and its
    error is raised."""
    board: list[Tensor | None] = [None] * size
    barrier = Barrier(size)

    def one(rank: int) -> Result:
        try:
            return work(ThreadGroup(rank, size, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for rank in ranks if (error := rank.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):  # those only lost the others
        raise error
    return [rank.result() for rank in ranks]
