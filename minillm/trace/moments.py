"""Finds steps of a trace that are worth drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillm.errors import TraceError
from minillm.trace import RequestPreempted, StepStarted, TokensCommitted, Trace


@dataclass(frozen=True)
class Moment:
    """The step of an event, and the request that it concerns."""

    step: int
    request_id: str


def first_rejected_round(trace: Trace) -> Moment:
    """Return the first round with at least two drafts not accepted. Raises `TraceError` if there is none."""
    return _first(
        trace,
        lambda event: isinstance(event, TokensCommitted) and event.num_drafts - event.num_accepted >= 2,
        "round with two drafts that were not accepted",
    )


def first_preemption(trace: Trace) -> Moment:
    """Return the first preemption. Raises `TraceError` if there is none."""
    return _first(trace, lambda event: isinstance(event, RequestPreempted), "preemption")


def _first(trace: Trace, wanted: Callable[[Any], bool], name: str) -> Moment:
    step = 0
    for event in trace:
        if isinstance(event, StepStarted):
            step = event.step
        elif wanted(event):
            return Moment(step, event.request_id)
    raise TraceError(f"the trace has no {name}; record a run that has one")
