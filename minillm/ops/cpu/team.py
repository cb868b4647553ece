"""A few threads that run one function together: how they meet, and how they wait for each other.

A step has some sixty points at which all threads must have finished one part before any may begin the next. Starting
and ending a parallel loop at each of them costs 2 µs a time, a tenth of the step of a small model. Here the threads
start once, and wait for each other by looking at a counter: 0.04 to 0.12 µs on two cores of an AMD EPYC.

Threads that wait by looking must really run at the same time. Whether they do is for the system to decide, so a team
is made of those that came: the first waits a moment for the others, then closes the door. Who comes later goes away.
And who has looked for long offers its processor to whoever else wants to run: on a busy machine that may be the very
thread it waits for.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.processor import processor

DOOR, SIZE, MEETING = 0, 8, 16
"""Where the counters lie in `sync` (int64), a cache line each."""
SYNC_WORDS = 24
CLOSED = 1 << 32
PATIENCE = 20_000
"""How often the first looks for the others before it closes the door."""
LOOKS = 1000
"""After so many looks in vain, some 25 µs, a thread offers its processor to others."""
YIELD = "SwitchToThread" if platform.system() == "Windows" else "sched_yield"


def new_sync() -> np.ndarray:
    """Counters for one team; all zero before each start."""
    return np.zeros(SYNC_WORDS, np.int64)


@intrinsic
def _add(typing: Any, sync: Any, at: Any, value: Any) -> Any:
    """Add to `sync[at]`; returns what was there before. Who reads the new value sees all that was written before it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(sync, types.intp, types.int64), code


@intrinsic
def _look(typing: Any, sync: Any, at: Any) -> Any:
    """`sync[at]` as it is now, whoever wrote it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(sync, types.intp), code


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the processor that this is a waiting loop: for some 40 ns it then leaves its units to others."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nothing = ir.FunctionType(ir.VoidType(), [])
        if processor().architecture == "x86":
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        elif processor().architecture == "arm":  # `yield` does nothing there; `isb` waits about as long
            builder.asm(nothing, "isb", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def _yield(typing: Any) -> Any:
    """Let another thread have this processor: the one that is waited for may be waiting for it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, YIELD), [])
        return context.get_dummy_value()

    return types.void(), code


@njit(**OPTIONS)
def _wait(looks):
    """What to do between two looks; returns their number."""
    if looks % LOOKS == LOOKS - 1:
        _yield()
    else:
        _pause()
    return looks + 1


@njit(**OPTIONS)
def join(sync, wanted):
    """Join the team; returns (number of this thread, size of the team), or (-1, 0) if the door is closed."""
    number = _add(sync, DOOR, 1)
    if number >= CLOSED:
        return -1, 0
    if number == 0:
        looks = 0
        while _look(sync, DOOR) < wanted and looks < PATIENCE:
            looks = _wait(looks)
        _add(sync, SIZE, _add(sync, DOOR, CLOSED))
    looks = 0
    while _look(sync, SIZE) == 0:
        looks = _wait(looks)
    return number, _look(sync, SIZE)


@njit(**OPTIONS)
def meet(sync, size):
    """Wait until every thread of the team has come here."""
    if size == 1:
        return
    arrivals = _add(sync, MEETING, 1) + 1
    complete = (arrivals + size - 1) // size * size
    looks = 0
    while _look(sync, MEETING) < complete:
        looks = _wait(looks)


@njit(**OPTIONS)
def share(count, number, size):
    """The part of `range(count)` that falls to thread `number` of `size`: (first, last + 1)."""
    return count * number // size, count * (number + 1) // size
