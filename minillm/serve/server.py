"""The server's process: uvicorn runs the application until it is told to stop, then drains it."""

from __future__ import annotations

import os
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from minillm.errors import ConfigError

KEEP_ALIVE_S = 75
"""How long an idle connection stays open. It must be longer than clients keep theirs (httpx 5 s, aiohttp 15 s, requests
and proxies up to a minute): the side that closes first must be the one that would send the next request, or that
request is lost when both happen at once."""


BACKLOG = 2048
"""Connections that wait at most, uvicorn's number."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address, before a model is loaded: connections wait until the server accepts them.
    Port 0: a free one. Raises `ConfigError`."""
    if not host:  # the system would take it for all addresses
        raise ConfigError("--host is empty; write 127.0.0.1, or 0.0.0.0 for every address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":  # on Windows it would let two servers share the port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError, TypeError) as problem:  # TypeError: a host name that IDNA cannot encode
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be listened on ({problem}); choose another --host or --port") from None
    return listener


def make_server(app: FastAPI, shutdown_timeout: int | None, log_level: str, access_log: bool) -> uvicorn.Server:
    """A server for `app`.

    On SIGINT or SIGTERM it accepts no more connections and waits for the running requests, at most `shutdown_timeout`
    seconds (None: as long as they take); then it cancels the rest and ends the engine.
    """
    config = uvicorn.Config(
        app,
        log_config=log_config(log_level),
        log_level=log_level,
        access_log=access_log,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=shutdown_timeout,
        lifespan="on",
    )
    return uvicorn.Server(config)


def log_config(level: str) -> dict[str, Any]:
    """uvicorn's logging, and minillm's own messages beside it."""
    known = uvicorn.config.LOGGING_CONFIG
    own = {"handlers": ["default"], "level": uvicorn.config.LOG_LEVELS[level]}
    return {**known, "loggers": {**known["loggers"], "minillm": own}}


def check_log_level(name: str) -> None:
    """Raise `ConfigError` for a level that uvicorn does not have."""
    if name not in uvicorn.config.LOG_LEVELS:
        levels = ", ".join(uvicorn.config.LOG_LEVELS)
        raise ConfigError(f"--uvicorn-log-level {name} must be one of {levels}")


def url_of(host: str, port: int) -> str:
    """Where a server is reached. An IPv6 address is written in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
