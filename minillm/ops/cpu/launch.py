"""Calls a compiled entry point on the number of threads that made its recent calls fastest."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from numba import get_num_threads, set_num_threads, typeof
from numba.core.config import NUMBA_NUM_THREADS

from minillm.hardware import usable_processors
from minillm.ops.cpu.team import new_sync
from minillm.ops.cpu.thread_choice import ThreadChoice

STEP_LOCK = threading.Lock()
"""Held while a step runs on several threads. numba's `workqueue` layer ends the process if two Python threads use it at
once. With numba's other layers two concurrent steps would only compete for the same processors."""
NO_PROCESS = 0
"""The id of no process."""


class Launcher:
    """One entry point. Its first two arguments are `sync` and the number of threads (`team.join_team`)."""

    threaded_process: ClassVar[int | None] = None
    """The first process, of this one and those it was forked from, that has run a step on several threads;
    `NO_PROCESS` if numba could not start them."""

    def __init__(self, run: Any, run_together: Any) -> None:
        """`run`, compiled by numba, is one thread's part; `run_together` calls it on all of them."""
        self.run, self.run_together = run, run_together
        self.address = 0
        """Where the machine code of `run` lies; 0 before the first call."""
        self.sync = new_sync()
        self.choice = ThreadChoice()
        self.usable_processors = usable_processors()

    def threads(self, kind: Hashable) -> int:
        """The number of threads for the next call. Only calls of one kind, which do about the same work, are
        compared. A process forked from one that has used several has one: OpenMP's threads do not survive a fork."""
        if Launcher.threaded_process not in (None, os.getpid()):
            return 1
        return self.choice.threads(kind, min(torch.get_num_threads(), NUMBA_NUM_THREADS, self.usable_processors))

    def launch(self, kind: Hashable, threads: int, *arguments: Any) -> None:
        """Call it with these arguments after the first two, and remember how long it took."""
        self.choice.record(kind, threads, self.call(threads, *arguments))

    def call(self, threads: int, *arguments: Any) -> float:
        """Call it with these arguments after the first two. Returns the seconds that it took, without the time that it
        waited for `STEP_LOCK`."""
        self.sync[:] = 0
        if threads > 1 and not self._starts_threads():
            threads = 1
        given = (self.sync, threads, *arguments)
        if threads == 1:
            began = time.perf_counter()
            run_compiled(self.run, *given)
            return time.perf_counter() - began
        with STEP_LOCK:
            began = time.perf_counter()
            if (before := get_num_threads()) != threads:
                set_num_threads(threads)
            try:
                run_compiled(self.run_together, self.address or self._find_address(given), *given)
            finally:
                if before != threads:
                    set_num_threads(before)
            return time.perf_counter() - began

    @staticmethod
    def _starts_threads() -> bool:
        """Whether numba can start threads. If it cannot, the first call warns of it."""
        if Launcher.threaded_process is None:
            try:
                get_num_threads()
            except ValueError as problem:  # NUMBA_THREADING_LAYER asks for a library that is not installed
                Launcher.threaded_process = NO_PROCESS
                warnings.warn(f"steps run on one thread: {problem}", RuntimeWarning, stacklevel=3)
            else:
                Launcher.threaded_process = os.getpid()
        return Launcher.threaded_process != NO_PROCESS

    def _find_address(self, arguments: Sequence[Any]) -> int:
        """Compile `run` for these arguments, or load it from disk. Those of all later calls are of the same types."""
        kinds = tuple(map(typeof, arguments))
        run_compiled(self.run.compile, kinds)
        compiled = self.run.overloads[kinds]
        self.address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        return self.address

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Run `call`, which launches once, so that numba compiles the entry points or loads them from disk. What that
        took is forgotten."""
        call()
        self.choice = ThreadChoice()


def run_compiled(function: Callable[..., Any], *arguments: Any) -> None:
    """Call one of numba's functions. If that compiles something and the result cannot be cached, because the disk is
    full say, numba raises `OSError`; but it keeps the result, and the second call runs it."""
    try:
        function(*arguments)
    except OSError:
        function(*arguments)
