"""A client that goes away ends its request: work that stops, and streams that close what they read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

CLOSED_REQUEST = 499
"""The status, which is nginx's, for a request whose client went away before the answer. Nobody receives it, and uvicorn
logs no line for it."""


async def unless_disconnected(request: Request, work: Coroutine[object, object, Response]) -> Response:
    """The response that `work` returns. If the client goes away first, `work` is cancelled.

    The body of `request` must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else Response(status_code=CLOSED_REQUEST)
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response of server-sent events. `aclose` is called at its end, however it ends."""

    def __init__(self, events: AsyncIterator[str], aclose: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.aclose = aclose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.aclose()
