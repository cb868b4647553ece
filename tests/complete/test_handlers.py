"""The server extension in a real Jupyter server: who is let in, what is answered, and what a closed connection ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jupyter_server", reason="the extra `lab` is not installed")

from jupyter_server.serverapp import ServerApp
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets
from tornado.tcpclient import TCPClient

from minillm.complete.completer import Completer
from minillm.errors import CheckpointError, ConfigError
from tests.complete.test_completer import CODE, engine_of
from tests.conftest import TinyPair

TOKEN = "secret"
PATIENCE_S = 60
XSRF = {"Cookie": "_xsrf=00ff", "X-XSRFToken": "00ff"}
"""What a page of this server sends, so that only the missing token can be the reason of a refusal."""
pytestmark = pytest.mark.timeout(120)


class Jupyter:
    """A Jupyter server with the extension, in this thread's event loop."""

    def __init__(self, app: ServerApp, port: int, completer: Completer) -> None:
        self.app, self.port, self.completer = app, port, completer

    async def ask(self, path: str, body: Any = None, token: str | None = TOKEN) -> HTTPResponse:
        """GET, or POST with a body."""
        return await AsyncHTTPClient().fetch(
            f"http://127.0.0.1:{self.port}/minillm/complete{path}",
            method="GET" if body is None else "POST",
            body=body if body is None or isinstance(body, str | bytes) else json.dumps(body),
            headers={**XSRF, **({"Authorization": f"token {token}"} if token else {})},
            raise_error=False,
            request_timeout=PATIENCE_S,
        )

    async def open(self, body: dict[str, Any]) -> IOStream:
        """A connection on which a request has been sent and whose answer nobody reads."""
        stream = await TCPClient().connect("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = f"POST /minillm/complete HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: token {TOKEN}\r\n"
        await stream.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return stream


async def until(reached: Callable[[], bool]) -> None:
    """Wait for it; pytest's own limit ends the wait."""
    while not reached():
        await asyncio.sleep(0.002)


def served(
    tiny: TinyPair,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: Callable[[Jupyter], Awaitable[None]],
    load: Callable[[], Any] | None = None,
) -> None:
    """Run `job` against a server whose completer has the tiny pair. At the end the engine is empty."""
    completer = Completer(load or (lambda: engine_of(tiny)))
    monkeypatch.setattr("minillm.complete.completer.Completer", lambda: completer)
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    monkeypatch.setenv("JUPYTER_NO_CONFIG", "1")

    async def main() -> None:
        app = ServerApp(
            root_dir=str(folder),
            allow_root=True,
            open_browser=False,
            jpserver_extensions={"minillm.complete": True},
            log_level=50,
        )
        app.initialize(argv=[f"--IdentityProvider.token={TOKEN}"], new_httpserver=False)
        sockets = bind_sockets(0, "127.0.0.1")
        server = HTTPServer(app.web_app)
        server.add_sockets(sockets)
        try:
            await job(Jupyter(app, sockets[0].getsockname()[1], completer))
            if completer.engine is not None:
                await until(lambda: completer.engine.num_unfinished == 0)
        finally:
            server.stop()
            completer.shutdown()
            await app._cleanup()

    try:
        asyncio.run(main())
    finally:
        ServerApp.clear_instance()
    if completer.engine is not None:
        inner = completer.engine.llm_engine.engine
        inner.scheduler.check_integrity()
        assert inner.pool.num_used == 0 and not inner.requests


def test_without_the_token_nothing_is_answered(tiny, tmp_path, monkeypatch) -> None:
    async def job(jupyter: Jupyter) -> None:
        for token in (None, "wrong"):
            assert (await jupyter.ask("", {"prefix": CODE}, token)).code == 403
            assert (await jupyter.ask("/panel", token=token)).code == 403
        assert jupyter.completer.engine is None, "and nothing is loaded"

    served(tiny, tmp_path, monkeypatch, job)


def test_a_request_is_answered_with_a_suggestion_and_the_panel_draws_it(tiny, tmp_path, monkeypatch) -> None:
    async def job(jupyter: Jupyter) -> None:
        assert "Nothing has been completed" in json.loads((await jupyter.ask("/panel")).body)["html"]
        answer = await jupyter.ask("", {"prefix": CODE, "max_tokens": 8})
        found = json.loads(answer.body)
        assert answer.code == 200 and found["new_tokens"] == 8 and isinstance(found["text"], str)
        html = json.loads((await jupyter.ask("/panel")).body)["html"]
        assert "8 tokens in" in html and html.count("<svg") == 2

    served(tiny, tmp_path, monkeypatch, job)


def test_the_page_is_told_whether_suggestions_are_on(tiny, tmp_path, monkeypatch) -> None:
    async def job(jupyter: Jupyter) -> None:
        assert jupyter.app.web_app.settings["page_config_data"]["minillmComplete"] == expected

    expected = "off"
    served(tiny, tmp_path, monkeypatch, job)
    monkeypatch.setenv("MINILLM_COMPLETE", "0")
    served(tiny, tmp_path, monkeypatch, job)
    monkeypatch.setenv("MINILLM_COMPLETE", "1")
    expected = "on"
    served(tiny, tmp_path, monkeypatch, job)


def test_a_closed_connection_ends_its_request(tiny, tmp_path, monkeypatch) -> None:
    """The engine's steps wait until the connection is closed, so the request cannot have ended by itself."""

    async def job(jupyter: Jupyter) -> None:
        await jupyter.ask("", {"prefix": CODE, "max_tokens": 1})
        engine = jupyter.completer.engine
        finished = jupyter.completer.newest
        with engine.llm_engine.engine.lock:
            stream = await jupyter.open({"prefix": CODE + "\n", "max_tokens": 100})
            await until(lambda: engine.num_unfinished == 1)
            stream.close()
            await until(lambda: engine.num_unfinished == 0)
        assert jupyter.completer.newest is finished
        assert (await jupyter.ask("", {"prefix": CODE, "max_tokens": 4})).code == 200

    served(tiny, tmp_path, monkeypatch, job)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("{", 400, "Input data was truncated"),
        (b'{"prefix": "\xff"}', 400, "utf-8"),
        ({}, 400, "prefix"),
        ({"prefix": 3}, 400, "Expected `str`"),
        ({"prefix": "x", "model": "y"}, 400, "unknown field `model`"),
        ({"prefix": "  "}, 400, "no code before the cursor"),
        ({"prefix": "x", "max_tokens": 999}, 400, "max_tokens=999 must be from 1 to 256"),
        ({"prefix": "x" * (5 << 20)}, 413, "the limit is 4,194,304"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(tiny, tmp_path, monkeypatch, body, code, message) -> None:
    async def job(jupyter: Jupyter) -> None:
        for _ in range(2):  # before the model is loaded, and after it
            answer = await jupyter.ask("", body)
            assert answer.code == code and message in json.loads(answer.body)["error"]
            await jupyter.ask("", {"prefix": CODE, "max_tokens": 1})

    served(tiny, tmp_path, monkeypatch, job)


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError])
def test_a_missing_model_is_named(tiny, tmp_path, monkeypatch, kind) -> None:
    def load() -> None:
        raise kind("no bundled model is called <minimus>")

    async def job(jupyter: Jupyter) -> None:
        answer = await jupyter.ask("", {"prefix": CODE})
        assert answer.code == 503 and "<minimus>" in json.loads(answer.body)["error"]
        answer = await jupyter.ask("", {"prefix": CODE, "max_tokens": 0})
        assert answer.code == 400 and "max_tokens=0" in json.loads(answer.body)["error"], "the fault of the request"
        html = json.loads((await jupyter.ask("/panel")).body)["html"]
        assert "could not be loaded" in html and "&lt;minimus&gt;" in html

    served(tiny, tmp_path, monkeypatch, job, load)


def test_the_engine_ends_with_jupyter(tiny, tmp_path, monkeypatch) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr("minillm.complete.extension.atexit", SimpleNamespace(register=ends.append))

    async def job(jupyter: Jupyter) -> None:
        [end] = ends
        end()
        assert jupyter.completer.engine is None, "nothing is loaded at the end"
        await jupyter.ask("", {"prefix": CODE, "max_tokens": 1})
        assert not jupyter.completer.engine.errored
        end()
        assert jupyter.completer.engine.errored

    served(tiny, tmp_path, monkeypatch, job)


def test_an_engine_that_fails_is_told_and_goes_on(tiny, tmp_path, monkeypatch) -> None:
    async def job(jupyter: Jupyter) -> None:
        await jupyter.ask("", {"prefix": CODE, "max_tokens": 1})
        runner = jupyter.completer.engine.llm_engine.engine.runner
        with monkeypatch.context() as patch:
            patch.setattr(runner, "run", lambda *args, **options: 1 / 0)
            answer = await jupyter.ask("", {"prefix": CODE, "max_tokens": 4})
        assert answer.code == 503 and "ZeroDivisionError" in json.loads(answer.body)["error"]
        assert (await jupyter.ask("", {"prefix": CODE, "max_tokens": 4})).code == 200

    served(tiny, tmp_path, monkeypatch, job)
