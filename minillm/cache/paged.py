"""The paged layout: one pool of blocks for all requests, addressed by block tables (Kwon et al. 2023, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import KVCache, StoredRows
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import paged_attention
from minillm.ops.tree_attention import tree_attention


class PagedKVCache(KVCache):
    """Keys and values of `num_blocks · block_size` tokens per layer, in the model's dtype."""

    supports_trees = True
    ops = {"paged_attention": paged_attention, "tree_attention": tree_attention}  # noqa: RUF012  (never mutated)

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """2 (keys, values) · layers · block size · KV heads · head size · bytes per number."""
        return 2 * config.num_layers * block_size * config.kv_size * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the key pool and the value pool."""
        return self.keys.nbytes + self.values.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, batch.slot_mapping, k)
        values.index_copy_(0, batch.slot_mapping, v)
        if batch.tree is not None:
            return self.ops["tree_attention"](q, keys, values, batch, batch.tree)
        return self.ops["paged_attention"](q, keys, values, batch, self.windows[layer])

    def stored_rows(self) -> StoredRows:
        """See `KVCache.stored_rows`."""
        return StoredRows("float", (self.keys,), (self.values,))

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `KVCache.move_tokens`."""
        for pool in (self.keys, self.values):
            pool[:, targets] = pool[:, sources]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.copy_blocks`."""
        for pool in (self.keys, self.values):
            blocks = pool.unflatten(1, (-1, self.block_size))
            for source, target in pairs:
                blocks[:, target] = blocks[:, source]
