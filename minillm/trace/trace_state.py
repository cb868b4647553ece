"""What all states computed from a trace share: events update them, and contradicting events are an error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

from minillm.errors import TraceError
from minillm.trace.events import LONGEST, Event

State = TypeVar("State", bound="TraceState")


class TraceState(ABC):
    """A state that is computed from a trace: events update it, one after the other and in order."""

    @abstractmethod
    def fold(self, event: Event) -> None:
        """Update the state with one event."""

    def fold_numbered(self, number: int, event: Event) -> None:
        """Update the state with the `number`-th event of a trace. Raises `TraceError` if it contradicts others."""
        try:
            self.fold(event)
        except (LookupError, ValueError, ArithmeticError) as problem:
            name, reason = type(event).__name__, f"{type(problem).__name__}: {str(problem)[:LONGEST]}"
            raise TraceError(
                f"event {number} ({name}) contradicts earlier events ({reason}); record the trace again, from before "
                "its requests are added"
            ) from problem

    def fold_all(self: State, events: Iterable[Event]) -> State:
        """Update the state with all events of a trace; returns self. Raises `TraceError` if they contradict each
        other."""
        for number, event in enumerate(events, 1):
            self.fold_numbered(number, event)
        return self
