"""Attention for verifying draft trees: each new token sees the cached tokens and its own ancestors.

A tree's nodes are the new tokens of a request, in any order that puts parents before children. Which of them a node
sees is a bit mask: bit i for the i-th new token, its own bit included. A chain is the masks 1, 3, 7, 15, …, and then
this is `paged_attention`. (SpecInfer: Miao et al. 2024, section 4.2.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.base import Batch
from minillm.ops.paged_attention import Rows


def tree_attention(q: Tensor, keys: Tensor | Rows, values: Tensor | Rows, batch: Batch, tree: Tensor) -> Tensor:
    """`q`: `[num_tokens, num_heads, head_dim]`; `keys`, `values`: `[num_slots, num_kv_heads, head_dim]`, already with
    the new tokens; `tree`: `[num_tokens]` int64 masks, so a request brings at most 64 tokens. Returns like `q`.

    One request after the other, plainly: the reference of the kernels.
    """
    out = torch.empty_like(q)
    for r, (count, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        new = slice(batch.query_start[r], batch.query_start[r + 1])
        slots = batch.key_slots[r, :total]
        sees = (tree[new, None] >> torch.arange(count, device=q.device)) & 1 != 0
        mask = F.pad(sees, (total - count, 0), value=True)
        rows = (x.transpose(0, 1) for x in (q[new], keys[slots], values[slots]))
        out[new] = F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(0, 1)
    return out


def tree_masks(parents: list[int]) -> list[int]:
    """The mask of each node from its parent's index (-1: none, it hangs on the cached tokens). Parents come first."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks
