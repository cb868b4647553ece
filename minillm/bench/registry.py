"""The benchmarks there are.

A benchmark is a module of this package with `run() -> dict`, the JSON of its result. Whatever options `run` has,
`minillm bench` has too. If the usual table does not say what its rows mean, it has a `table(result)` of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

BENCHMARKS = {
    "decode": "one request, tokens one after the other, beside transformers and llama.cpp",
    "prefill": "one prompt of 128, 512 or 1000 tokens (with --shape up to 4000) until its first new token",
    "latency": "24 tokens of code after 200: how long one completion takes, prompt unseen and seen before",
    "verify": "one forward over five tokens against one over a single token",
    "kernels": "every op by itself: microseconds, bytes, and how near that is to what the machine can do",
    "ladder": "INT8 KV, speculation, paged batching, all: what one article claims, and what they give here",
    "batch": "32 requests of unequal length: continuous and static batching, and transformers' two ways",
    "gpu": "all there is to check and to time on a GPU, in under eight minutes",
    "threads": "decoding with 1, 2, 4 and 8 threads on an idle and a busy machine and in a share of one processor",
    "processors": "the compiled step as it is compiled for other processors, beside PyTorch held to theirs",
    "quality": "what fewer bits cost: every quantised cache and weight scheme against float32",
}
"""Module name → what it measures, in a few words."""


def find(name: str) -> Callable[..., dict[str, Any]]:
    """The `run` of a benchmark; its module is imported only now."""
    run: Callable[..., dict[str, Any]] = importlib.import_module(f"minillm.bench.{name}").run
    return run


def find_table(name: str) -> Callable[[dict[str, Any]], Table] | None:
    """The `table` of a benchmark, or None if the usual one will do."""
    return getattr(importlib.import_module(f"minillm.bench.{name}"), "table", None)
