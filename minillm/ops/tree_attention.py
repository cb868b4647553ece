"""Attention for verifying draft trees: each new token attends to the cached tokens, its ancestors and itself.

The nodes of a tree are the new tokens of a request, in any order with parents before children. Each node has a bit
mask: bit i is set if the node attends to the i-th new token; its own bit is set. A chain has the masks 1, 3, 7, 15, …,
or -1 for each token at any length; this op then equals `paged_attention`. (SpecInfer: Miao et al. 2024, section 4.2.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.batch import Batch
from minillm.ops.paged_attention import Rows


def tree_attention(q: Tensor, keys: Tensor | Rows, values: Tensor | Rows, batch: Batch, tree: Tensor) -> Tensor:
    """`q`: `[num_tokens, num_heads, head_dim]`; `keys`, `values`: `[num_slots, num_kv_heads, head_dim]`, already
    holding the new tokens; `tree`: `[num_tokens]` int64 masks, so a tree has at most 64 tokens. Returns a tensor like
    `q`. The reference of the kernel: it computes one request after the other.
    """
    out = torch.empty_like(q)
    for r, (count, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        new = slice(batch.query_start[r], batch.query_start[r + 1])
        slots = batch.key_slots[r, :total]
        index = torch.arange(count, device=q.device)
        sees = (tree[new, None] >> index.clamp(max=63)) & 1 != 0
        sees &= index <= index[:, None]  # -1: all up to the token itself
        mask = F.pad(sees, (total - count, 0), value=True)
        rows = (x.transpose(0, 1) for x in (q[new], keys[slots], values[slots]))
        out[new] = F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(0, 1)
    return out
