"""What the quantised paged layouts share: pools of codes and scales instead of pools of numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from minillm.cache.base import Batch, KVCache
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import paged_attention


@dataclass(frozen=True)
class Field:
    """One part of what is stored for one token and KV head: codes, a scale, zero points."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes per token and KV head."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class DequantizedRows:
    """The rows of one layer's keys or values as attention asks for them: by slot, and numbers again only then."""

    pools: Sequence[Tensor]
    """Per field `[num_slots, num_kv_heads, …]`."""
    decode: Callable[..., Tensor]
    shape: tuple[int, int, int]
    """`(num_slots, num_kv_heads, head_dim)`, as if it were one tensor."""

    def __getitem__(self, slots: Tensor | slice) -> Tensor:
        """The keys or values in these slots, `[len(slots), num_kv_heads, head_dim]`."""
        if isinstance(slots, slice):
            return self.decode(*(pool[slots] for pool in self.pools))
        return self.decode(*(pool.index_select(0, slots) for pool in self.pools))


class PagedQuantizedKVCache(KVCache):
    """The paged layout over codes: block tables, roll-back, sharing and copying are those of `PagedKVCache`.

    What is kept for a token depends on that token alone, and a token's own key and value are read back quantised in
    the very step that stores them. So results do not depend on how a prompt was chunked or on who else is in the batch,
    except through the last bits of the products that made a key: where those carry a number over the border of a step,
    its code is another one. That is one number in 10^5 in float32; it seldom shows with INT8, and can turn a token with
    INT4.

    In PyTorch, attention makes numbers of the slots in use only, once per layer and step, so a step moves *more* bytes
    than over a plain pool, not fewer: what is saved is room. The compiled step reads the codes and saves both.
    """

    ops = {"paged_attention": paged_attention}  # noqa: RUF012  (replaced, never changed)

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
        fields = self.row(config.head_dim, **options)
        lead = (config.num_layers, *self.shape[:2])
        self.keys, self.values = (
            [torch.empty((*lead, *field.shape), dtype=field.dtype, device=device) for field in fields] for _ in "kv"
        )

    @classmethod
    @abstractmethod
    def row(cls, head_dim: int, **options: Any) -> tuple[Field, ...]:
        """What is stored for one key (or value) of one KV head, in the order of `encode`'s results.

        Raises `ConfigError` if heads of that size cannot be kept with these options.
        """

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Keys or values `[num_tokens, num_kv_heads, head_dim]` → one tensor per field of `row`."""

    @abstractmethod
    def decode(self, *stored: Tensor) -> Tensor:
        """The inverse of `encode`, as far as there is one, in the model's dtype."""

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        """2 (keys, values) · layers · block size · KV heads · bytes of one row; the model's dtype plays no part."""
        row = sum(field.num_bytes for field in cls.row(config.head_dim, **options))
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
        return self.ops["paged_attention"](q, rows[0], rows[1], batch, self.windows[layer])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.copy_blocks`: codes, scales and zero points."""
        for pool in (*self.keys, *self.values):
            blocks = pool.unflatten(1, (-1, self.block_size))
            for source, target in pairs:
                blocks[:, target] = blocks[:, source]
