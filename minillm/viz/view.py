"""What every picture of a trace can do: draw itself, tell itself, and show itself in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from minillm.trace import StepFinished, Trace
from minillm.viz.output import output


class View(ABC):
    """A picture of a trace. As the last expression of a notebook cell it shows itself."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @abstractmethod
    def to_svg(self, step: int | None = None) -> str:
        """The picture after `step`, by default after the last event: the same trace gives the same bytes.

        Raises `TraceError` if the trace has no such step."""

    @abstractmethod
    def describe(self, step: int | None = None) -> str:
        """The picture in words."""

    def steps_to_replay(self) -> list[int]:
        """The steps that `to_svg` takes, in order: those that have finished."""
        return [event.step for event in self.trace.of(StepFinished)]

    def telling_step(self) -> int | None:
        """The step whose picture says most, to be kept where nothing moves; `None`: the end."""
        return None

    def __repr__(self) -> str:
        # Constant, so that a notebook's saved output equals a fresh one.
        return f"<{type(self).__name__}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return output(repr(self), [self.to_svg()])
