"""`OutputStream`: the outputs of one request, on their way from the engine's thread to the task that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from minillm.errors import MinillmError
from minillm.outputs import RequestOutput


class OutputStream:
    """The outputs of one request, as an asynchronous iterator. Closing it aborts the request.

    Outputs are cumulative, so an output that nobody has taken yet is replaced by the next one: a slow reader costs the
    memory of one output and does not slow the engine down.
    """

    def __init__(self, request_id: str, num_sequences: int, abort: Callable[[OutputStream], None]) -> None:
        self.request_id = request_id
        self.num_unfinished = num_sequences
        """Sequences that have not ended, as far as the event loop has been told."""
        self.loop = asyncio.get_running_loop()
        self.ended = False
        """Whether the engine has finished with the request, or the stream was closed."""
        self.aborted = False
        """Whether the engine's thread was told to end the request by its id."""
        self._abort = abort
        self._ready = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: MinillmError | None = None

    def put(self, output: RequestOutput | None = None, error: MinillmError | None = None) -> None:
        """Called in the event loop: here is the newest output, or the error that ended the request."""
        self._output, self._error = output, error
        self._ready.set()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The newest output. Raises `EngineGenerateError` or `EngineDeadError` if the engine failed, `MinillmError` if
        the id was in use, and `StopAsyncIteration` at the end, or when the stream is closed meanwhile."""
        if self.ended and not self._ready.is_set():
            raise StopAsyncIteration
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        if self._output is None:
            raise StopAsyncIteration
        return self._output

    async def aclose(self) -> None:
        """Abort the request if it has not ended. A task that waits for an output is told that there is none."""
        self._abort(self)
        self.put()
