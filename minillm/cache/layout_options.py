"""Checks of the options of cache layouts, which are entries of `kv_cache_config`."""

from __future__ import annotations

from typing import Any

from minillm.config import at_least, share
from minillm.errors import ConfigError

MOST = 2**31 - 1
"""The largest value of most options. It is far above any context; an integer beyond int64 could not be compared with
positions."""


def check_at_least(name: str, value: Any, limit: int, most: int = MOST) -> None:
    """Raise `ConfigError` unless the option `name` is an integer of at least `limit`, and at most `most`."""
    at_least(f"kv_cache_config: {name}", value, limit)
    if value > most:
        raise ConfigError(f"kv_cache_config: {name}={value} must be at most {most}")


def check_share(name: str, value: Any) -> None:
    """Raise `ConfigError` unless the option `name` is a number above 0 and at most 1."""
    share(f"kv_cache_config: {name}", value)
