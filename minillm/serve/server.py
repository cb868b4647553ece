"""The server's process: uvicorn runs the application until it is told to stop, then drains it."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

from minillm.async_llm import AsyncLLM
from minillm.errors import ConfigError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""How long an idle connection stays open. It must be longer than clients keep theirs (httpx 5 s, aiohttp 15 s, requests
and proxies up to a minute): the side that closes first must be the one that would send the next request, or that
request is lost when both happen at once."""


BACKLOG = 2048
"""Connections that wait at most, uvicorn's number."""
OPEN_FILES = 65_535
"""Files that a server may open at once where the system lets it, as in vLLM. A connection is one of them."""
OTHER_FILES = 100
"""Of a server's open files, those that are no connections, and some to spare."""


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


class Server(uvicorn.Server):
    """A server that ends when its engine has failed, so that a service manager starts another one."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLM) -> None:
        super().__init__(config)
        self.engine = engine
        self.has_lost_engine = False
        """Whether the engine had failed before the server was told to stop."""

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Returns whether to stop."""
        self.has_lost_engine = self.engine.errored
        return await super().on_tick(counter) or self.has_lost_engine


def make_server(
    app: FastAPI, engine: AsyncLLM, shutdown_timeout: int | None, log_level: str, access_log: bool
) -> Server:
    """A server for `app`, which serves `engine`.

    On SIGINT or SIGTERM it accepts no more connections and waits for the running requests, at most `shutdown_timeout`
    seconds (None: as long as they take); then it cancels the rest and ends the engine. When the engine has failed, it
    ends by itself.
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
    return Server(config, engine)


def log_config(level: str) -> dict[str, Any]:
    """uvicorn's logging, and minillm's own messages beside it."""
    known = uvicorn.config.LOGGING_CONFIG
    own = {"handlers": ["default"], "level": uvicorn.config.LOG_LEVELS[level]}
    return {**known, "loggers": {**known["loggers"], "minillm": own}}


def allow_open_files(num_requests: int) -> None:
    """Raise this process's limit of open files up to `OPEN_FILES`, and log a warning if it stays too low for
    `num_requests` connections at once. Windows has no such limit."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    with suppress(ValueError, OSError):  # macOS has another limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft < num_requests + OTHER_FILES:
        logger.warning(
            "This process may open %d files at once. Further connections wait before the queue limit of %d requests is "
            "reached: raise the limit of files (ulimit -n), or lower --max-num-queued-reqs.",
            soft,
            num_requests,
        )


def check_log_level(name: str) -> None:
    """Raise `ConfigError` for a level that uvicorn does not have."""
    if name not in uvicorn.config.LOG_LEVELS:
        levels = ", ".join(uvicorn.config.LOG_LEVELS)
        raise ConfigError(f"--uvicorn-log-level {name} must be one of {levels}")


def url_of(host: str, port: int) -> str:
    """Where a server is reached. An IPv6 address is written in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
