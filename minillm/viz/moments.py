"""Steps of a trace that are worth a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillm.errors import TraceError
from minillm.trace import RequestPreempted, StepStarted, TokensCommitted, Trace


@dataclass(frozen=True)
class Moment:
    """Something that happened to a request in a step."""

    step: int
    request_id: str


def rejected_round(trace: Trace, wrong: int = 2) -> Moment:
    """The first round in which at least `wrong` drafts were not kept. Raises `TraceError` if there is none."""
    return _first(
        trace,
        lambda event: isinstance(event, TokensCommitted) and event.num_drafts - event.num_accepted >= wrong,
        f"round with {wrong} wrong drafts",
    )


def preemption(trace: Trace) -> Moment:
    """The first preemption. Raises `TraceError` if there is none."""
    return _first(trace, lambda event: isinstance(event, RequestPreempted), "preemption")


def _first(trace: Trace, wanted: Callable[[Any], bool], name: str) -> Moment:
    step = 0
    for event in trace:
        if isinstance(event, StepStarted):
            step = event.step
        elif wanted(event):
            return Moment(step, event.request_id)
    raise TraceError(f"the trace has no {name}; record a run in which it happens")
