"""The process of a rank other than 0, started by `Workers`.

It loads its part of the model and then does, one after the other, what rank 0 sends. It ends when rank 0 closes the
stream, which also happens when rank 0 dies.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

from minillm.cache.layouts import find_layout
from minillm.config import CacheConfig
from minillm.errors import EngineDeadError
from minillm.parallel.group import Group, local_store
from minillm.parallel.loading import load_part
from minillm.parallel.messages import Allocate, Connect, CopyBlocks, Failed, Message, Ready, Run, Setup, frame, receive
from minillm.runtime.runner import ModelRunner

LOST_ANOTHER_RANK = 3
"""Exit status of a worker that ends because another rank has ended."""


class Worker:
    """One rank's model, cache and connection to the other ranks."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.num_threads)
        self.group = Group(setup.rank, setup.size, torch.device(setup.device))
        self.dtype = getattr(torch, setup.dtype)
        self.options = setup.kv_cache_options
        self.layout = find_layout(CacheConfig(dtype=setup.kv_cache_dtype, options=self.options))
        model = load_part(Path(setup.folder), self.group, self.dtype)
        self.runner = ModelRunner(model, None, setup.block_size)  # type: ignore[arg-type]  (`allocate` sets its cache)

    def allocate(self, message: Allocate) -> None:
        """Allocate the cache."""
        runner = self.runner
        runner.cache = self.layout(
            runner.model.config, message.num_blocks, runner.block_size, self.dtype, self.group.device, **self.options
        )
        runner.cache.prepare(runner.model)

    def connect(self, message: Connect) -> None:
        """Connect to the other ranks."""
        self.group.connect(local_store(self.group.size, message.port))

    def serve(self, orders: IO[bytes], answer: Callable[[Message], object]) -> None:
        """Do what rank 0 sends until the stream ends. Raises `EngineDeadError` if another rank has ended."""
        while (message := receive(orders)) is not None:
            if isinstance(message, Run):
                self.runner.run(message.segments)
            elif isinstance(message, CopyBlocks):
                self.runner.copy_blocks(message.pairs)
            elif isinstance(message, Allocate):
                self.allocate(message)
                answer(Ready())
            elif isinstance(message, Connect):
                self.connect(message)


def main() -> int:
    """Read `Setup` from standard input, answer on standard output, serve. Returns the exit status."""
    # Ctrl-C goes to all processes of a terminal, SIGTERM of a service manager to all of a service: rank 0 decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    try:
        setup = receive(orders)
        if not isinstance(setup, Setup):
            return 0
        worker = Worker(setup)
        answers.write(frame(Ready()))
        worker.serve(orders, lambda message: answers.write(frame(message)))
    except EngineDeadError as problem:
        with suppress(OSError):  # it may be rank 0 that has ended
            answers.write(frame(Failed(str(problem))))
        return LOST_ANOTHER_RANK
    except Exception as problem:
        answers.write(frame(Failed(f"{type(problem).__name__}: {problem}")))
        return 1
    return 0
