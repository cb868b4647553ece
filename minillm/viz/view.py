"""What every picture of a trace can do: draw itself, tell itself, and show itself in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from minillm.trace import StepFinished, Trace


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

    def __repr__(self) -> str:
        # Constant, so that a notebook's saved output equals a fresh one.
        return f"<{type(self).__name__}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return bundle([self], still=True)


def bundle(views: list[View], *, still: bool) -> dict[str, str]:
    """The views as a notebook output, one below the other.

    The HTML holds the SVG itself, so its parts can be found and read. A `still` output also carries `image/svg+xml`,
    for readers of saved notebooks that strip SVG from HTML."""
    pictures = [view.to_svg() for view in views]
    gap = '<div style="height:10px"></div>'
    output = {"text/plain": " ".join(map(repr, views)), "text/html": f"<div>{gap.join(pictures)}</div>"}
    return output | {"image/svg+xml": stack(pictures)} if still else output


def stack(pictures: list[str], gap: float = 10) -> str:
    """Several pictures as one SVG document."""
    if len(pictures) == 1:
        return pictures[0]
    boxes = [_size(picture) for picture in pictures]
    width = max(box[0] for box in boxes)
    height, placed = 0.0, []
    for picture, (_, own) in zip(pictures, boxes, strict=True):
        placed.append(picture.replace("<svg ", f'<svg y="{height:g}" ', 1))
        height += own + gap
    height -= gap
    root = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    return f'{root} viewBox="0 0 {width:g} {height:g}" style="max-width:100%;height:auto">{"".join(placed)}</svg>'


def _size(picture: str) -> tuple[float, float]:
    """Width and height as the picture's own `viewBox` says."""
    box = picture.split('viewBox="', 1)[1].split('"', 1)[0].split()
    return float(box[2]), float(box[3])
