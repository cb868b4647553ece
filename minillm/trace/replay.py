"""Folds a trace up to a step. Going forward reuses the state of the previous step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from minillm.errors import TraceError
from minillm.trace import StepFinished, Trace
from minillm.trace.trace_state import TraceState

State = TypeVar("State", bound=TraceState)


class Replay(threading.local, Generic[State]):
    """Computes the state of a trace after any step. Going forward folds only the events in between.

    Each thread has a state of its own: a view may be drawn by the engine's thread and by others at once.
    """

    def __init__(self, trace: Trace, new_state: Callable[[], State]) -> None:
        self.trace = trace
        self._new_state = new_state
        self._state = new_state()
        self._position: int | None = 0
        """How many events `_state` has folded; None while it folds, and after an interrupt of that."""
        self._ends: dict[int, int] = {}
        """Step → how many events the trace has at its end, for the first `_num_indexed` events."""
        self._num_indexed = 0

    def at(self, step: int | None = None) -> State:
        """Return the state after `step`, by default after the last event so far.

        The next call in this thread may change the returned object, so do not keep it. Raises `TraceError` for an
        unknown step.
        """
        stop = len(self.trace) if step is None else self._end_of(step)
        start, self._position = self._position, None
        if start is None or stop < start:
            self._state, start = self._new_state(), 0
        for number, event in enumerate(self.trace.events[start:stop], start + 1):
            self._state.fold_numbered(number, event)
        self._position = stop
        return self._state

    def _end_of(self, step: int) -> int:
        for position, event in enumerate(self.trace.events[self._num_indexed :], start=self._num_indexed + 1):
            if isinstance(event, StepFinished):
                self._ends.setdefault(event.step, position)
            self._num_indexed = position
        if step not in self._ends:
            steps = list(self._ends)
            known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "no step has finished yet"
            raise TraceError(f"step {step} is not in this trace; {known}")
        return self._ends[step]
