"""What is checked before a request is read: its origin, its key and its size. Plain ASGI, so streams pass through
untouched."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import FastAPI, HTTPException
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.serve.http_errors import error_body
from minillm.serve.settings import ServerSettings

GUARDED = "/v1"
"""Paths under this need a key. `/health` and `/metrics` do not, as in vLLM."""


def install_checks(app: FastAPI, settings: ServerSettings) -> None:
    """Let `app` check every request. What is added last runs first: a browser asks whether its page's origin is allowed
    without a key, and its page can read every refusal. (An unexpected error of this server it cannot read.)"""
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(KeyCheck, keys=settings.api_keys)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )


class KeyCheck:
    """Answers 401 unless the request carries one of the keys: `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self.app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # ASGI decoded the bytes as Latin-1, in which a byte of a key may look like white space: "à" is C3 A0 in UTF-8.
        given = _digest(key.strip(" \t").encode("latin-1"))
        # Every key is compared, and digests have one length: the time taken tells nothing about the keys.
        matches = [secrets.compare_digest(given, digest) for digest in self.digests]
        if scheme.lower() == "bearer" and any(matches):
            await self.app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        response = JSONResponse(
            error_body(message, HTTPStatus.UNAUTHORIZED),
            HTTPStatus.UNAUTHORIZED,
            {"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, whether its length was announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            # The body is not read, so the connection cannot carry another request.
            response = JSONResponse(error_body(self._message, status), status, {"Connection": "close"})
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._message, {"Connection": "close"})
            return message

        await self.app(scope, counted, send)

    @property
    def _message(self) -> str:
        limit = f"the limit of {self.max_bytes} bytes"
        return f"the request body is over {limit}; send less, or raise it (`minillm serve --max-body-bytes`)"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
