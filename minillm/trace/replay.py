"""Folds a trace up to a step. Going forward reuses the state of the previous step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from minillm.errors import TraceError
from minillm.trace import Event, StepFinished, Trace

State = TypeVar("State", bound="TraceState")


class TraceState(ABC):
    """A state that is computed from a trace: events update it, one after the other and in order."""

    @abstractmethod
    def fold(self, event: Event) -> None:
        """Update the state with one event."""

    def fold_all(self: State, events: Iterable[Event]) -> State:
        """Update the state with many events; returns self."""
        for event in events:
            self.fold(event)
        return self


class Replay(Generic[State]):
    """Computes the state of a trace after any step. Going forward folds only the events in between."""

    def __init__(self, trace: Trace, new_state: Callable[[], State]) -> None:
        self.trace = trace
        self._new_state = new_state
        self._state = new_state()
        self._position = 0

    def at(self, step: int | None = None) -> State:
        """Return the state after `step`, by default after the last event so far.

        The next call may change the returned object, so do not keep it. Raises `TraceError` for an unknown step.
        """
        stop = len(self.trace) if step is None else self._end_of(step)
        if stop < self._position:
            self._state, self._position = self._new_state(), 0
        for event in self.trace.events[self._position : stop]:
            self._fold(event)
        return self._state

    def _fold(self, event: Event) -> None:
        try:
            self._state.fold(event)
        except (LookupError, ValueError) as problem:
            name = type(event).__name__
            message = (
                f"event {self._position + 1} ({name}) contradicts earlier events: {problem!r}; record the trace again"
            )
            raise TraceError(message) from problem
        self._position += 1

    def _end_of(self, step: int) -> int:
        steps = []
        for position, event in enumerate(self.trace.events, start=1):
            if isinstance(event, StepFinished):
                if event.step == step:
                    return position
                steps.append(event.step)
        known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "no step has finished yet"
        raise TraceError(f"step {step} is not in this trace; {known}")
