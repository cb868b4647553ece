"""Arrays that end or begin at a protected page, a "wall", so that every access past that end is found.

Poison around an array (`minillm.teaching.fence`) finds all writes outside of it, but only those reads whose value
reaches the result. A wall finds all reads too: accessing the protected page ends the process with SIGSEGV. So code runs
against walls in a forked process, after it has run in poison: once on arrays with a wall behind them, and once on
arrays with a wall in front of them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from minillm.teaching.fence import OutOfBoundsError

WALL_BYTES = 1 << 24
"""Size of the protected address space behind or in front of an array; it takes no memory."""
Wall = Callable[[Tensor], Tensor]
PROT_NONE = 0  # as in <sys/mman.h>
ROOM = 1 << 16
TIMEOUT_S = 20.0


def has_walls() -> bool:
    """Whether memory can be protected and processes forked: not on Windows, and not for GPU memory."""
    return os.name == "posix" and not torch.cuda.is_available()


def walled(x: Tensor, in_front: bool = False) -> Tensor:
    """A contiguous copy of `x` on the CPU. Any access behind its last element, or with `in_front` before its first one,
    ends the process (SIGSEGV)."""
    size = max(1, x.numel()) * x.dtype.itemsize
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, room + WALL_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    wall = ctypes.c_void_p(np.frombuffer(region, np.uint8).ctypes.data + (0 if in_front else room))
    if ctypes.CDLL(None, use_errno=True).mprotect(wall, ctypes.c_size_t(WALL_BYTES), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    offset = WALL_BYTES if in_front else room - size
    copy = torch.frombuffer(region, dtype=x.dtype, count=max(1, x.numel()), offset=offset)
    return copy[: x.numel()].view(x.shape).copy_(x)


def check_between_walls(
    names: Sequence[str], copies: Callable[[Wall], Sequence[Tensor]], run: Callable[[Sequence[Tensor]], object]
) -> None:
    """Call `run` on `copies(walled)`, once with a wall behind every array and once with one in front of it, each time
    in a forked process: what it returns, raises or changes is lost.

    `names`: of the arrays, in the order in which `copies` makes them. Raises `OutOfBoundsError` with the name of the
    array whose wall was accessed. Does nothing without `has_walls()`.
    """
    for in_front, where in ((False, "beyond the end"), (True, "before the beginning")) if has_walls() else ():
        if _crashes(partial(run, copies(partial(walled, in_front=in_front)))):
            name = _accessed(names, copies, run, in_front)
            raise OutOfBoundsError(f"read or wrote {where} of {name}, though its results are right")


def _accessed(
    names: Sequence[str],
    copies: Callable[[Wall], Sequence[Tensor]],
    run: Callable[[Sequence[Tensor]], object],
    in_front: bool,
) -> str:
    """The first array whose wall `run` accesses if the others have none."""
    for number, name in enumerate(names):
        order = count()
        if _crashes(partial(run, copies(lambda x: walled(x, in_front) if next(order) == number else _roomy(x)))):  # noqa: B023
            return name
    return "an array"


def _roomy(x: Tensor) -> Tensor:
    """A contiguous copy of `x` with `ROOM` zeros in front of it and behind it."""
    room = torch.zeros(x.numel() + 2 * ROOM, dtype=x.dtype)
    return room[ROOM : ROOM + x.numel()].view(x.shape).copy_(x)


def _crashes(run: Callable[[], object]) -> bool:
    return stopped_by(run) in ("SIGSEGV", "SIGBUS")


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
