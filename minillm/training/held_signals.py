"""Signals that wait until a training step is over.

Most of a step on a GPU is one call that waits for the device. When it returns, Python runs the handlers of the signals
that came meanwhile, which raise `KeyboardInterrupt`. Raised there, before the step is counted, it would leave weights
that belong to one step and counters that belong to another: a state that must not be saved.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HELD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM wait inside the block. Yields a function that runs the handler of the one that waits, if
    there is one; the end of the block does the same. An exception that leaves the block is raised in its place.

    A second signal does not wait: its handler runs at once, in place of the first one's. A signal that is ignored, or
    ends the process by default, stays so. In another thread than the main one, which has no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    handlers = {number: handler for number in HELD if callable(handler := signal.getsignal(number))}
    waiting: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if waiting:
            waiting.clear()
            handlers[number](number, frame)
        else:
            waiting.append(number)

    def deliver() -> None:
        for number in tuple(waiting):
            waiting.clear()
            handlers[number](number, None)

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield deliver
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    deliver()
