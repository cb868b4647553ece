"""The benchmarks there are.

A benchmark is a module of this package with `run() -> dict`, the JSON of its result. If its rows are not speeds, it has
a `table(result)` of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

BENCHMARKS = {
    "decode": "one request, tokens one after the other",
    "batch": "32 requests of unequal length: continuous and static batching, and transformers' two ways",
    "quality": "what fewer bits cost: every quantised cache and weight scheme against float32",
}
"""Module name → what it measures, in a few words."""


def find(name: str) -> Callable[[], dict[str, Any]]:
    """The `run` of a benchmark; its module is imported only now."""
    run: Callable[[], dict[str, Any]] = importlib.import_module(f"minillm.bench.{name}").run
    return run


def find_table(name: str) -> Callable[[dict[str, Any]], Table] | None:
    """The `table` of a benchmark, or None if the usual one will do."""
    return getattr(importlib.import_module(f"minillm.bench.{name}"), "table", None)
