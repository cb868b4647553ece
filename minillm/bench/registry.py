"""The benchmarks there are. A benchmark is a module of this package with `run() -> dict`, the JSON of its result."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

BENCHMARKS = {
    "decode": "one request, tokens one after the other",
}
"""Module name → what it measures, in a few words."""


def find(name: str) -> Callable[[], dict[str, Any]]:
    """The `run` of a benchmark; its module is imported only now."""
    run: Callable[[], dict[str, Any]] = importlib.import_module(f"minillm.bench.{name}").run
    return run
