"""Ranks as threads of one process: what each computes, without starting processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.cache.paged import PagedKVCache
from minillm.parallel.group import Group
from minillm.parallel.loading import load_part
from minillm.runtime.runner import ModelRunner

CPU = torch.device("cpu")


class ThreadGroup(Group):
    """A `Group` that exchanges tensors through a list. All ranks of a test share `board` and `barrier`."""

    def __init__(self, rank: int, size: int, board: list[Tensor | None], barrier: Barrier) -> None:
        super().__init__(rank, size, CPU)
        self.board, self.barrier = board, barrier

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.board[self.rank] = x.clone()
        self.barrier.wait(20)
        found = list(self.board)
        self.barrier.wait(20)
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        self.traffic.num_all_reduces += 1
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        self.traffic.num_all_gathers += 1
        return torch.cat(self._exchange(x), dim=1)


def on_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` returns on each rank."""
    board: list[Tensor | None] = [None] * size
    barrier = Barrier(size)

    def one(rank: int) -> Any:
        try:
            return work(ThreadGroup(rank, size, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def split_runner(folder: Path, group: Group, block_size: int = 4, num_blocks: int = 16) -> ModelRunner:
    """This rank's runner of the checkpoint in `folder`, in float64, with a cache."""
    model = load_part(folder, group, torch.float64)
    cache = PagedKVCache(model.config, num_blocks, block_size, torch.float64, CPU)
    return ModelRunner(model, cache, block_size)


STEPS = (
    [Segment([7, 250, 3, 9, 11], 0, [2, 5], num_logits=5), Segment([40, 41], 0, [3])],
    [Segment([12], 5, [2, 5]), Segment([272, 1, 2], 2, [3, 4], num_logits=2)],
)
"""Two steps of two requests: prefills, then a decode beside a chunk."""
