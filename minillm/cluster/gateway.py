"""The gateway: the HTTP address of the cluster. It forwards each request to a replica, and again if that one is lost.

    client ──HTTP──▶ gateway ──Serve's router──▶ replica 1 ✗ lost
                        └──────────────────────▶ replica 2 ──▶ the answer, once

A whole answer is sent to the client only when all of it has arrived, so a lost replica's request can be repeated
whatever it asked for. A stream whose client already has text goes on if the text is determined by the request
(`stream_replay`); otherwise it ends with an error event. A request that has lost `MAX_TRIES` replicas is given up: it
may be what ends them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from http import HTTPStatus
from typing import Protocol

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from minillm.cluster.prefix_of_request import PrefixReader
from minillm.cluster.replica import HttpCall, ReplicaSettings, ResponseStart
from minillm.cluster.stream_replay import StreamReplay, can_replay
from minillm.errors import EngineDeadError
from minillm.serve.disconnects import CLOSED_REQUEST, EventStream, unless_disconnected
from minillm.serve.http_errors import ApiError, error_event, install_error_handlers
from minillm.serve.middleware import install_checks
from minillm.serve.responses import END
from minillm.version import __version__

logger = logging.getLogger(__name__)

MAX_TRIES = 3
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""What is forwarded: all, so that the replica says which of them a path takes."""
REPLICA_HEADER = b"x-minillm-replica"
"""Which replica has answered, or has begun to."""
TRIES_HEADER = b"x-minillm-tries"
"""To how many replicas the request was sent until then."""
FORWARDED = b"content-type"
"""The header that replicas get. The key is checked here and stays here."""
PER_CONNECTION = (b"content-length", b"connection")
"""Headers of a replica's answer that the client does not get: they are about the connection, which is the gateway's."""

Answer = AsyncGenerator[ResponseStart | bytes, None]


class ReplicaLost(Exception):
    """The replica ended, or cannot be reached, before its answer was complete."""


class Replicas(Protocol):
    """How the gateway reaches the replicas."""

    def send(self, call: HttpCall) -> Answer:
        """The answer of one replica: its start, then its body. Raises `ReplicaLost`, or `QueueOverflowError`."""


def build_gateway(
    replicas: Replicas, settings: ReplicaSettings, reader: PrefixReader | None, api_keys: tuple[str, ...] = ()
) -> FastAPI:
    """The application that Serve runs at the address of the cluster. `reader`: None if the router needs no hashes."""
    server = settings.server_settings(api_keys)
    app = FastAPI(title="minillm cluster", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    install_checks(app, server)

    @app.get("/metrics")
    async def metrics() -> Response:
        raise ApiError("each replica has metrics of its own; Ray exports those of the cluster", HTTPStatus.NOT_FOUND)

    @app.api_route("/{path:path}", methods=METHODS)
    async def forward(request: Request) -> Response:
        path = request.scope["path"]  # the one that `KeyCheck` has seen
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLOSED_REQUEST)
        hashes = await asyncio.to_thread(reader.block_hashes, path, body) if reader and body else []
        headers = tuple(pair for pair in request.headers.raw if pair[0] == FORWARDED)
        call = HttpCall(request.method, path, headers, body, tuple(hashes))
        return await unless_disconnected(request, Forward(replicas, call).respond())

    return app


class Forward:
    """One request, sent to replicas until one has answered it."""

    def __init__(self, replicas: Replicas, call: HttpCall) -> None:
        self.replicas, self.call = replicas, call
        self.num_tries = 1
        self.answer = replicas.send(call)

    async def respond(self) -> Response:
        """The answer. Raises `ApiError` 503 if replicas are lost `MAX_TRIES` times."""
        try:
            while True:
                try:
                    start = await anext(self.answer)
                    assert isinstance(start, ResponseStart)
                    if _is_stream(start):
                        return self._with_headers(EventStream(self._events(), self.aclose), start)
                    body = b"".join([piece async for piece in self.answer if isinstance(piece, bytes)])
                    return self._with_headers(Response(body, start.status), start)
                except ReplicaLost:
                    await self._try_again()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Abort what has not ended."""
        await self.answer.aclose()

    async def _events(self) -> AsyncIterator[str]:
        """The events of a stream, over as many replicas as it takes. An error is an event, and not raised."""
        replay = StreamReplay() if can_replay(json.loads(self.call.body)) else None
        has_sent = False
        try:
            while True:
                try:
                    async for event in _split_events(self.answer):
                        text = event if replay is None else replay.advance(event)
                        if text is not None:
                            has_sent = True
                            yield text
                        if event == END:
                            return  # a replica that is lost from here on has been lost too late to matter
                    return
                except ReplicaLost:
                    if replay is not None:
                        replay.restart()
                    elif has_sent:
                        raise EngineDeadError(
                            "the replica was lost in the middle of this stream; only greedy or seeded streams without "
                            "log-probabilities go on elsewhere: send the request again"
                        ) from None
                    await self._try_again()
        except Exception as problem:
            yield error_event(problem)
            yield END

    async def _try_again(self) -> None:
        """Send the request to another replica. Raises `ApiError` if it has been sent often enough."""
        await self.answer.aclose()
        logger.warning("A replica was lost during try %d of a request.", self.num_tries)
        if self.num_tries == MAX_TRIES:
            raise ApiError(
                f"{self.num_tries} replicas were lost while they worked on this request; it is given up",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        self.num_tries += 1
        self.answer = self.replicas.send(self.call)

    def _with_headers(self, response: Response, start: ResponseStart) -> Response:
        kept = [pair for pair in start.headers if pair[0] not in PER_CONNECTION]
        length = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
        own = [(REPLICA_HEADER, start.replica.encode()), (TRIES_HEADER, str(self.num_tries).encode())]
        response.raw_headers = [*length, *kept, *own]
        return response


def _is_stream(start: ResponseStart) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start.headers)


async def _split_events(answer: Answer) -> AsyncIterator[str]:
    """The server-sent events of a body, each with its empty line. Raises `EngineDeadError` if it is no stream."""
    rest = b""
    async for piece in answer:
        if not isinstance(piece, ResponseStart):
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                yield f"{event.decode()}\n\n"
        elif not _is_stream(piece):
            raise EngineDeadError(f"the replica was lost, and the next one answered {piece.status}; try again later")
