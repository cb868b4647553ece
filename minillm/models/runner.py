"""Runs one model over one ragged step: turns requests into a `Batch`, and hidden states into the logits asked for.

That is the plain way, one PyTorch operation after the other. `speed_up` has an executor run the same step faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm.cache.base import Batch, KVCache
from minillm.models.decoder import Decoder


@dataclass(frozen=True)
class Segment:
    """The new tokens of one request: `token_ids` at positions `start, start + 1, …`."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int = 1
    """Logits are returned for the last that many tokens."""


class Executor(Protocol):
    """A faster way of running the steps of one model over one cache."""

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.run`."""

    def draft(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """See `ModelRunner.draft`."""


class ModelRunner:
    """A model and the cache it writes to."""

    def __init__(self, model: Decoder, cache: KVCache, block_size: int) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self.device = model.embed_tokens.weight.device
        self.executor: Executor | None = None
        """What runs the steps; None: PyTorch, operation by operation."""

    def speed_up(self, max_num_seqs: int = 1, max_model_len: int | None = None) -> str | None:
        """Run steps through an executor from now on: on a CPU compiled, and the model's weights move there; on a GPU in
        kernels and CUDA graphs.

        `max_num_seqs`: requests that a step may have; `max_model_len`: tokens that one may grow to, None for the
        model's context. They are what an executor may prepare for, and steps keep within them.

        Returns why not, if none can run this model over this cache; then nothing has changed.
        """
        if self.device.type == "cuda":
            return self._speed_up_on_gpu(max_num_seqs, max_model_len or self.model.config.max_position_embeddings)
        if self.device.type != "cpu":
            return f"there is no executor for {self.device.type}"
        try:
            from minillm.models import cpu_executor  # brings numba, which takes half a second to import
        except ImportError as problem:
            return f"numba cannot be imported ({problem})"
        reason = cpu_executor.why_not(self.model, self.cache)
        if reason is None:
            self.executor = cpu_executor.CpuExecutor(self.model, self.cache, self.block_size)
        return reason

    def _speed_up_on_gpu(self, max_num_seqs: int, max_model_len: int) -> str | None:
        try:
            from minillm.models import gpu_executor  # brings Triton
        except ImportError as problem:
            return f"Triton cannot be imported ({problem})"
        reason = gpu_executor.why_not(self.model, self.cache)
        if reason is not None:
            return reason
        executor = gpu_executor.GpuExecutor(self.model, self.cache, self.block_size, max_num_seqs, max_model_len)
        reason = executor.try_out()
        if reason is None:
            self.executor = executor
        return reason

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment]) -> Tensor:
        """One forward. Returns `[sum of num_logits, vocab]` in the order of `segments`."""
        if self.executor is not None:
            return self.executor.run(segments)
        batch = self.batch(segments)
        hidden = self.model(batch.token_ids, batch.positions, self.cache, batch)
        rows = [
            row
            for segment, end in zip(segments, batch.query_start[1:], strict=True)
            for row in range(end - segment.num_logits, end)
        ]
        if len(rows) < hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=self.device)]
        return self.model.logits(hidden)

    def draft(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """The `count` tokens that follow each segment if the likeliest is taken every time.

        Each segment wants one row of logits, and its block table has room for `count` - 1 tokens more.
        """
        if self.executor is not None:
            return self.executor.draft(segments, count)
        return self.draft_step_by_step(segments, count)

    def draft_step_by_step(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """As `draft`, with one forward for each token."""
        tokens: list[list[int]] = [[] for _ in segments]
        for _ in range(count):
            for row, token in zip(tokens, self.run(segments).argmax(-1).tolist(), strict=True):
                row.append(token)
            segments = [
                Segment(row[-1:], s.start + len(s.token_ids), s.block_table)
                for s, row in zip(segments, tokens, strict=True)
            ]
        return tokens

    def batch(self, segments: Sequence[Segment]) -> Batch:
        """Lay the segments side by side."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start, seq_lens = [0], []
        for segment in segments:
            end = segment.start + len(segment.token_ids)
            token_ids += segment.token_ids
            positions += range(segment.start, end)
            slots += [
                segment.block_table[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(segment.start, end)
            ]
            query_start.append(len(token_ids))
            seq_lens.append(end)
        widest = max(len(segment.block_table) for segment in segments)
        tables = [[*s.block_table, *[s.block_table[0]] * (widest - len(s.block_table))] for s in segments]
        return Batch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(tables),
            query_start=query_start,
            seq_lens=seq_lens,
            block_size=self.block_size,
        )

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
