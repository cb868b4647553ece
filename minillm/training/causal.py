"""Attention without a cache, for training: rows of equal length, each token sees the row up to itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SHORTEST_PART, MOST_PARTS = 256, 4
"""Queries come in parts. A part sees the keys up to its last query, so most of a long row's future is not computed."""


class CausalAttention:
    """Plays the part of the KV cache for the decoder when nothing needs to be remembered.

    On a CPU it is two matrix products and a softmax over parts of the queries: in a profile with PyTorch's fused kernel
    its backward was the largest part of a training step (bf16, rows of 512). On a GPU the fused kernel is used.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """`q`, `k`, `v`: `[rows · length, heads, head_dim]` → like `q`."""
        q, k, v = (x.unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q, k, v))
        if q.is_cuda:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            size = max(SHORTEST_PART, -(-self.length // MOST_PARTS))
            parts = [(start, min(start + size, self.length)) for start in range(0, self.length, size)]
            out = torch.cat([self._part(q, k, v, start, end) for start, end in parts], dim=2)
        return out.transpose(1, 2).flatten(0, 1)

    def _part(self, q: Tensor, k: Tensor, v: Tensor, start: int, end: int) -> Tensor:
        """`q`, `k`, `v`: `[rows, heads, length, head_dim]` → outputs of the queries from `start` to `end`."""
        kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        # The query heads that share a KV head become further queries of it, so no key is copied per head.
        grouped = q[:, :, start:end].unflatten(1, (kv_heads, groups))
        scores = grouped.flatten(2, 3) @ k[:, :, :end].transpose(2, 3)
        scores = scores.float().unflatten(2, (groups, end - start)) * q.shape[-1] ** -0.5
        hidden = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
        out = weights.flatten(2, 3) @ v[:, :, :end]
        return out.unflatten(2, (groups, end - start)).flatten(1, 2)
