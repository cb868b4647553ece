"""A recorded trace to scrub through in a notebook: play, step, arrow keys, and every frame in words."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from minillm.errors import ConfigError
from minillm.viz.replay_script import SCRIPT, STYLE
from minillm.viz.view import View, bundle

MAX_FRAMES = 240
"""Frames that are drawn at all; drawing each step of a long run would keep the learner waiting."""
MAX_BYTES = 2_000_000
"""Of all frames and descriptions together: they travel to the browser at once, so that scrubbing needs no kernel."""


class ReplayWidget(anywidget.AnyWidget):
    """Shows `views` of one recorded trace, a frame per step, as the last expression of a cell.

        ReplayWidget(CachePagesView(trace))

    If the frames of all steps would be too many or too large (`MAX_FRAMES`, `MAX_BYTES`), evenly spread steps are
    shown, the first and the last among them, and a line says so. `speed` is in frames per second. With `autoplay` it
    plays at once, unless the reader's system asks for reduced motion. A saved notebook shows the last frame wherever
    widgets are not supported. Raises `ConfigError` without a view, for views of different traces, for a speed that
    is not above 0 and at most 30, or if no step has finished.
    """

    _esm = SCRIPT
    _css = STYLE
    # ipywidgets 7 displays through this method and would leave the still picture out.
    _ipython_display_ = None

    frames = traitlets.List(traitlets.Unicode()).tag(sync=True)
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    steps = traitlets.List(traitlets.Int()).tag(sync=True)
    """The step that each frame shows."""
    index = traitlets.Int(0).tag(sync=True)
    """The frame shown now; setting it moves the picture."""
    name = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    speed = traitlets.Float(2.0).tag(sync=True)
    autoplay = traitlets.Bool(False).tag(sync=True)

    def __init__(self, *views: View, speed: float = 2.0, autoplay: bool = False) -> None:
        _check(views, speed)
        every = views[0].steps_to_replay()
        if not every:
            raise ConfigError("there is nothing to replay: no step of the trace has finished; record it first")
        self.views = list(views)
        steps, frames, texts = _frames(self.views, every)
        left_out = f"{len(steps)} of {len(every)} steps, evenly spread" if len(steps) < len(every) else ""
        name = " and ".join(type(view).__name__ for view in views)
        told = {"name": name, "note": left_out, "speed": speed, "autoplay": autoplay}
        super().__init__(frames=frames, texts=texts, steps=steps, **told)

    def __repr__(self) -> str:
        # Constant, so that a notebook's saved output equals a fresh one.
        return f"<Replay of {self.name}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        widget: Any = super()._repr_mimebundle_(**kwargs)
        data, metadata = widget if isinstance(widget, tuple) else (widget or {}, {})
        return {**bundle(self.views, still=True), **data, "text/plain": repr(self)}, metadata


def _check(views: tuple[View, ...], speed: float) -> None:
    traces = {id(view.trace) for view in views}
    if len(traces) != 1:
        problem = f"got views of {len(traces)} traces" if traces else "got no view"
        raise ConfigError(f"ReplayWidget() replays one trace, {problem}; give it a view such as CachePagesView(trace)")
    if not 0 < speed <= 30:
        raise ConfigError(f"speed={speed} frames per second; it must be above 0 and at most 30")


def _frames(views: list[View], every: list[int]) -> tuple[list[int], list[str], list[str]]:
    """Steps, their pictures and their descriptions, as many as fit."""
    steps = _spread(every, MAX_FRAMES)
    frames = {step: "".join(view.to_svg(step) for view in views) for step in steps}
    texts = {step: "\n\n".join(view.describe(step) for view in views) for step in steps}
    sizes = {step: len(frames[step].encode()) + len(texts[step].encode()) for step in steps}
    count = len(steps)
    while len(steps) > 2 and sum(sizes[step] for step in steps) > MAX_BYTES:
        count -= 1
        steps = _spread(list(sizes), count)
    return steps, [frames[step] for step in steps], [texts[step] for step in steps]


def _spread(steps: list[int], count: int) -> list[int]:
    """At most `count` (2 or more) of `steps`, evenly spread, the first and the last among them."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
