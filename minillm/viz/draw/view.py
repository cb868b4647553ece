"""The base class of pictures of a trace: it draws itself, describes itself in words, and shows itself in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from minillm.trace import StepFinished, Trace
from minillm.viz.draw.output import output


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
        """The steps that `to_svg` accepts, in order: those that have finished."""
        return [event.step for event in self.trace.of(StepFinished)]

    def most_informative_step(self) -> int | None:
        """The step with the most informative picture, shown where no replay can run; `None`: the last step."""
        return None

    def __repr__(self) -> str:
        # Constant, so that a notebook's saved output equals that of a fresh run.
        return f"<{type(self).__name__}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return output(repr(self), [self.to_svg()])
