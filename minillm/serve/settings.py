"""`ServerSettings`: what the server needs to know besides the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from minillm.config import at_least
from minillm.errors import ConfigError

MIB = 1 << 20
MAX_NUM_QUEUED_REQS = 1024
"""Unfinished sequences, waiting and running, that a server takes unless it is told another number."""
ORIGIN = re.compile(
    r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?|null|\*"
)
"""What browsers send as the origin of a page, `null` for one without an address; or `*`."""


@dataclass(frozen=True)
class ServerSettings:
    """Names, limits and keys of one server."""

    model_names: tuple[str, ...]
    """The names that requests may give as `model`; responses carry the first."""
    api_keys: tuple[str, ...] = ()
    """A request under `/v1` must carry one of these as a bearer token. Empty: none is asked for."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Origins of web pages that may use this server (CORS), such as `https://example.org`; `*`: all, as in vLLM."""
    max_body_bytes: int = 4 * MIB
    """Longest request body."""
    max_logprobs: int = 20
    """Most log-probabilities per position that a request may ask for, as in vLLM; -1: as many as it likes."""

    def allows_logprobs(self, number: int) -> bool:
        """Whether a request may ask for so many log-probabilities (-1: for all)."""
        return number >= -1 if self.max_logprobs == -1 else 0 <= number <= self.max_logprobs

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"served model names {self.model_names!r} must be one or more non-empty names")
        if not all(self.api_keys):
            raise ConfigError("an API key is empty; give a key, or leave the option out to ask for none")
        if any(key != key.strip(" \t\r\n") for key in self.api_keys):
            raise ConfigError("an API key begins or ends with white space, which no request can send; remove it")
        for origin in self.allowed_origins:
            if not isinstance(origin, str) or not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed origin {origin!r}: no page has it; write '*' for all, or scheme://host[:port] such as "
                    "'https://example.org', as browsers send it: lower case, no final '/', no default port"
                )
        at_least("max_body_bytes", self.max_body_bytes, 1)
        at_least("max_logprobs", self.max_logprobs, -1)
