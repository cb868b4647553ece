"""Rank 0's runner: tells the workers what to run, and runs its own part of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.errors import EngineDeadError
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.messages import CopyBlocks, Message, Run
from minillm.parallel.workers import Workers
from minillm.runtime.runner import ModelRunner

Result = TypeVar("Result")


class LeadingRunner(ModelRunner):
    """A `ModelRunner` whose steps run on all ranks. The engine above it does not know of the others.

    Each step runs in a thread of its own, and an interrupt waits for its end: a rank that left in the middle of a step
    would leave the others waiting in a collective. The workers end with this object.
    """

    def __init__(self, model: ParallelDecoder, block_size: int, workers: Workers, num_threads: int) -> None:
        """`num_threads`: how many threads PyTorch uses for this rank's part of a step, as in each worker."""
        super().__init__(model, None, block_size)  # type: ignore[arg-type]  (`RunnerPlans.allocate` sets its cache)
        self.workers = workers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minillm-rank-0")
        others = torch.get_num_threads()
        try:
            self._thread.submit(_use_threads, num_threads).result()
        finally:
            torch.set_num_threads(others)  # of this thread, and of those that use PyTorch for the first time later
        weakref.finalize(self, _end, workers, self._thread)

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.run`. Raises `EngineDeadError` if another rank has ended."""
        return self._on_all_ranks(Run(list(segments)), partial(super().run, segments))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `ModelRunner.copy_blocks`. Raises `EngineDeadError` if another rank has ended."""
        self._on_all_ranks(CopyBlocks(list(pairs)), partial(super().copy_blocks, pairs))

    def _on_all_ranks(self, order: Message, own: Callable[[], Result]) -> Result:
        future = self._thread.submit(_run, self.workers, order, own)
        try:
            return future.result()
        except BaseException:
            wait([future])
            raise


def _run(workers: Workers, order: Message, own: Callable[[], Result]) -> Result:
    """Send `order` to the workers and call `own`, which does the same on this rank."""
    workers.send(order)
    try:
        return own()
    except EngineDeadError as problem:
        raise workers.failure(lost=problem) from None
    except BaseException:
        workers.close()  # they wait for this rank in a collective
        raise


def _use_threads(num_threads: int) -> None:
    """Set PyTorch's number of threads for the calling thread, as its own: at its first look at the number, a thread
    takes the one that was set last in the process."""
    torch.get_num_threads()
    torch.set_num_threads(num_threads)


def _end(workers: Workers, thread: ThreadPoolExecutor) -> None:
    workers.close()
    thread.shutdown(wait=False)
