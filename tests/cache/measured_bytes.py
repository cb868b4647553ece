"""Run as a program: how many bytes each cache layout really takes, told by the operating system.

    python -m tests.cache.measured_bytes
    {"layout": "PagedInt8KVCache", "claimed": 25952256, "measured": 25968640, "promised": 25952256}

Each class has a line, and a process of its own: a fork of this one, which has imported PyTorch and nothing more. The
cache is filled through `attend`, as the engine does, so that every page of memory it holds has been written to.
`promised` is `bytes_per_block` times the number of blocks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from minillm.batch import Batch
from minillm.cache.layouts import LAYOUTS
from minillm.models.calibration import CalibrationTexts
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder

REQUESTS, CONTEXT, BLOCK = 24, 512, 16
PROMPT = 450
"""Tokens of each request that are its prompt, for layouts that compress it."""
CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=1024,
    intermediate_size=64,
    num_layers=1,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    max_position_embeddings=CONTEXT,
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
REUSED_BYTES = 64 << 20
"""Scratch memory of fewer bytes is used again and not mapped anew by every call, which would take most of the time."""
OPTIONS: dict[str, dict[str, Any]] = {"window": {"window": 350}, "sinks": {"window": 350}, "commvq": {"bits": 4}}


class SomeTexts(CalibrationTexts):
    """Every token once, and a line ends at every tenth."""

    def __init__(self) -> None:
        pass

    def rows(self) -> list[list[int]]:
        return [list(range(CONFIG.vocab_size))]

    def ids_with(self, text: bytes) -> list[int]:
        return list(range(0, CONFIG.vocab_size, 10))


def resident_bytes() -> int:
    """What this process holds in memory now, free memory given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1]
    return int(fields.split()[0]) * 1024


def prompt(place: int, past: int, count: int, whole: bool) -> Batch:
    """A step that appends `count` tokens to the request at `place`."""
    size = CONTEXT if whole else BLOCK
    table = [place] if whole else list(range(place * CONTEXT // BLOCK, (place + 1) * CONTEXT // BLOCK))
    positions = torch.arange(past, past + count)
    return Batch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=positions,
        slot_mapping=place * CONTEXT + positions,
        block_tables=torch.tensor([table]),
        query_start=[0, count],
        seq_lens=[past + count],
        block_size=size,
        prompt_lens=[PROMPT],
    )


@torch.inference_mode()
def measure(layout: str, dtype: str) -> dict[str, int]:
    """Fill a cache of that layout and compare what it says with what the system says."""
    kind, options = LAYOUTS[layout, dtype], OPTIONS.get(layout, {})
    size = CONTEXT if kind.whole_sequences else BLOCK
    num_blocks = REQUESTS * CONTEXT // size
    model = Decoder(CONFIG)
    q = k = v = torch.randn(CONTEXT // 4, CONFIG.num_kv_heads, CONFIG.head_dim)

    def fill(requests: int) -> Any:
        cache = kind(CONFIG, num_blocks, size, torch.float32, torch.device("cpu"), **options)
        cache.prepare(model, SomeTexts())
        for place in range(requests):
            for past in range(0, CONTEXT, len(k)):
                cache.attend(0, q, k, v, prompt(place, past, len(k), kind.whole_sequences))
        return cache

    fill(2)  # whatever is made once only, threads and scratch memory among it
    before = resident_bytes()
    cache = fill(REQUESTS)
    measured = resident_bytes() - before - cache.model_bytes
    promised = num_blocks * kind.bytes_per_block(CONFIG, size, torch.float32, **options)
    return {"claimed": cache.num_bytes, "measured": measured, "promised": promised}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(threshold, REUSED_BYTES)
    for name, kind in LAYOUTS.items():
        if not (child := os.fork()):
            print(json.dumps({"layout": kind.__name__, **measure(*name)}), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(f"{kind.__name__} ended with {status}")
