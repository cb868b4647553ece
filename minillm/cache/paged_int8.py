"""The paged layout in INT8: one signed byte per number, one scale per token and KV head."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.base import StoredRows
from minillm.cache.paged_quantized import PagedQuantizedKVCache, RowField
from minillm.ops.kv_quant import INT8_LEVELS, dequantize_symmetric, quantize_symmetric


class PagedInt8KVCache(PagedQuantizedKVCache):
    """Symmetric quantisation with scale s = amax / 127 in bfloat16. The error of a number is at most s / 2.

    A row takes `head_dim` + 2 bytes: 0.516 of float16 at head size 64, 0.508 at 128. The error of a score q · k / √d is
    at most ‖q‖₁ · s / (2 √d); that of an attention output is at most the largest s / 2 of its values.
    """

    @classmethod
    def row_fields(cls, head_dim: int) -> tuple[RowField, ...]:
        """Codes and one scale."""
        return RowField((head_dim,), torch.int8), RowField((), torch.bfloat16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """See `PagedQuantizedKVCache.encode`."""
        return quantize_symmetric(x, INT8_LEVELS)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """See `PagedQuantizedKVCache.decode`."""
        return dequantize_symmetric(codes, scale, self.dtype)

    def stored_rows(self) -> StoredRows:
        """See `KVCache.stored_rows`."""
        return StoredRows("int8", tuple(self.keys), tuple(self.values), dequantise=self.decode)
