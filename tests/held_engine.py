"""An engine that waits at a known place, so that a test acts while a request runs, however fast the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from minillm.async_llm import AsyncLLM
from minillm.trace import StepStarted

PATIENCE_S = 60


@contextmanager
def held(engine: AsyncLLM, num_tokens: int = 99) -> Iterator[Event]:
    """In this block no step goes on once a request has more than `num_tokens` output tokens. After it, steps go on.
    Yields what is set as soon as a step waits."""
    inner, waits, released = engine.llm_engine.engine, Event(), Event()

    def wait(event: Any) -> None:
        if isinstance(event, StepStarted) and any(r.num_output_tokens > num_tokens for r in inner.requests.values()):
            waits.set()
            released.wait(PATIENCE_S)

    with inner.lock:
        inner.listeners.append(wait)
    try:
        yield waits
    finally:
        released.set()
        with inner.lock:
            inner.listeners.remove(wait)
