"""How one implementation of an op is repeated to be timed: on copies of its inputs in turn, on a GPU as a graph."""

from __future__ import annotations

from functools import partial

from minillm.bench.device_clock import Clock, TimedFunction
from minillm.bench.kernel_cases import Case, Implementation

RECORDED_CALLS = 20
"""Minimum number of calls in a graph, because a replay costs the host some 10 µs."""
SLOW_CALL_S = 1e-3
"""If a call takes longer, a graph has only one for each copy: the replay costs nothing beside it."""


class Position:
    """The copy to read next. All implementations of a case share it, because a copy just read is in the caches."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int, copies: int) -> int:
        """The copy with which the next `count` calls begin."""
        first, self.next = self.next, (self.next + count) % copies
        return first


def timed_function(name: str, one: Implementation, copies: int, position: Position, clock: Clock) -> TimedFunction:
    """A `TimedFunction` that runs an implementation `count` times, on the copies in turn."""
    if one.loop is not None:
        loop = one.loop
        return TimedFunction(name, lambda count: loop(count, position.take(count, copies), copies))
    assert one.call is not None
    call = one.call
    if clock.device != "cpu" and one.can_be_captured:
        is_slow = clock.seconds(partial(call, 0)) > SLOW_CALL_S
        calls_per_replay = copies if is_slow else max(copies, RECORDED_CALLS)

        def all_copies() -> None:
            for i in range(calls_per_replay):
                call(i % copies)

        try:
            replay = clock.recorded(all_copies)
        except RuntimeError:
            # It waits for the device, so no graph can record it: call it from Python. `recorded` has made the stream
            # of before the current one again, so these calls and the clock's events are on the same stream.
            pass
        else:
            return TimedFunction(
                name, lambda count: [replay() for _ in range(count // calls_per_replay)], calls_per_replay, True
            )

    def calls(count: int) -> None:
        first = position.take(count, copies)
        for i in range(first, first + count):
            call(i % copies)

    return TimedFunction(name, calls)


def timed_implementation(case: Case, implementation: str, name: str, clock: Clock) -> TimedFunction:
    """One implementation of a case, under the name `name`, to be timed in turn with those of other cases."""
    return timed_function(name, case.implementations[implementation], case.copies, Position(), clock)
