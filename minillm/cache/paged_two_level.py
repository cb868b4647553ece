"""The paged layout in two levels of four bits: a draft reads one, the target both (QuantSpec: Tiwari et al. 2025).

    x ≈ zero + s · (u + l / 16)        u = 0 … 15: the upper nibble, l = -8 … 7: the lower nibble

    zero = min, s = (max - min) / 15 of a group, rounded as in `kv_quant`
    u = round((x - zero) / s)                     alone, it is the INT4 cache:      |x - x̂| ≤ s / 2
    l = round(((x - zero) / s - u) · 16)          both together:                    |x - x̂| ≤ s / 16

The error reaches s / 16 only where the rest is + s / 2 (8 / 16 is not representable); it is at most s / 32 where the
rest is below 7.5 / 16 · s. Reading one nibble instead of two halves the bytes of the codes, and nothing is stored
twice: that is how a target can draft from its own cache in four bits (`minillm.speculative.self_quant`).

Differences from the paper. There, keys are quantised per channel in groups of 128 tokens, values per token, and the
newest tokens stay in full precision in a buffer of two groups: a group can only be quantised when it is complete, and
rolling back must not reopen it. Here keys and values are quantised per token, KV head and group of channels, as soon as
they are stored. A row then depends on its token alone. So there is no buffer, rolling back is lowering a counter as in
every paged layout, and blocks can be shared, copied and preempted. The price: a channel of keys that is large for every
token widens the steps of its group (see `minillm.cache.kivi`), and a draft sees even the newest tokens in four bits.

The compiled CPU step reads and writes both levels. GPU kernels know the upper level only, as an INT4 cache, so on a GPU
the target over this layout runs in plain PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.base import KVCache, StoredRows
from minillm.cache.paged_int4 import DEFAULT_GROUP_SIZE, PagedInt4KVCache
from minillm.cache.paged_quantized import RowField
from minillm.ops.kv_quant import dequantize_affine, pack_int4, quantize_affine, unpack_int4

LEVELS = 16
"""Steps of the lower nibble in one step of the upper."""


class PagedTwoLevelKVCache(PagedInt4KVCache):
    """Two nibbles per number, and a float16 scale and zero point per token, KV head and group of `group_size` channels.

    8 + 32 / `group_size` bits per number, of which a draft reads 4 + 32 / `group_size`: 9 and 5 with groups of 32.
    """

    @classmethod
    def row_fields(cls, head_dim: int, *, group_size: int = DEFAULT_GROUP_SIZE) -> tuple[RowField, ...]:
        """The parts of an INT4 row (packed upper nibbles, scales, zero points), then packed lower nibbles."""
        upper, *scale_and_zero = super().row_fields(head_dim, group_size=group_size)
        return upper, *scale_and_zero, upper

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """See `PagedQuantizedKVCache.encode`."""
        x = x.float().unflatten(-1, (-1, self.group))
        upper, scale, zero = quantize_affine(x, dim=-1)
        rest = (x - zero.float()) / scale.float() - upper
        lower = (rest * LEVELS).round_().clamp_(-LEVELS // 2, LEVELS // 2 - 1) + LEVELS // 2
        packed = (pack_int4(codes.to(torch.uint8).flatten(-2)) for codes in (upper, lower))
        return next(packed), scale.squeeze(-1), zero.squeeze(-1), next(packed)

    def decode(self, upper: Tensor, scale: Tensor, zero: Tensor, lower: Tensor) -> Tensor:
        """See `PagedQuantizedKVCache.decode`."""
        codes, rest = (unpack_int4(packed).unflatten(-1, (-1, self.group)).float() for packed in (upper, lower))
        codes += (rest - LEVELS // 2) / LEVELS
        return dequantize_affine(codes, scale.unsqueeze(-1), zero.unsqueeze(-1), self.dtype).flatten(-2)

    def stored_rows(self) -> StoredRows:
        """See `KVCache.stored_rows`."""
        return StoredRows("two_level", tuple(self.keys), tuple(self.values), self.group, self.decode)

    def draft_view(self) -> KVCache:
        """See `KVCache.draft_view`: the upper nibbles."""
        return UpperNibbles(self)


class UpperNibbles(PagedInt4KVCache):
    """The upper nibbles of a two-level cache, in its memory: an INT4 cache. What it stores has no lower nibbles."""

    stored_rows = PagedInt4KVCache.stored_rows

    def __init__(self, of: PagedTwoLevelKVCache) -> None:
        self.block_size, self.dtype, self.windows, self.shape = of.block_size, of.dtype, of.windows, of.shape
        self.group = of.group
        self.keys, self.values = of.keys[:3], of.values[:3]

    @property
    def num_bytes(self) -> int:
        """0: the memory is that of the two-level cache."""
        return 0
