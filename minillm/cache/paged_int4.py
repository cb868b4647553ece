"""The paged layout in INT4: two codes per byte, a scale and a zero point per group of channels of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.base import StoredRows
from minillm.cache.paged_quantized import PagedQuantizedKVCache, RowField
from minillm.models.config import ModelConfig
from minillm.ops.kv_quant import dequantize_affine, head_group, pack_int4, quantize_affine, unpack_int4

DEFAULT_GROUP_SIZE = 32


class PagedInt4KVCache(PagedQuantizedKVCache):
    """Affine quantisation: each token, KV head and group of `group_size` channels has a float16 scale and zero point.

    4 + 32 / `group_size` bits per number; with groups of 32, these are 5 bits, 0.3125 of float16. The error of a number
    is at most s / 2, with s about (max - min) / 15 of its group.

    Affine rather than symmetric, because its loss on minicoder is smaller at 4.5, 5 and 6 bits (mean KL to float32,
    held-out text).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        group_size: int = DEFAULT_GROUP_SIZE,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device, group_size=group_size)
        self.group = head_group(config.head_dim, group_size)

    @classmethod
    def row_fields(cls, head_dim: int, *, group_size: int = DEFAULT_GROUP_SIZE) -> tuple[RowField, ...]:
        """Packed codes, scales, zero points."""
        per_group = RowField((head_dim // head_group(head_dim, group_size),), torch.float16)
        return RowField((head_dim // 2,), torch.uint8), per_group, per_group

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """See `PagedQuantizedKVCache.encode`."""
        codes, scale, zero = quantize_affine(x.unflatten(-1, (-1, self.group)), dim=-1)
        return pack_int4(codes.flatten(-2)), scale.squeeze(-1), zero.squeeze(-1)

    def decode(self, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """See `PagedQuantizedKVCache.decode`."""
        codes = unpack_int4(packed).unflatten(-1, (-1, self.group))
        return dequantize_affine(codes, scale.unsqueeze(-1), zero.unsqueeze(-1), self.dtype).flatten(-2)

    def stored_rows(self) -> StoredRows:
        """See `KVCache.stored_rows`."""
        return StoredRows("int4", tuple(self.keys), tuple(self.values), self.group, self.decode)
