"""A player for a recorded trace in a notebook: play, step, arrow keys, and every frame in words.

The replay is HTML with its own script, not an ipywidget: an ipywidget shows an error as soon as its kernel is gone, but
this replay still plays in a notebook that was saved and opened again. Where scripts do not run (on GitHub), the picture
of the most informative step is shown instead. In a notebook that it does not trust, JupyterLab shows only the words of
that picture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from minillm.errors import ConfigError
from minillm.viz.draw.glyphs import ELLIPSIS, PLACEHOLDER
from minillm.viz.draw.output import as_html, place, stack
from minillm.viz.draw.view import View
from minillm.viz.live.replay_frames import MAX_BYTES, MAX_FRAMES, MAX_SECONDS, MAX_TEXT, STRIDES, pack, spread
from minillm.viz.live.replay_script import SCRIPT, STYLE


class ReplayWidget:
    """Shows `views` of one recorded trace, a frame per step, as the last expression of a cell.

        ReplayWidget(CachePagesView(trace))

    If the frames of all steps are too many or too large, or take too long to draw, it shows evenly spaced steps,
    including the first and the last, and a note says so. If the texts are too large, long ones are shortened in the
    middle. `speed` is in frames per second; `seconds` sets it so that the whole run takes about that long. It opens at
    the most informative step. With `autoplay` it plays from the first step as soon as it is in view, unless the
    reader's system asks for reduced motion. Raises `ConfigError` without a view, for views of different traces, for a
    speed that is not above 0 and at most 30, for `seconds` that are not 1 to 600, or if no step has finished.
    """

    def __init__(self, *views: View, speed: float = 2.0, seconds: float | None = None, autoplay: bool = False) -> None:
        _check(views, speed, seconds)
        every = views[0].steps_to_replay()
        if not every:
            raise ConfigError("there is nothing to replay: no step of the trace has finished; record it first")
        self.views, self.autoplay = list(views), autoplay
        frames = draw_fitting(lambda step: _frame(self.views, step), every)
        self.steps, self.frames = [step for step, _ in frames], [frame for _, frame in frames]
        self.texts = _texts(self.views, self.steps)
        fewer = len(self.steps) < len(every)
        self.note = f"{len(self.steps)} of {len(every)} steps, evenly spread" if fewer else ""
        self.speed = speed if seconds is None else min(30.0, max(0.1, round(len(self.steps) / seconds, 1)))

    @property
    def name(self) -> str:
        """The names of the views, joined by "and"."""
        return " and ".join(type(view).__name__ for view in self.views)

    @property
    def start(self) -> int:
        """Index of the frame it opens with: the last one that is not after the most informative step."""
        telling = self.telling  # looks through the whole history
        return max((i for i, step in enumerate(self.steps) if step <= telling), default=0)

    @property
    def telling(self) -> int:
        """The most informative step, which the still picture shows on any machine, quick or slow."""
        found = (view.most_informative_step() for view in self.views)
        return next((step for step in found if step is not None), self.steps[-1])

    def __repr__(self) -> str:
        # Constant, so that a notebook's saved output equals that of a fresh run.
        return f"<Replay of {self.name}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        name = str(uuid4())
        still = [place(view.to_svg(self.telling), f"{name}-{i}") for i, view in enumerate(self.views)]
        frames, texts = pack(self.frames), pack(self.texts)
        data = {
            "name": self.name,
            "note": self.note,
            "speed": self.speed,
            "autoplay": self.autoplay,
            "start": self.start,
            "steps": self.steps,
            "frames": {"parts": frames.parts, "runs": frames.frames},
            "texts": {"parts": texts.parts, "runs": texts.frames},
        }
        recording = (
            json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
        )
        script = f'<script>({SCRIPT.strip()})("{name}", {recording});</script>'
        contents = f"<style>{STYLE}</style>{as_html(still)}{script}"
        html = f'<div class="minillm-replay-place" data-replay="{name}">{contents}</div>'
        return {"text/plain": repr(self), "text/html": html, "image/svg+xml": stack(still)}


def _check(views: tuple[View, ...], speed: float, seconds: float | None) -> None:
    traces = {id(view.trace) for view in views}
    if len(traces) != 1:
        problem = f"got views of {len(traces)} traces" if traces else "got no view"
        raise ConfigError(f"ReplayWidget() replays one trace, {problem}; give it a view such as CachePagesView(trace)")
    if not 0 < speed <= 30:
        raise ConfigError(f"speed={speed} frames per second; it must be above 0 and at most 30")
    check_seconds(seconds)


def check_seconds(seconds: float | None) -> None:
    """Raise `ConfigError` unless a replay may take this long; None: no length is asked for."""
    if seconds is not None and not 1 <= seconds <= 600:
        raise ConfigError(f"seconds = {seconds} for the replay; it must be 1 to 600, or None")


def _frame(views: list[View], step: int) -> str:
    # Always the same ids, so that frames share the elements that use them; the script makes the ids unique in the page.
    # They hold the placeholder, which no text of a picture can hold.
    return as_html([place(view.to_svg(step), f"{PLACEHOLDER}{i}") for i, view in enumerate(views)])


def _texts(views: list[View], steps: list[int]) -> list[str]:
    """What the views say at each step, shortened in the middle if all of it is too large."""
    texts = ["\n\n".join(view.describe(step) for view in views) for step in steps]
    if pack(texts).num_bytes <= MAX_BYTES:
        return texts
    half = MAX_TEXT // 2
    return [text if len(text) <= MAX_TEXT else f"{text[:half]} {ELLIPSIS} {text[-half:]}" for text in texts]


def draw_fitting(
    draw: Callable[[int], str], every: Sequence[int], clock: Callable[[], float] = time.monotonic
) -> list[tuple[int, str]]:
    """Steps and their frames: as many as fit and are soon drawn, evenly spaced, with the first and the last of `every`.

    Each is drawn once."""
    steps = spread(every, MAX_FRAMES)
    last = len(steps) - 1
    frames: dict[int, str] = {}
    started = clock()
    for stride in STRIDES:
        new = [place for place in sorted({*range(0, last, stride), last}) if place not in frames]
        if frames and (clock() - started) * (1 + len(new) / len(frames)) > MAX_SECONDS:
            break
        frames |= {place: draw(steps[place]) for place in new}
    shown = sorted(frames)
    while len(shown) > 2 and (size := pack([frames[place] for place in shown]).num_bytes) > MAX_BYTES:
        shown = spread(shown, max(2, min(len(shown) - 1, int(len(shown) * MAX_BYTES / size))))
    return [(steps[place], frames[place]) for place in shown]
