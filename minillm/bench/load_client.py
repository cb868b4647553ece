"""`LoadClient`: keeps a server of OpenAI's API busy with a fixed number of requests, and notes when tokens arrive.

It speaks HTTP itself, because it shares the processor with the server that it measures: a client library takes several
times as long per token as reading the bytes does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import MinillmError


class LoadError(MinillmError):
    """The server answered a benchmark's request with an error, or the connection to it broke."""


@dataclass
class Answer:
    """The tokens of one request, and when they arrived."""

    began: float
    """`time.perf_counter` when the request was sent."""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """One per token; tokens of one chunk arrive together."""

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to the first token."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next; 0 within a chunk."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, len(self.arrivals) - 1)


class LoadClient:
    """`concurrent` connections to the server at `url` (such as `http://127.0.0.1:8000/v1`)."""

    def __init__(self, url: str, concurrent: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.host, self.port, self.path = parts.hostname, parts.port, f"{parts.path}/completions"
        self.concurrent = concurrent

    def run(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        """Send all requests, each as soon as a connection is free. Returns their answers, in order.

        Raises `LoadError` if one is refused or fails.
        """
        try:
            return asyncio.run(self._run(bodies))
        except (OSError, EOFError) as problem:
            raise LoadError(
                f"the connection to the server at {self.host}:{self.port} broke ({problem}); see whether it still runs"
            ) from problem

    async def _run(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(bodies))  # shared: each connection takes the next request

        async def work() -> None:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                for number, body in waiting:
                    answers[number] = await self._ask(reader, writer, json.dumps(body).encode())
            finally:
                writer.close()

        await asyncio.gather(*(work() for _ in range(min(self.concurrent, len(bodies)))))
        return [answers[number] for number in range(len(bodies))]

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> Answer:
        head = f"POST {self.path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        answer = Answer(time.perf_counter())
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async for data in _parts(reader):
            for line in data.splitlines():
                if line.startswith((b"data: {", b"{")):
                    now, found = time.perf_counter(), json.loads(line.removeprefix(b"data: "))
                    if found.get("error"):  # in the middle of a stream, whose status was 200
                        raise LoadError(f"the server failed: {found['error']}")
                    for choice in found.get("choices", ()):
                        answer.token_ids += choice["token_ids"]
                        answer.arrivals += [now] * len(choice["token_ids"])
        return answer


async def _parts(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of one HTTP/1.1 response, in the pieces that the server sent."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    if status.split()[1] != "200":
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        raise LoadError(f"the server answered {status}: {body.decode(errors='replace')}")
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
