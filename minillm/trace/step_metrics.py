"""How many requests ran and how many waited in each step, counted in a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minillm.trace import Event, RequestAdded, RequestFinished, StepRan


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step."""

    step: int
    num_running: int
    """Requests that went through the model."""
    num_waiting: int
    """Unfinished requests that did not: in the queue, preempted, or without a share of the budget."""


def step_metrics(trace: Iterable[Event]) -> list[StepMetrics]:
    """Return the metrics of every step of a trace that ran the model, in order."""
    unfinished: set[str] = set()
    metrics: list[StepMetrics] = []
    for event in trace:
        match event:
            case RequestAdded():
                unfinished.add(event.request_id)
            case RequestFinished():
                unfinished.discard(event.request_id)
            case StepRan():
                waiting = unfinished - {work.request_id for work in event.work}
                metrics.append(StepMetrics(event.step, len(event.work), len(waiting)))
    return metrics
