"""The threads of a compiled step: how they start together, and the barrier between its parts.

A step has some sixty points at which every thread must have finished one part before any thread may begin the next.
Starting and ending a parallel loop at each of them costs 2 µs a time, a tenth of the step of a small model. Here the
threads start once and then spin on a counter: a barrier costs 0.04 to 0.12 µs on two cores of an AMD EPYC.

Threads that spin must really run at the same time, and only the operating system decides whether they do. So thread 0
waits briefly for the others and then starts with those that have arrived; a thread that arrives later returns at once.
A thread that has spun for long yields its processor: on a busy machine the thread it waits for may need it.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.processor import processor

ARRIVED, NUM_THREADS, BARRIER = 0, 8, 16
"""Indices of the counters in `sync` (int64), one cache line each."""
SYNC_WORDS = 24
STARTED = 1 << 32
"""Added to the counter of arrivals when the step starts: a thread that reads this or more is late."""
START_SPINS = 20_000
"""How often thread 0 looks for the other threads before it starts without them."""
YIELD_SPINS = 1000
"""A waiting thread yields its processor each time after so many spins, about 40 µs."""
YIELD = "SwitchToThread" if platform.system() == "Windows" else "sched_yield"


class Team(NamedTuple):
    """What a thread knows of the threads that run one step."""

    thread_id: int
    """-1: this thread arrived after the start and has nothing to do."""
    num_threads: int
    sync: np.ndarray


def new_sync() -> np.ndarray:
    """The counters of one step; all must be zero before it starts."""
    return np.zeros(SYNC_WORDS, np.int64)


@intrinsic
def _fetch_add(typing: Any, sync: Any, at: Any, value: Any) -> Any:
    """Atomically add to `sync[at]` and return its old value. A thread that reads the new value also sees every earlier
    write of this thread."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(sync, types.intp, types.int64), code


@intrinsic
def _atomic_load(typing: Any, sync: Any, at: Any) -> Any:
    """Atomically read `sync[at]`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(sync, types.intp), code


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the processor that this is a spin loop: it then pauses this thread for about 40 ns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nothing = ir.FunctionType(ir.VoidType(), [])
        if processor().architecture == "x86":
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        elif processor().architecture == "arm":  # there `yield` does nothing; `isb` waits about as long as `pause`
            builder.asm(nothing, "isb", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def _yield(typing: Any) -> Any:
    """Yield this processor to another thread."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, YIELD), [])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def call_at(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the compiled function that lies at `address`, and returns nothing, with the items of a tuple.

    A caller by name contains the callee, and numba would optimise all of it a second time: with a step that was a third
    of the time to compile.
    """
    if not isinstance(arguments, types.BaseTuple):
        return None
    kinds = tuple(arguments)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = context.call_conv.get_function_type(types.none, kinds)
        callee = builder.inttoptr(args[0], function.as_pointer())
        context.call_conv.call_function(builder, callee, types.none, kinds, cgutils.unpack_tuple(builder, args[1]))
        return context.get_dummy_value()

    return types.void(types.intp, arguments), code


@njit(**PART)
def _spin(spins):
    """Wait a moment; returns the number of spins so far."""
    if spins % YIELD_SPINS == YIELD_SPINS - 1:
        _yield()
    else:
        _pause()
    return spins + 1


@njit(**PART)
def join_team(sync, wanted):
    """Join the `wanted` threads of a step."""
    thread_id = _fetch_add(sync, ARRIVED, 1)
    if thread_id >= STARTED:
        return Team(-1, 0, sync)
    if thread_id == 0:
        spins = 0
        while _atomic_load(sync, ARRIVED) < wanted and spins < START_SPINS:
            spins = _spin(spins)
        _fetch_add(sync, NUM_THREADS, _fetch_add(sync, ARRIVED, STARTED))
    spins = 0
    while _atomic_load(sync, NUM_THREADS) == 0:
        spins = _spin(spins)
    return Team(thread_id, _atomic_load(sync, NUM_THREADS), sync)


@njit(**PART)
def barrier(team):
    """Wait until every thread of the step has reached this point."""
    if team.num_threads == 1:
        return
    arrivals = _fetch_add(team.sync, BARRIER, 1) + 1
    complete = (arrivals + team.num_threads - 1) // team.num_threads * team.num_threads
    spins = 0
    while _atomic_load(team.sync, BARRIER) < complete:
        spins = _spin(spins)


@njit(**PART)
def thread_range(team, count):
    """The part of `range(count)` that is this thread's: (first, last + 1)."""
    return count * team.thread_id // team.num_threads, count * (team.thread_id + 1) // team.num_threads
