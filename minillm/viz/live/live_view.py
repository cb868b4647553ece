"""Views that are updated while the engine runs: one notebook output, redrawn as steps finish, then a replay."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from minillm.errors import ConfigError
from minillm.trace import Event, StepFinished
from minillm.viz.draw.output import output
from minillm.viz.draw.view import View
from minillm.viz.live.replay_widget import ReplayWidget, check_seconds

MIN_INTERVAL = 0.1
"""Seconds between frames: at most 10 frames a second."""
MAX_BYTES_PER_SECOND = 500_000
"""A front end falls behind if it gets more than this, so the frame after one above 50 KB is delayed."""
WAIT_PER_DRAWING = 4
"""The engine waits while a frame is drawn, so the next one is not due until the engine has had 4 times as long."""


class Handle(Protocol):
    """The part of IPython's `DisplayHandle` that is used here."""

    def update(self, obj: dict[str, str], *, raw: bool) -> None:
        """Replace what is shown."""


class LiveView:
    """Shows views in one notebook output while the block runs, and replaces them by a replay at its end.

        with llm.trace() as trace, LiveView(CachePagesView(trace), AcceptanceStrip(trace), seconds=15):
            llm.generate(prompts, params)

    The replay has controls to play, step and choose the speed. It needs no kernel, because a kernel does not respond
    while a cell runs. With `seconds` it plays automatically once it is in view, for about that long. Views of several
    traces end with their last pictures, without a replay. `pause`: seconds to wait after each step, to slow down a fast
    model. Outside a notebook the views are printed in words at the end. A view that cannot be drawn does not stop the
    engine; a warning is issued.
    """

    def __init__(
        self,
        *views: View,
        pause: float = 0.0,
        seconds: float | None = None,
        show: Callable[[dict[str, str]], Handle | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not views:
            raise ConfigError("LiveView() shows nothing; give it at least one view, such as CachePagesView(trace)")
        if not 0 <= pause < 60:
            raise ConfigError(f"pause = {pause} seconds per step; it must be at least 0 and below 60")
        check_seconds(seconds)
        self.views, self.pause, self.seconds = list(views), pause, seconds
        self._show = show or _notebook_display
        self._clock, self._sleep = clock, sleep
        self._handle: Handle | None = None
        self._turn = threading.Lock()
        self._shown = self._running = False
        self._next_frame = 0.0
        self._traces = list({id(view.trace): view.trace for view in views}.values())

    def __enter__(self) -> LiveView:
        self._running = True
        for trace in self._traces:
            trace.watch(self._on_event)
        try:
            self._handle = self._show(self._frame(last=False))
        except Exception as problem:
            _warn(problem)
        self._shown = self._handle is not None
        self._next_frame = self._clock() + MIN_INTERVAL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._turn:  # a frame that another thread draws now is not shown after the last one
            self._running = False
        for trace in self._traces:
            trace.unwatch(self._on_event)
        if self._handle is not None:
            self._draw(last=True)
        elif kind is None and not self._shown:
            try:
                print("\n\n".join(view.describe() for view in self.views))
            except Exception as problem:
                _warn(problem)

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, StepFinished):
            return
        with self._turn:
            if self._running and self._handle is not None and self._clock() >= self._next_frame:
                self._draw(last=False)
        if self.pause and self._running:
            self._sleep(self.pause)

    def _frame(self, *, last: bool) -> dict[str, str]:
        """The notebook output to show now; the `last` one is a replay if there are several steps of one trace."""
        name = " ".join(map(repr, self.views))
        if last and len(self._traces) == 1 and len(self.views[0].steps_to_replay()) > 1:
            autoplay = self.seconds is not None
            replay = ReplayWidget(*self.views, seconds=self.seconds, autoplay=autoplay)
            return {**replay._repr_mimebundle_(), "text/plain": name}
        return output(name, [view.to_svg() for view in self.views], still=last)

    def _draw(self, *, last: bool) -> None:
        started = self._clock()
        try:
            frame = self._frame(last=last)
            self._handle.update(frame, raw=True)
        except Exception as problem:
            self._handle = None
            _warn(problem)
            return
        size = sum(len(part.encode()) for part in frame.values())
        done = self._clock()
        self._next_frame = done + max(MIN_INTERVAL, size / MAX_BYTES_PER_SECOND, WAIT_PER_DRAWING * (done - started))


def _warn(problem: Exception) -> None:
    warnings.warn(f"the live picture stopped: {problem!r}", RuntimeWarning, stacklevel=3)


def in_notebook() -> bool:
    """Whether this runs in a kernel that shows rich output; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def _notebook_display(frame: dict[str, str]) -> Handle | None:
    """Open a notebook output that can be updated; `None` outside a notebook."""
    if not in_notebook():
        return None
    from IPython.display import display

    return display(frame, raw=True, display_id=True)
