"""The list of benchmarks.

A benchmark is a module of this package with a function `run() -> dict` that returns the result as JSON values. The
options of `run` are those of `minillm bench`. A module may define its own `table(result)` in place of the default one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

BENCHMARKS = {
    "decode": "decode throughput of one request, compared with transformers and llama.cpp",
    "prefill": "time to the first token for prompts of 128, 512 and 1000 tokens (with --shape up to 4000)",
    "latency": "time of one completion: 24 tokens after a prompt of 200, with cold and warm prefix cache",
    "speculation": "every drafting method by kind of text, batch and weights, compared with plain decoding",
    "ablations": "drafters with one idea left out: which share of their drafts is accepted",
    "verify": "one forward over five tokens compared with one over a single token",
    "kernels": "every op by itself: microseconds, bytes, and the share of the machine's measured limits",
    "ladder": "INT8 KV, speculation, paged batching, all: the claims of one article, and the speed here",
    "batch": "32 requests of unequal length: continuous and static batching, in minillm and transformers",
    "completion": "code completion in Jupyter: from a key to the suggestion, first key, next key, and after a burst",
    "serve": "the HTTP server with 32 clients, compared with the offline engine",
    "gpu": "all GPU checks and timings, in under eight minutes",
    "threads": "decoding with 1, 2, 4 and 8 threads, alone, beside busy processes, and under a CPU quota",
    "parallel": "one model split over 1, 2 and 4 processes: time in computing and in waiting for each other",
    "processors": "the compiled step compiled for other processors, compared with PyTorch on the same instructions",
    "quality": "the loss in quality of every quantised cache and weight scheme, compared with float32",
    "beside": "ideas from training and from other layers: memory, errors and times, compared with the plain way",
    "zoo": "every lossy cache technique at equal bytes: perplexity, KL, recall from far back, tokens per second",
}
"""Name → a short description."""
MODULES = {"ablations": "drafter_ablations", "batch": "batching", "serve": "serving", "completion": "keystrokes"}
"""Benchmarks whose module has a different name."""


def find(name: str) -> Callable[..., dict[str, Any]]:
    """Import a benchmark's module. Returns its `run`."""
    run: Callable[..., dict[str, Any]] = _module(name).run
    return run


def find_table(name: str) -> Callable[[dict[str, Any]], RenderableType] | None:
    """The `table` of a benchmark, or None if it uses the default one."""
    return getattr(_module(name), "table", None)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"minillm.bench.{MODULES.get(name, name)}")
