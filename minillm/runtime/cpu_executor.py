"""Runs a decoder's steps through `minillm.ops.cpu`: one compiled call per step, over packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.batch import Segment, logit_rows, tree_masks
from minillm.cache.base import KVCache, StoredRows
from minillm.errors import BROKEN_DRAFTS, NonFiniteLogitsError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.ops.cpu import amx, step
from minillm.ops.cpu.attention import NO_TREE
from minillm.ops.cpu.compiled import showing_progress
from minillm.ops.cpu.launch import Launcher
from minillm.ops.cpu.matrix_fields import OUTPUTS
from minillm.ops.cpu.simd import LANES
from minillm.runtime.packed_decoder import (
    PackedDecoder,
    bits_of,
    empty_aligned,
    packed,
    unsupported_model,
    unsupported_shape,
)
from minillm.runtime.runner import ObservedStep

Rows = tuple[np.ndarray | int, ...]
FORMATS: dict[str, Callable[[Sequence[Tensor]], Rows]] = {
    "float": lambda parts: (parts[0].numpy().reshape(-1) if parts[0].dtype == torch.float32 else bits_of(parts[0]),),
    "int8": lambda parts: (parts[0].numpy().reshape(-1), bits_of(parts[1])),
    "int4": lambda parts: (parts[0].numpy().reshape(-1), bits_of(parts[1]), bits_of(parts[2]), parts[1].shape[-1]),
    "two_level": lambda parts: (
        parts[0].numpy().reshape(-1),
        bits_of(parts[1]),
        bits_of(parts[2]),
        parts[3].numpy().reshape(-1),
        parts[1].shape[-1],
    ),
}
"""Format of `StoredRows` → a function that turns its tensors into arrays. They share the memory of the cache."""
NO_DRAFTS = np.empty((0, 0), np.int64)
NO_ROWS = np.empty(0, np.int64)
NO_QUERIES = NO_SURVIVAL = np.empty(0, np.float32)


def unsupported_reason(model: Decoder, cache: KVCache) -> str | None:
    """Why the compiled step cannot run this model over this cache; None if it can."""
    return unsupported_model(model) or _unsupported_cache(cache) or _unsupported_cache_dtype(cache)


def unsupported_sizes(model: Decoder, cache: KVCache) -> str | None:
    """The reason, if it is the dtype or the sizes of the model, over a cache that the compiled step could read."""
    return None if _unsupported_cache(cache) else unsupported_shape(model)


def _unsupported_cache(cache: KVCache) -> str | None:
    rows = cache.stored_rows()
    if rows is None or rows.format not in FORMATS:
        return (
            f"the compiled step reads keys and values as {', '.join(FORMATS)}; "
            f"{type(cache).__name__} stores them in its own way"
        )
    if cache.ops != type(cache).ops:
        return "an operation of the cache was replaced"
    if rows.group_size % LANES:
        return (
            f"the compiled step reads INT4 groups in multiples of {LANES}, this cache has groups of {rows.group_size}"
        )
    return None


def _unsupported_cache_dtype(cache: KVCache) -> str | None:
    rows = cache.stored_rows()
    if rows is None or rows.format != "float" or rows.keys[0].dtype in (torch.float32, torch.bfloat16):
        return None
    return (
        "the compiled step reads keys and values in float32 or bfloat16, "
        f"{type(cache).__name__} stores them in {str(rows.keys[0].dtype)[6:]}"
    )


class CpuExecutor:
    """One model over one cache. The weights move here, so that they are in memory only once: the model keeps only its
    configuration. The cache stays where it is: the step reads and writes its memory."""

    runs_trees = True
    supports_confidence = True

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        block_size: int,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """`max_num_seqs` and `max_model_len` are ignored: this executor runs steps of any size."""
        config, rows = model.config, cache.stored_rows()
        assert rows is not None
        self.query_shape = config.num_layers, config.num_heads, config.head_dim
        self.packed = p = packed(model)
        self.weights = step.Weights(
            p.layers, p.matrices, p.vectors, p.weights, p.head, p.embedding, p.cos, p.signed_sin
        )
        self.vocab_size, self.block_size = config.vocab_size, block_size
        self.num_outputs = int(p.matrices[-1, OUTPUTS])
        """Width of a row of logits, padding included."""
        self.dims = _dims(self.packed, config, block_size, rows)
        self.keys, self.values = FORMATS[rows.format](rows.keys), FORMATS[rows.format](rows.values)
        self.launcher = Launcher(step.run, step.run_together)
        self.scratch, self.codes = np.zeros(0, np.float32), np.zeros(0, np.uint8)
        self.room = 0, 0
        """The most tokens and threads that the scratch memory has room for: quicker to compare than its size."""
        self.thread_size = int(step.thread_scratch_size(self.dims))
        """Floats of scratch memory for each thread."""

    def warm_up(self) -> str | None:
        """Run a step without tokens, so that numba compiles it for these kinds of weights and cache or loads it from
        disk. It writes nothing to the cache."""
        with showing_progress():
            self.launcher.warm_up(lambda: self.run([]))
        return None

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.run`."""
        return self._logits(self._run(segments, NO_DRAFTS, NO_ROWS, NO_QUERIES))

    def run_observed(self, segments: Sequence[Segment], rows: Sequence[int]) -> ObservedStep:
        """See `ModelRunner.run_observed`."""
        num_layers, *heads = self.query_shape
        queries = torch.empty(num_layers, len(rows), *heads, dtype=torch.float32, device="cpu")
        logits = self._run(segments, NO_DRAFTS, np.array(rows, np.int64), queries.numpy().reshape(-1))
        return ObservedStep(self._logits(logits), self._last_hidden(segments, len(logits)), queries)

    def _logits(self, rows: np.ndarray) -> Tensor:
        """Rows of logits without padding."""
        return torch.from_numpy(rows if self.num_outputs == self.vocab_size else rows[:, : self.vocab_size])

    def _last_hidden(self, segments: Sequence[Segment], count: int) -> Tensor:
        """The `count` rows that the unembedding multiplied in the step that has just run, copied from its scratch
        memory."""
        size = int(self.dims[step.HIDDEN])
        first = int(step.areas.py_func(self.dims, sum(len(s.token_ids) for s in segments))[1])
        return torch.from_numpy(self.scratch[first : first + count * size].copy()).view(count, size)

    def draft(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """See `ModelRunner.draft`. All `count` steps are one compiled call. Raises `NonFiniteLogitsError` if the logits
        of a draft token were NaN or infinite."""
        drafted = np.empty((len(segments), count), np.int64)
        self._run(segments, drafted, NO_ROWS, NO_QUERIES)
        tokens: list[list[int]] = drafted.tolist()
        if any(step.NO_TOKEN in row for row in tokens):
            raise NonFiniteLogitsError(BROKEN_DRAFTS)
        return tokens

    def draft_while_confident(
        self, segments: Sequence[Segment], count: int, survival: Sequence[float], min_survival: float
    ) -> tuple[list[list[int]], list[float]]:
        """See `ModelRunner.draft_while_confident`. All steps are one compiled call, as in `draft`."""
        drafted = np.full((len(segments), count), step.ENDED, np.int64)
        products = np.array(survival, np.float32)
        self._run(segments, drafted, NO_ROWS, NO_QUERIES, products, min_survival)
        tokens: list[list[int]] = drafted.tolist()
        if any(step.NO_TOKEN in row for row in tokens):
            raise NonFiniteLogitsError(BROKEN_DRAFTS)
        return [row[: row.index(step.ENDED)] if step.ENDED in row else row for row in tokens], products.tolist()

    def _run(
        self,
        segments: Sequence[Segment],
        drafted: np.ndarray,
        observed: np.ndarray,
        queries: np.ndarray,
        survival: np.ndarray = NO_SURVIVAL,
        min_survival: float = 0.0,
    ) -> np.ndarray:
        """Run a step. Returns the rows of logits, `[number of wanted rows, num_outputs]`; `drafted`, `survival` and
        `queries` are written as by `step.run`. `observed`: the tokens whose queries are wanted. Raises `IndexError` for
        a block table that is too short: compiled code would read past its end."""
        token_ids, tables, requests, wanted = [], [], [], logit_rows(segments)
        size = self.block_size
        more = max(0, drafted.shape[1] - 1)  # the last draft is not written to the cache
        for s in segments:
            if s.end + more > len(s.block_table) * size:
                raise IndexError(f"{s.end + more} tokens need more than {len(s.block_table)} blocks of {size}")
            count, first = len(s.token_ids), len(token_ids)
            requests.append((first, count, s.end, len(tables), s.num_skipped))
            token_ids += s.token_ids
            tables += s.block_table
        tree = NO_TREE
        if any(s.parents is not None for s in segments):
            depths = [depth for s in segments for depth in s.depths]
            tree = np.array([depths, tree_masks(segments)], np.int64).T.copy()
        ends_early = len(survival) > 0
        kind = len(token_ids).bit_length(), 1 if ends_early else drafted.shape[1]
        threads = self.launcher.threads(kind)
        self._make_room(len(token_ids), threads)
        logits = np.empty((len(wanted), self.num_outputs), np.float32)
        inputs = step.Inputs(
            np.array(token_ids, np.int64),
            np.array(requests, np.int64).reshape(-1, 5),  # also if there is none
            np.array(tables, np.int64),
            tree,
            np.array(wanted, np.int64),
            observed,
        )
        scratch = step.Scratch(self.scratch, self.codes, self.thread_size)
        seconds = self.launcher.call(
            threads, drafted, survival, np.float32(min_survival), self.dims, self.weights, self.keys, self.values,
            inputs, scratch, logits.reshape(-1), queries,
        )  # fmt: skip
        if ends_early:  # compared by the time of one step
            longest = int((drafted != step.ENDED).sum(axis=1).max())
            seconds /= max(1, min(longest + 1, drafted.shape[1]))
        self.launcher.choice.record(kind, threads, seconds)
        return logits

    def _make_room(self, tokens: int, threads: int) -> None:
        """Make the scratch memory large enough for a step."""
        if tokens <= self.room[0] and threads <= self.room[1]:
            return
        tokens, threads = max(tokens, self.room[0]), max(threads, self.room[1])
        self.scratch = empty_aligned(
            int(step.areas.py_func(self.dims, tokens)[-1] + threads * self.thread_size), np.dtype(np.float32)
        )
        self.codes = empty_aligned(-(-tokens // amx.ROWS) * self.packed.widest_codes, np.dtype(np.uint8))
        self.room = tokens, threads


def _dims(p: PackedDecoder, config: ModelConfig, block_size: int, rows: StoredRows) -> np.ndarray:
    """The step's `dims`."""
    return np.array(
        [
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size,
            config.num_layers, block_size, rows.keys[0].shape[1], p.final_norm, p.tied, config.vocab_size,
        ],
        np.int64,
    )  # fmt: skip
