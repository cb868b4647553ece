"""Convert a picture to a notebook output. All pictures use this, so that each scales, has a description and is saved.

The HTML holds the SVG itself, so that its parts can be found and have tooltips; it is never wider than the page. The
output also has `image/svg+xml`, for readers of saved notebooks that strip SVG from HTML.

Ids (of hatches, titles, descriptions) must be unique in the page: a browser uses the first element with an id, and a
hatch in a hidden output paints nothing. Ids made from the content alone are equal where the same picture is shown
twice, so each placement gets its own. (They are UUIDs, which are numbered when a notebook is recorded.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import uuid4

from minillm.errors import ConfigError

NARROW = 600
"""Pictures up to this width are placed side by side where the page has room for two."""
PLOTLY = "application/vnd.plotly.v1+json"


class Drawable(Protocol):
    """Anything with an SVG, which can be shown."""

    def to_svg(self) -> str:
        """The picture."""


class Picture:
    """Mixin for classes with `to_svg`: as the last expression of a notebook cell, the object shows itself."""

    def to_svg(self) -> str:
        """The picture: the same contents give the same bytes."""
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return output(repr(self), [self.to_svg()])


class Chart(Picture):
    """A picture that is also a plotly figure: front ends with plotly show the figure."""

    def to_plotly(self) -> dict[str, object]:
        """The figure as plotly's JSON."""
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {PLOTLY: self.to_plotly(), **super()._repr_mimebundle_()}


def show(picture: Drawable, step: int | None = None) -> None:
    """Show a picture in the middle of a cell. `step`, for a view: show the frame after this step.

    Raises `ConfigError` for the step of a picture without steps, `TraceError` if the trace of a view has no such step.
    """
    from IPython.display import display

    if step is None:
        display(picture)
    elif not hasattr(picture, "steps_to_replay"):
        raise ConfigError(f"step={step} of {picture!r}, which has no steps; only a view of a trace has: leave step out")
    else:
        svg = picture.to_svg(step=step)  # type: ignore[call-arg]
        display(output(repr(picture), [svg]), raw=True)


def output(name: str, pictures: Sequence[str], *, still: bool = True) -> dict[str, str]:
    """A notebook output of SVGs: HTML, `name` as plain text, and with `still` also one SVG document."""
    placed = [place(picture) for picture in pictures]
    data = {"text/plain": name, "text/html": as_html(placed)}
    return data | {"image/svg+xml": stack(placed)} if still else data


def place(picture: str, name: str | None = None) -> str:
    """`picture` with unique ids, which end in `name` (default: a new UUID)."""
    found = re.search(r'aria-labelledby="t-(\S+) ', picture)
    return picture.replace(f"-{found[1]}", f"-{name or uuid4()}") if found else picture


def as_html(pictures: Sequence[str]) -> str:
    """HTML with the pictures below each other; narrow ones are side by side where the page is wide enough."""
    if len(pictures) > 1 and all(size(picture)[0] <= NARROW for picture in pictures):
        boxes = [f'<div style="flex:1 1 {0.9 * w:.0f}px;max-width:{w:g}px">{p}</div>' for p, w in _widths(pictures)]
        return f'<div style="display:flex;flex-wrap:wrap;gap:10px;align-items:flex-start">{"".join(boxes)}</div>'
    gap = '<div style="height:10px"></div>'
    return f"<div>{gap.join(pictures)}</div>"


def stack(pictures: Sequence[str], gap: float = 10) -> str:
    """Several pictures as one SVG document, below each other; narrow ones are side by side."""
    if len(pictures) == 1:
        return pictures[0]
    side_by_side = all(width <= NARROW for _, width in _widths(pictures))
    placed, x, y, width, height = [], 0.0, 0.0, 0.0, 0.0
    for picture in pictures:
        own_width, own_height = size(picture)
        place_at = f'x="{x:g}"' if side_by_side else f'y="{y:g}"'
        placed.append(picture.replace("<svg ", f"<svg {place_at} ", 1))
        width, height = max(width, x + own_width), max(height, y + own_height)
        x, y = (x + own_width + gap, y) if side_by_side else (x, y + own_height + gap)
    root = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    return f'{root} viewBox="0 0 {width:g} {height:g}" style="max-width:100%;height:auto">{"".join(placed)}</svg>'


def size(picture: str) -> tuple[float, float]:
    """Width and height from the picture's `viewBox`."""
    box = picture.split('viewBox="', 1)[1].split('"', 1)[0].split()
    return float(box[2]), float(box[3])


def _widths(pictures: Sequence[str]) -> list[tuple[str, float]]:
    return [(picture, size(picture)[0]) for picture in pictures]
