"""One request on one cache, as `bench zoo` runs it: read a prompt, then its continuation; count bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.batch import Batch, Segment
from minillm.bench.zoo_systems import Options
from minillm.cache.anchors import AnchorsKVCache
from minillm.cache.layouts import find_layout
from minillm.cache.paged import PagedKVCache
from minillm.config import CacheConfig
from minillm.models.calibration import CalibrationTexts
from minillm.models.decoder import Decoder
from minillm.runtime.runner import ModelRunner

BLOCK_SIZE = 16
CPU = torch.device("cpu")
ONE_BY_ONE = 16
"""Tokens of a continuation that are decoded one by one and timed; those before them run in one step."""
MIN_THRESHOLD, MAX_THRESHOLD, NUM_HALVINGS = 1e-30, 64.0, 14
"""Where a threshold of Squeezed Attention is looked for, and how often the interval is halved, on a logarithmic scale.
A centroid's threshold may be many orders of magnitude below the mean weight, and the last interval is 0.5% wide."""


@dataclass(frozen=True)
class Continuation:
    """What a model predicts behind a prompt."""

    logprobs: Tensor
    """`[len(row) - prompt_len - 1, vocab]`, fp32: of all tokens from the second one behind the prompt on."""
    seconds: list[float]
    """Processor time of each token that was decoded by itself."""


def build(
    options: Mapping[str, Any],
    model: Decoder,
    length: int,
    dtype: torch.dtype = torch.float32,
    texts: CalibrationTexts | None = None,
) -> ModelRunner:
    """A runner with a cache of these options of `LLM` for one request of `length` tokens. `texts`: see
    `KVCache.prepare`.

    Raises subclasses of `MinillmError` if the model does not support it.
    """
    chosen = CacheConfig.from_options(options.get("kv_cache_dtype", "auto"), options.get("kv_cache_config"))
    layout = find_layout(chosen)
    block_size = length if layout.whole_sequences else BLOCK_SIZE
    cache = layout(model.config, -(-length // block_size), block_size, dtype, CPU, **chosen.options)
    cache.prepare(model, texts)
    return ModelRunner(model, cache, block_size)


def read_prompt(runner: ModelRunner, row: Sequence[int], prompt_len: int) -> None:
    """Run the first `prompt_len` tokens of `row`, in the place of what the cache held before."""
    _run(runner, row, 0, prompt_len, prompt_len)


def continuation(
    runner: ModelRunner, row: Sequence[int], prompt_len: int, one_by_one: int = ONE_BY_ONE
) -> Continuation:
    """Feed what follows the prompt, the true token at every position, the last `one_by_one` tokens each in a step."""
    last = len(row) - 1  # its own prediction has no token to be compared with
    together = max(prompt_len, last - one_by_one)
    found, seconds = [], []
    if together > prompt_len:
        found.append(_run(runner, row, prompt_len, together, prompt_len))
    for at in range(together, last):
        began = time.process_time()
        found.append(_run(runner, row, at, at + 1, prompt_len))
        seconds.append(time.process_time() - began)
    return Continuation(torch.cat(found).float().log_softmax(-1), seconds)


def _run(runner: ModelRunner, row: Sequence[int], start: int, end: int, prompt_len: int) -> Tensor:
    table = list(range(-(-len(row) // runner.block_size)))
    count = 1 if start < prompt_len else end - start
    return runner.run([Segment(row[start:end], start, table, count, num_prompt_tokens=prompt_len)])


class _FewTokens(CalibrationTexts):
    """Calibration text where only sizes matter: training takes no time, and the sizes are the same."""

    def __init__(self) -> None:
        pass

    def rows(self) -> list[list[int]]:
        return [list(range(64))]

    def ids_with(self, text: bytes) -> list[int]:
        return []


@torch.inference_mode()
def stored_bytes(options: Mapping[str, Any], model: Decoder, prompt_len: int) -> tuple[int, int]:
    """Bytes in float16 that a complete prompt takes, and the cache's `model_bytes`: counted on a cache that has been
    filled with random keys and values."""
    runner, shape = build(options, model, prompt_len, torch.float16, _FewTokens()), model.config
    cache, generator = runner.cache, torch.Generator().manual_seed(0)
    positions = torch.arange(prompt_len)
    tables = torch.tensor([list(range(-(-prompt_len // runner.block_size)))])
    ends = [prompt_len]
    batch = Batch(positions, positions, positions, tables, [0, *ends], ends, runner.block_size, prompt_lens=[*ends])
    for layer in range(shape.num_layers):
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = (torch.randn(prompt_len, n, shape.head_dim, generator=generator).half() for n in heads)
        cache.attend(layer, q, k, v, batch)
    return cache.num_bytes, cache.model_bytes


def float16_bytes(cache: AnchorsKVCache) -> int:
    """Bytes that a float32 cache would hold in float16, in which only keys and values are smaller."""
    rows = [part for request in cache.requests.values() for part in (*request.keys, *request.values)]
    return cache.num_bytes - sum(part.nbytes for part in rows) // 2


def plain_bytes(model: Decoder, prompt_len: int) -> int:
    """Bytes of the keys and values of `prompt_len` tokens in float16."""
    return PagedKVCache.bytes_per_block(model.config, prompt_len, torch.float16)


def share_read(runner: ModelRunner, prompt_len: int) -> float:
    """The share of a prompt's bytes that a decode step over layout `squeezed` has read: the window, the rows of kept
    clusters, the centroids (of keys only, so half a row each)."""
    cache: Any = runner.cache
    window = cache.window / prompt_len
    return window + (1 - window) * (cache.share_read + cache.cluster_share / 2)


def calibrated(options: Options, budget: float, model: Decoder, rows: Sequence[list[int]], prompt_len: int) -> Options:
    """The options of layout `squeezed` with the threshold at which queries behind the prompts of `rows` read a share of
    `budget` on average. Found by halving on a logarithmic scale, since most keys get a minute weight; prompts are
    computed once."""
    config = dict(options["kv_cache_config"])
    runners = [build(options, model, len(row)) for row in rows]
    for runner, row in zip(runners, rows, strict=True):
        read_prompt(runner, row, prompt_len)
    low, high = MIN_THRESHOLD, MAX_THRESHOLD
    for _ in range(NUM_HALVINGS):
        middle, shares = math.sqrt(low * high), []
        for runner, row in zip(runners, rows, strict=True):
            cache: Any = runner.cache
            cache.threshold = middle
            cache.rows_read.zero_()
            continuation(runner, row, prompt_len, one_by_one=0)
            shares.append(share_read(runner, prompt_len))
        low, high = (middle, high) if sum(shares) > budget * len(shares) else (low, middle)
    return {**options, "kv_cache_config": {**config, "threshold": high}}
