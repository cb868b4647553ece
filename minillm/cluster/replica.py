"""`Replica`: one engine on one machine of the cluster, behind the HTTP application of `minillm serve`.

Nothing of the API is written a second time: a request arrives as its method, path, headers and body, runs through
`minillm.serve.app` in this process, and the application's answer goes back piece by piece.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.async_llm import AsyncLLM
from minillm.chat_template import ChatTemplate
from minillm.cluster.absolute_paths import absolute_model, with_absolute_models
from minillm.config import EngineArgs, at_least
from minillm.serve.app import build_app
from minillm.serve.settings import MAX_NUM_QUEUED_REQS, ServerSettings

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class HttpCall:
    """A request to forward. `block_hashes`: of its prompt, for the router (`PrefixReader`)."""

    method: str
    path: str
    headers: tuple[Header, ...]
    body: bytes
    block_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ResponseStart:
    """The beginning of an answer; its body follows as bytes."""

    status: int
    headers: tuple[Header, ...]
    replica: str
    """The name of the replica that answers."""


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica is built from, on its own machine: a folder or file named here must be there. Relative paths are
    made absolute, because replicas run in another folder."""

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of `LLM`."""
    model_names: tuple[str, ...] = ()
    """Names that requests may use; none: `model` as it was given."""
    allowed_origins: tuple[str, ...] = ("*",)
    max_num_queued_reqs: int = MAX_NUM_QUEUED_REQS
    """Most unfinished sequences of a replica; a request that would exceed it is answered 503."""
    chat_template: str | None = None

    def __post_init__(self) -> None:
        at_least("max_num_queued_reqs", self.max_num_queued_reqs, 1)
        self.engine_args()
        template = self.chat_template and str(Path(self.chat_template).absolute())
        for name, value in (
            ("model_names", self.model_names or (self.model,)),
            ("model", absolute_model(self.model)),
            ("engine", with_absolute_models(self.engine)),
            ("chat_template", template),
        ):
            object.__setattr__(self, name, value)

    def engine_args(self) -> EngineArgs:
        """The engine's options. Raises `ConfigError`."""
        return EngineArgs.from_options(self.model, self.engine)

    def server_settings(self, api_keys: tuple[str, ...] = ()) -> ServerSettings:
        """The server's settings. Raises `ConfigError`."""
        return ServerSettings(self.model_names, api_keys, self.allowed_origins)


class Replica:
    """The class that Ray Serve starts once per replica."""

    def __init__(self, settings: ReplicaSettings, name: str | None = None) -> None:
        """Load the model. `name`: None for the one that Serve has given this replica."""
        self.name = name or _own_name()
        self.engine = AsyncLLM(settings.engine_args(), max_num_queued_reqs=settings.max_num_queued_reqs)
        template = settings.chat_template and Path(settings.chat_template)
        chats = ChatTemplate(self.engine.llm_engine.engine.tokenizer, settings.model, template or None)
        self.app = build_app(self.engine, settings.server_settings(), chats)

    async def check_health(self) -> None:
        """Called by Serve: a replica whose engine loop has ended is replaced. Raises `EngineDeadError`."""
        await self.engine.check_health()

    async def handle(self, call: HttpCall) -> AsyncIterator[ResponseStart | bytes]:
        """Answer one request: its start, then the pieces of its body. Closing the iterator aborts the request.

        If the engine loop has ended, this process ends, too, so that the gateway sends the request to another replica.
        It could answer 503, but a replica that answers at once is the least loaded one and would get every request
        until Serve's health checks replace it.
        """
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        left = asyncio.Event()
        requests = iter([{"type": "http.request", "body": call.body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for request in requests:
                return request
            await left.wait()
            return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await self.app(_scope(call), receive, messages.put)
            finally:
                messages.put_nowait(None)

        working = asyncio.ensure_future(answer())
        try:
            while (message := await messages.get()) is not None:
                if self.engine.errored:
                    end_process()
                if message["type"] == "http.response.start":
                    yield ResponseStart(message["status"], tuple(message["headers"]), self.name)
                elif message.get("body"):
                    yield message["body"]
            await working  # raises what the application raised
        finally:
            left.set()
            working.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await working

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.shutdown(timeout=5)


def _scope(call: HttpCall) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(call.headers),
    }


def end_process() -> None:
    """End this process at once."""
    os._exit(1)


def _own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
