"""The base class of the quantised paged layouts: their pools hold codes and scales instead of floats."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import DequantizedRows, KVCache
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import paged_attention
from minillm.ops.tree_attention import tree_attention


@dataclass(frozen=True)
class RowField:
    """One part of a stored row (a token's key or value of one KV head): its codes, scales or zero points."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes per row."""
        return prod(self.shape) * self.dtype.itemsize


class PagedQuantizedKVCache(KVCache):
    """A paged layout that stores codes. Block tables, rollback, sharing and copying are those of `PagedKVCache`.

    The codes of a token depend on that token alone, and the step that stores a token also reads its key and value back
    quantised. So results do not depend on how a prompt was chunked or on the rest of the batch, with one exception:
    the shape of a batch changes the last bits of a key or value, and a number near a rounding border then gets another
    code. In float32 this happens to one number in 10^5. INT8 rarely shows it; with INT4 it can change a token.

    In PyTorch, attention dequantises the slots in use once per layer and step, so a step moves *more* bytes than with
    an unquantised pool: only memory is saved. The compiled step reads the codes and saves memory and bandwidth.
    """

    supports_trees = True
    ops = {"paged_attention": paged_attention, "tree_attention": tree_attention}  # noqa: RUF012  (never mutated)

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        **options: Any,
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        self.shape = (num_blocks * block_size, config.num_kv_heads, config.head_dim)
        fields = self.row_fields(config.head_dim, **options)
        lead = (config.num_layers, *self.shape[:2])
        self.keys, self.values = (
            [torch.empty((*lead, *field.shape), dtype=field.dtype, device=device) for field in fields] for _ in "kv"
        )

    @classmethod
    @abstractmethod
    def row_fields(cls, head_dim: int, **options: Any) -> tuple[RowField, ...]:
        """The parts of one row, in the order in which `encode` returns them.

        Raises `ConfigError` if this head size cannot be stored with these options.
        """

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Quantise keys or values: `[num_tokens, num_kv_heads, head_dim]` → one tensor per field of `row_fields`."""

    @abstractmethod
    def decode(self, *stored: Tensor) -> Tensor:
        """Dequantise what `encode` returned, to the model's dtype."""

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        """2 (keys, values) · layers · block size · KV heads · bytes of one row; `dtype` is not used."""
        row = sum(field.num_bytes for field in cls.row_fields(config.head_dim, **options))
        return 2 * config.num_layers * block_size * config.num_kv_heads * row

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools: codes, scales, zero points."""
        return sum(pool.nbytes for pool in (*self.keys, *self.values))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        rows = []
        for pools, new in ((self.keys, k), (self.values, v)):
            pools_of_layer = [pool[layer] for pool in pools]
            for pool, part in zip(pools_of_layer, self.encode(new), strict=True):
                pool.index_copy_(0, batch.slot_mapping, part)
            rows.append(DequantizedRows(pools_of_layer, self.decode, self.shape))
        if batch.tree is not None:
            return self.ops["tree_attention"](q, rows[0], rows[1], batch, batch.tree)
        return self.ops["paged_attention"](q, rows[0], rows[1], batch, self.windows[layer])

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `KVCache.move_tokens`: codes, scales and zero points."""
        for pool in (*self.keys, *self.values):
            pool[:, targets] = pool[:, sources]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.copy_blocks`: codes, scales and zero points."""
        for pool in (*self.keys, *self.values):
            blocks = pool.unflatten(1, (-1, self.block_size))
            for source, target in pairs:
                blocks[:, target] = blocks[:, source]
