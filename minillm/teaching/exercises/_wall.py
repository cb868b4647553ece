"""Arrays that end where their memory ends, so that even a read that leaves no trace is seen.

Poison around an array (`minillm.teaching.fence`) finds a read beyond its end if the result is used, and every write. A
wall finds all of them: the page behind the array must not be touched, and the process that touches it is stopped. So
code is run against walls in a process of its own, after it has run in poison.
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
"""Address space behind an array that must not be touched; it takes no memory."""
PROT_NONE = 0  # as in <sys/mman.h>
PATIENCE_S = 20.0


def has_walls() -> bool:
    """Whether memory can be protected and a process be forked: not on Windows, and not for the memory of a GPU."""
    return os.name == "posix" and not torch.cuda.is_available()


def walled(x: Tensor) -> Tensor:
    """A copy of `x`, packed, on the CPU. Whoever touches what lies behind its last number is stopped (SIGSEGV)."""
    size = max(1, x.numel()) * x.dtype.itemsize
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, room + WALL_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    wall = ctypes.c_void_p(np.frombuffer(region, np.uint8).ctypes.data + room)
    if ctypes.CDLL(None, use_errno=True).mprotect(wall, ctypes.c_size_t(WALL_BYTES), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(region, dtype=x.dtype, count=max(1, x.numel()), offset=room - size)
    return copy[: x.numel()].view(x.shape).copy_(x)


def check_against_walls(run: Callable[[], object]) -> None:
    """Run in a forked process what works on `walled` arrays; what it returns, raises or changes is lost.

    Raises `OutOfBoundsError` if it touched a wall. Does nothing where there are no walls.
    """
    if has_walls() and stopped_by(run) in ("SIGSEGV", "SIGBUS"):
        raise OutOfBoundsError("read or wrote beyond the end of an array, though its results are right")


def stopped_by(run: Callable[[], object], patience_s: float = PATIENCE_S) -> str:
    """Run in a forked process; the signal that stopped it (`SIGSEGV`), or "" if it ended by itself.

    A run that takes longer than `patience_s` is stopped (`SIGKILL`).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads; the child starts none
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
    """No core file, nothing said of the expected end, and one thread: pools do not survive a fork."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    torch.set_num_threads(1)
