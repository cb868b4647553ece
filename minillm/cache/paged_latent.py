"""The base of paged layouts that store something smaller in place of a token's keys and values: its latents.

    stored     latent of the key *before* RoPE, latent of the value, and the token's position
    read       latent → key → RoPE at that position;  latent → value

RoPE turns every position by another angle, so keys of different positions share no low-rank or clustered structure that
would be there without it. Layouts of this kind therefore undo RoPE before they compress, and apply it again when they
read. (That is also why a key's up-projection cannot be multiplied into the query's weights once and for all, as it can
for values: RoPE stands between them.)

A latent depends on its token alone. So block tables, prefix sharing, copy on write, rollback, preemption and draft
trees work as in `PagedKVCache`. In PyTorch every step restores the keys and values of all tokens in use: only memory is
saved, not time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import KVCache
from minillm.models.config import ModelConfig
from minillm.models.rope import inverse_frequencies
from minillm.ops.paged_attention import paged_attention
from minillm.ops.rerotation import rerotate
from minillm.ops.tree_attention import tree_attention


@dataclass(frozen=True)
class RestoredRows:
    """The keys or values of one layer. Indexing by slots restores those slots only."""

    cache: PagedLatentKVCache
    layer: int
    is_key: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """`(num_slots, num_kv_heads, head_dim)`, the shape of the restored keys or values."""
        config = self.cache.config
        return len(self.cache.positions), config.num_kv_heads, config.head_dim

    def __getitem__(self, slots: Tensor | slice) -> Tensor:
        """The restored keys or values in these slots, `[len(slots), num_kv_heads, head_dim]`."""
        cache, config = self.cache, self.cache.config
        pools = cache.keys if self.is_key else cache.values
        rows = cache.restore(self.layer, self.is_key, pools[self.layer][slots])
        rows = rows.view(-1, config.num_kv_heads, config.head_dim)
        return cache.rotate(self.layer, rows, cache.positions[slots]) if self.is_key else rows


class PagedLatentKVCache(KVCache):
    """`compress` and `restore` are those of a subclass; `prepare` gets the model that they are for."""

    supports_trees = True
    latent_dtype: ClassVar[torch.dtype | None] = None
    """Of the stored latents; None: the model's."""
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
        self.config, self.block_size, self.dtype = config, block_size, dtype
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        self.frequencies, _ = inverse_frequencies(config.rope, config.head_dim)
        num_slots = num_blocks * block_size
        self.keys, self.values = (
            [torch.empty(num_slots, width, dtype=self.latent_dtype or dtype, device=device) for width in widths]
            for widths in self.widths(config, **options)
        )
        """Per layer, `[num_slots, width]`."""
        self.positions = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """The position of the token in each slot."""

    @classmethod
    @abstractmethod
    def widths(cls, config: ModelConfig, **options: Any) -> tuple[list[int], list[int]]:
        """For each layer, how many numbers are stored for a key and for a value, all KV heads together. Raises
        `ConfigError` for invalid options."""

    @abstractmethod
    def compress(self, layer: int, is_key: bool, rows: Tensor) -> Tensor:
        """`[num_tokens, kv_size]`, keys without RoPE or values → `[num_tokens, width]`."""

    @abstractmethod
    def restore(self, layer: int, is_key: bool, latents: Tensor) -> Tensor:
        """`[num_tokens, width]` → an approximation of what `compress` was given, `[num_tokens, kv_size]`, in the
        model's dtype."""

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        """Block size · (numbers of all layers · bytes per number + 4 for the position)."""
        numbers = sum(map(sum, cls.widths(config, **options)))
        return block_size * (numbers * (cls.latent_dtype or dtype).itemsize + torch.int32.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of the latents and positions."""
        return sum(pool.nbytes for pool in (*self.keys, *self.values, self.positions))

    def rotate(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE at `positions` (negative: undo it) to `keys`, `[num_tokens, num_kv_heads, head_dim]`."""
        return rerotate(keys, self.frequencies, positions) if self.config.rotates(layer) else keys

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        if layer == 0:
            self.positions.index_copy_(0, batch.slot_mapping, batch.positions.int())
        plain = self.rotate(layer, k, -batch.positions)
        for is_key, pool, new in ((True, self.keys[layer], plain), (False, self.values[layer], v)):
            pool.index_copy_(0, batch.slot_mapping, self.compress(layer, is_key, new.flatten(1)).to(pool.dtype))
        keys, values = RestoredRows(self, layer, True), RestoredRows(self, layer, False)
        if batch.tree is not None:
            return self.ops["tree_attention"](q, keys, values, batch, batch.tree)
        return self.ops["paged_attention"](q, keys, values, batch, self.windows[layer])

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `KVCache.move_tokens`: latents and positions."""
        for pool in (*self.keys, *self.values, self.positions):
            pool[targets] = pool[sources]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.copy_blocks`: latents and positions."""
        for pool in (*self.keys, *self.values, self.positions):
            blocks = pool.unflatten(0, (-1, self.block_size))
            for source, target in pairs:
                blocks[target] = blocks[source]
