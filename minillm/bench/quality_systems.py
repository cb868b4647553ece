"""The systems of `bench quality`: every cache layout and every weight format, by name.

Layouts and schemes that are not listed here are added with their default options, so that none is left out, except for
the layouts that compress a complete prompt: here every token is scored and nothing is a prompt, so they would compress
nothing. `bench zoo` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from minillm import LLM
from minillm.cache.compressed_prompt import CompressedPromptKVCache
from minillm.cache.layouts import LAYOUTS, find_layout
from minillm.cache.paged import PagedKVCache
from minillm.config import CacheConfig
from minillm.engine.assembly import DEFAULT_BLOCK_SIZE
from minillm.models.calibration import calibrate, calibration_rows
from minillm.models.hub import resolve
from minillm.models.loading import load_config
from minillm.models.quantize import (
    Calibration,
    linear_bytes,
    num_weights,
    quantize_model,
    quantize_unembedding,
)
from minillm.quantization.int8 import Int8
from minillm.quantization.schemes import SCHEMES, make_scheme
from minillm.runtime.runner import ModelRunner

REFERENCE = "kv auto"
"""Everything in float32; all others are compared with it."""

LONGEST = 1024
"""Largest context: the rows stay short enough for a minute or two, and the sizes below were chosen for it."""
CACHES: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "kv contiguous": {"kv_cache_config": {"layout": "contiguous"}},
    "kv int8": {"kv_cache_dtype": "int8"},
    "kv int4 g64": {"kv_cache_dtype": "int4", "kv_cache_config": {"group_size": 64}},
    "kv int4": {"kv_cache_dtype": "int4"},
    "kv int4 g16": {"kv_cache_dtype": "int4", "kv_cache_config": {"group_size": 16}},
    "kv kivi r32": {"kv_cache_config": {"layout": "kivi", "residual": 32, "rollback": 0}},
    "kv kivi": {"kv_cache_config": {"layout": "kivi"}},
    "kv kivi r84": {"kv_cache_config": {"layout": "kivi", "residual": 84}},
    "kv window": {"kv_cache_config": {"layout": "window"}},
    "kv window 124": {"kv_cache_config": {"layout": "window", "window": 124}},
    "kv sinks": {"kv_cache_config": {"layout": "sinks"}},
    "kv sinks 4 + 120": {"kv_cache_config": {"layout": "sinks", "window": 120}},
}
"""Name → its options of `LLM`.

`kv kivi r84` takes the same bytes as `kv int4 g16` at a context of 1024. `kv kivi r32` keeps only as many tokens in
full precision as a group needs (1 to 32), which separates the effect of per-channel scales from that of these tokens.
"""

WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights int8": ("int8", {}),
    "weights w8a8": ("w8a8", {}),
    "weights int4": ("int4", {}),
    "weights awq": ("awq", {}),
    "weights squeezellm": ("squeezellm", {}),
}
"""Name → a scheme of `minillm.quantization` and its options."""


@dataclass(frozen=True)
class QualitySystem:
    """One cache layout or weight format to measure."""

    name: str
    kind: Literal["cache", "weights"]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `LLM` for a cache, of the scheme for weights."""
    method: str = ""
    """Name of the quantisation scheme, for weights."""


@dataclass(frozen=True)
class Built:
    """A system that is ready to run, and its bytes."""

    runner: ModelRunner
    num_bytes: float
    """For a cache: bytes of keys and values per token of a request of `context_of` tokens, in a model that runs in
    float16. For weights: bytes of all linears inside the layers."""
    float16_bytes: float
    """The same in float16."""


def systems() -> list[QualitySystem]:
    """All systems that are listed here, then all other layouts and schemes."""
    found = [QualitySystem(name, "cache", options) for name, options in CACHES.items()]
    covered = {find_layout(_cache_config(options)) for options in CACHES.values()}
    for (layout, dtype), made in LAYOUTS.items():
        if made not in covered and not issubclass(made, CompressedPromptKVCache):
            covered.add(made)
            options = {"kv_cache_dtype": dtype, "kv_cache_config": {"layout": layout}}
            found.append(QualitySystem(f"kv {CacheConfig(layout, dtype).name}", "cache", options))
    found += [QualitySystem(name, "weights", options, method) for name, (method, options) in WEIGHTS.items()]
    named = {method for method, _ in WEIGHTS.values()}
    found += [QualitySystem(f"weights {name}", "weights", {}, name) for name in SCHEMES if name not in named]
    return found


def context_of(model: str) -> int:
    """The context that a model is measured with."""
    return min(LONGEST, load_config(resolve(model)).max_position_embeddings)


class Builder:
    """Builds the systems of one model. Calibration results are cached."""

    def __init__(self, model: str, num_rows: int) -> None:
        self.model = model
        self.num_rows = num_rows
        """Number of rows that run at once."""
        self._calibrations: dict[str, Calibration] = {}

    def build(self, system: QualitySystem) -> Built:
        """Build a system. Raises subclasses of `MinillmError` if the model does not support it."""
        return self._cache(system) if system.kind == "cache" else self._weights(system)

    def _cache(self, system: QualitySystem) -> Built:
        cache = _cache_config(system.options)
        layout = find_layout(cache)
        llm = self._llm(layout.whole_sequences, system.options)
        config, context = llm.engine.runner.model.config, llm.max_model_len
        return Built(
            llm.engine.runner,
            layout.bytes_per_block(config, context, torch.float16, **cache.options) / context,
            PagedKVCache.bytes_per_block(config, 1, torch.float16),
        )

    def _weights(self, system: QualitySystem) -> Built:
        scheme = make_scheme(system.method, **system.options)
        llm = self._llm(False, {})
        model = llm.engine.runner.model
        quantize_model(model, scheme, self._calibration(scheme.needs, llm) if scheme.needs else None)
        if isinstance(scheme, Int8):  # as the engine does
            quantize_unembedding(model, Int8())
        return Built(llm.engine.runner, sum(linear_bytes(model).values()), 2 * num_weights(model))

    def _llm(self, whole_sequences: bool, options: Mapping[str, Any]) -> LLM:
        """An engine with enough blocks for all rows, each as long as `context_of` allows."""
        context = context_of(self.model)
        blocks_of_a_row = 1 if whole_sequences else -(-context // DEFAULT_BLOCK_SIZE)
        return LLM(
            self.model,
            device="cpu",
            dtype="float32",
            enforce_eager=True,
            max_model_len=context,
            num_kv_blocks=self.num_rows * blocks_of_a_row,
            **options,
        )

    def _calibration(self, needs: str, llm: LLM) -> Calibration:
        if needs not in self._calibrations:
            rows = calibration_rows(llm.engine.tokenizer)
            self._calibrations[needs] = calibrate(llm.engine.runner.model, rows, needs)
        return self._calibrations[needs]


def _cache_config(options: Mapping[str, Any]) -> CacheConfig:
    return CacheConfig.from_options(options.get("kv_cache_dtype", "auto"), options.get("kv_cache_config"))
