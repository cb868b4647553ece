"""A real server on a free port, in a thread of the test, and what must be left when nobody uses it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("openai", reason="the extra `dev` is not installed")

import httpx
import openai
import tokenizers
from tokenizers.processors import TemplateProcessing

from minillm.async_llm import AsyncLLM
from minillm.chat_template import ChatTemplate
from minillm.config import EngineArgs
from minillm.serve.app import build_app
from minillm.serve.server import Server, listen, make_server, url_of
from minillm.serve.settings import ServerSettings

NAME = "tiny"
PATIENCE_S = 60


@dataclass(frozen=True)
class RunningServer:
    """A server and what it serves."""

    url: str
    engine: AsyncLLM
    server: Server
    thread: Thread

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """A client that repeats nothing, so that a test sees every answer."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """A plain HTTP request."""
        return httpx.post(f"{self.url}{path}", timeout=PATIENCE_S, **options)

    def wait_until(self, reached: Any) -> None:
        """Wait until `reached()`; fail if it takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Wait until no request is left, then account for every block."""
        inner = self.engine.llm_engine.engine
        self.wait_until(lambda: not self.engine.num_unfinished and not inner.requests)
        with inner.lock:
            inner.scheduler.check_integrity()
            assert inner.pool.num_used == 0
        assert not self.engine.llm_engine.metrics.requests
        assert not self.engine.llm_engine.has_unfinished_requests()


def add_beginning(folder: Path) -> int:
    """Make the tokenizer in `folder` begin every text with a token. Returns its id."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = backend.encode("class").ids[0]
    name = backend.id_to_token(first)
    backend.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, first)])
    backend.save(str(folder / "tokenizer.json"))
    return first


@contextmanager
def running_server(
    folder: Path,
    limit: int | None = None,
    template: Path | None = None,
    settings: dict[str, Any] | None = None,
    shutdown_timeout: int | None = 20,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """A server of the checkpoint in `folder`; at the end every block is accounted for.

    `send_buffer`: bytes that its sockets may hold; None: as many as the system likes.
    """
    args = EngineArgs(str(folder), device="cpu", **{"block_size": 4, "enforce_eager": True, **options})
    engine = AsyncLLM(args, max_num_queued_reqs=limit)
    chats = ChatTemplate(engine.llm_engine.engine.tokenizer, NAME, template)
    app = build_app(engine, ServerSettings((NAME, "other-name"), **(settings or {})), chats)
    listener = listen("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = make_server(app, engine, shutdown_timeout, "warning", access_log=False)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    running = RunningServer(url_of(*listener.getsockname()[:2]), engine, server, thread)
    try:
        running.wait_until(lambda: server.started)
        yield running
        if not engine.errored:
            running.wait_until_idle()
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
