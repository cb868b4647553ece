"""Folds events into a state: the one place where events that contradict each other become an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from minillm.errors import TraceError
from minillm.trace.events import LONGEST, Event


class Folds(Protocol):
    """A state that is updated by events."""

    def fold(self, event: Event) -> None:
        """Update the state with one event."""


def fold(state: Folds, event: Event, number: int) -> None:
    """Update `state` with the `number`-th event of a trace. Raises `TraceError` if it contradicts earlier ones."""
    try:
        state.fold(event)
    except (LookupError, ValueError, ArithmeticError) as problem:
        reason = f"{type(problem).__name__}: {str(problem)[:LONGEST]}"
        raise TraceError(
            f"event {number} ({type(event).__name__}) contradicts earlier events ({reason}); record the trace again"
        ) from problem


def fold_all(state: Folds, events: Iterable[Event]) -> None:
    """Update `state` with all events of a trace, in order. Raises `TraceError` as `fold` does."""
    for number, event in enumerate(events, 1):
        fold(state, event, number)
