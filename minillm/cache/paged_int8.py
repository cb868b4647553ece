"""The paged layout in INT8: one signed byte per number, one scale per token and KV head."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.paged_quantized import Field, PagedQuantizedKVCache
from minillm.ops.kv_quant import INT8_LEVELS, dequantize_symmetric, quantize_symmetric


class PagedInt8KVCache(PagedQuantizedKVCache):
    """Symmetric: s = amax / 127 in bfloat16, so each number is off by at most s / 2.

    `head_dim` + 2 bytes per key and KV head: 0.516 of float16 at head size 64, 0.508 at 128. A score q · k / √d is off
    by at most ‖q‖₁ · s / (2 √d), an attention output by at most the largest s / 2 of its values.
    """

    @classmethod
    def row(cls, head_dim: int) -> tuple[Field, ...]:
        """Codes and one scale."""
        return Field((head_dim,), torch.int8), Field((), torch.bfloat16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """See `PagedQuantizedKVCache.encode`."""
        return quantize_symmetric(x, INT8_LEVELS)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """See `PagedQuantizedKVCache.decode`."""
        return dequantize_symmetric(codes, scale, self.dtype)
