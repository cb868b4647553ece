"""Arrays that end at a protected page, a "wall", so that every access past their end is found.

Poison around an array (`minillm.teaching.fence`) finds all writes past its end, but only those reads whose value
reaches the result. A wall finds all reads too: accessing the protected page ends the process with SIGSEGV. So code runs
against walls in a forked process, after it has run in poison.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minillm.teaching.fence import OutOfBoundsError

WALL_BYTES = 1 << 24
"""Size of the protected address space behind an array; it takes no memory."""
PROT_NONE = 0  # as in <sys/mman.h>
TIMEOUT_S = 20.0


def has_walls() -> bool:
    """Whether memory can be protected and processes forked: not on Windows, and not for GPU memory."""
    return os.name == "posix" and not torch.cuda.is_available()


def walled(x: Tensor) -> Tensor:
    """A contiguous copy of `x` on the CPU. Any access behind its last element ends the process (SIGSEGV)."""
    size = max(1, x.numel()) * x.dtype.itemsize
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, room + WALL_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    wall = ctypes.c_void_p(np.frombuffer(region, np.uint8).ctypes.data + room)
    if ctypes.CDLL(None, use_errno=True).mprotect(wall, ctypes.c_size_t(WALL_BYTES), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(region, dtype=x.dtype, count=max(1, x.numel()), offset=room - size)
    return copy[: x.numel()].view(x.shape).copy_(x)


def check_against_walls(run: Callable[[], object]) -> None:
    """Call `run`, which works on `walled` arrays, in a forked process; what it returns, raises or changes is lost.

    Raises `OutOfBoundsError` if it accessed a wall. Does nothing without `has_walls()`.
    """
    if has_walls() and stopped_by(run) in ("SIGSEGV", "SIGBUS"):
        raise OutOfBoundsError("read or wrote beyond the end of an array, though its results are right")


def stopped_by(run: Callable[[], object], patience_s: float = TIMEOUT_S) -> str:
    """Call `run` in a forked process; return the signal that ended it (`SIGSEGV`), or "" if it ended normally.

    After `patience_s` seconds the process is killed (`SIGKILL`).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads running; the child starts none
        child = os.fork()
    if child == 0:
        try:
            _be_quiet()
            run()
        finally:
            os._exit(0)
    deadline = time.monotonic() + patience_s
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.002)
    return signal.Signals(os.WTERMSIG(ended[1])).name if os.WIFSIGNALED(ended[1]) else ""


def _be_quiet() -> None:
    """Write no core file and no traceback at the expected crash; use one thread: thread pools do not survive a fork."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    torch.set_num_threads(1)
