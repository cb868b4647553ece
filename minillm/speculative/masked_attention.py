"""Attention of the small draft models, in plain PyTorch: few queries, and masks that follow from positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = -1
"""The position of padding."""


def hidden_keys(queries: Tensor, keys: Tensor, window: int | None = None, num_sinks: int = 0) -> Tensor:
    """Which keys a query must not see, by their positions: `[…, Q]`, `[…, N]` → `[…, Q, N]`, bool.

    A query sees itself and earlier tokens; with a window only the last `window` of them, itself included, and the first
    `num_sinks` tokens of the text (StreamingLLM, Xiao et al. 2024).
    """
    query, key = queries.unsqueeze(-1), keys.unsqueeze(-2)
    hidden = (key > query) | (key == PADDING)
    if window is not None:
        hidden |= (key <= query - window) & (key >= num_sinks)
    return hidden


def masked_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Attention of each group's queries over the group's keys.

    `q`: `[groups, Q, num_heads, head_dim]`; `k`, `v`: `[groups, N, num_kv_heads, head_dim]`; `hidden`: `[groups or 1,
    Q, N]`, bool. Returns a tensor like `q`, in which a query that sees no key has zeros.
    """
    num_kv_heads = k.shape[2]
    heads_per_kv = q.shape[2] // num_kv_heads
    # The query heads that share a KV head become further queries of it.
    packed = q.unflatten(2, (num_kv_heads, heads_per_kv)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # A query that sees no key attends to all of them, and its result is dropped: in a row that is masked everywhere,
    # which autocast rounds to -inf, a kernel may compute NaN gradients.
    sees_nothing = hidden.all(-1, keepdim=True)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    mask = mask.masked_fill_(hidden & ~sees_nothing, torch.finfo(q.dtype).min)
    mask = mask.repeat(1, heads_per_kv, 1).unsqueeze(1)
    keys, values = (x.to(q.dtype).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
    out = out.unflatten(2, (heads_per_kv, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.masked_fill(sees_nothing.unsqueeze(-1), 0.0)
