"""The HTTP handlers: a completion per key, and the panel. Both answer JSON; errors have `error`, a sentence."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from functools import cached_property
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from minillm.errors import MinillmError, PromptError

if TYPE_CHECKING:
    from minillm.complete.completer import Completer

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
NO_CONTENT, BAD_REQUEST, TOO_LARGE, UNAVAILABLE = 204, 400, 413, 503


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for a completion."""

    prefix: str
    """The code before the cursor."""
    suffix: str = ""
    """The code after it."""
    max_tokens: int = 24


COMPLETER = "minillm.complete.completer"


class LazyCompleter:
    """The `Completer` of this server. It and the engine are imported when it is first asked for, in the event loop: two
    threads that ask at once would make two of them."""

    @property
    def is_there(self) -> bool:
        """Whether it has been asked for."""
        return "completer" in vars(self)

    @cached_property
    def completer(self) -> Completer:
        """The completer."""
        from minillm.complete.completer import Completer

        return Completer()

    def shutdown(self) -> None:
        """End the engine, if there is one, after the running step."""
        if self.is_there:
            self.completer.shutdown()


class _Handler(APIHandler):
    """Knows the completer."""

    auth_resource = "contents"
    """Who may read notebooks may have their code completed."""

    def initialize(self, completer: LazyCompleter) -> None:
        """Called by tornado with the options of the address."""
        self.lazy = completer


class CompletionHandler(_Handler):
    """`POST /minillm/complete`: a `CompletionBody` in, a `Suggestion` out. A closed connection aborts the request."""

    _running: asyncio.Task[Any] | None = None

    @web.authenticated
    @authorized("read")
    async def post(self) -> None:
        """Answer with the suggestion, or with status 400 (the request), 413 (its size) or 503 (the engine)."""
        self._running = asyncio.ensure_future(self._answer())
        try:
            status, answer = await self._running
        except asyncio.CancelledError:
            self.set_status(NO_CONTENT)  # nobody receives it, and Jupyter logs errors: one line per key
            return
        self.set_status(status)
        self.finish(msgspec.json.encode(answer))

    def on_connection_close(self) -> None:
        """Called by tornado: the client has left, which the front end does at the next key."""
        if self._running is not None:
            self._running.cancel()
        super().on_connection_close()

    async def _answer(self) -> tuple[int, dict[str, Any]]:
        from minillm.complete.prompt import Gap

        body = self.request.body
        if len(body) > MAX_BODY_BYTES:
            return TOO_LARGE, _error(f"the code has {len(body):,} bytes; the limit is {MAX_BODY_BYTES:,}; split it")
        try:
            asked = msgspec.json.decode(body, type=CompletionBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            return BAD_REQUEST, _error(problem)
        try:
            await asyncio.to_thread(import_module, COMPLETER)  # the first time it imports PyTorch, which takes seconds
            found = await self.lazy.completer.complete(Gap(asked.prefix, asked.suffix), asked.max_tokens)
        except PromptError as problem:
            return BAD_REQUEST, _error(problem)
        except MinillmError as problem:
            return UNAVAILABLE, _error(problem)
        except Exception as problem:
            logger.exception("The completion failed.")
            return UNAVAILABLE, _error(f"the engine failed: {type(problem).__name__}: {problem}")
        return 200, asdict(found)


class PanelHandler(_Handler):
    """`GET /minillm/complete/panel`: the HTML of how the newest suggestion was made."""

    @web.authenticated
    @authorized("read")
    async def get(self) -> None:
        """Draw it in a thread of its own. The front end asks when nobody types."""
        self.finish(msgspec.json.encode({"html": await self._html()}))

    async def _html(self) -> str:
        if not self.lazy.is_there:
            return "<p>Nothing has been completed yet. The model is loaded at the first key.</p>"
        completer = self.lazy.completer
        if completer.is_loading:
            return "<p>The model is being loaded.</p>"
        if completer.load_error is not None:
            return f"<p>The model could not be loaded: {escape(str(completer.load_error))}</p>"
        if completer.newest is None:
            return "<p>Nothing has been completed yet.</p>"
        from minillm.complete.pictures import panel_html

        return await asyncio.to_thread(panel_html, *completer.newest)


def _error(problem: object) -> dict[str, str]:
    return {"error": str(problem)}
