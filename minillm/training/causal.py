"""Attention without a cache, for training: rows of equal length, each token sees the row up to itself."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


class CausalAttention:
    """Plays the part of the KV cache for the decoder when nothing needs to be remembered."""

    def __init__(self, length: int) -> None:
        self.length = length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """`q`, `k`, `v`: `[rows · length, heads, head_dim]` → like `q`."""
        q, k, v = (x.unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)
