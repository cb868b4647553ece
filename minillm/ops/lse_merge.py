"""Merging softmax-weighted sums over parts of the keys, as if the softmax had been over all of them.

    out_i = Σ_{k in part i} e^{s_k} v_k / Z_i,    lse_i = log Z_i,    Z_i = Σ_{k in part i} e^{s_k}
    out   = Σ_i e^{lse_i - lse} out_i,            lse = log Σ_i e^{lse_i}

This one identity is behind FlashAttention's running softmax, split-KV decoding, attention over a shared prefix, and the
tiled contrastive loss (`minillm.beside.contrastive`). Merging is associative, so parts may come in any order and size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def partial_attention(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of `q` (`[…, m, d]`) over some of the keys (`[…, n, d]`): `out` like `q`, and `lse`, `[…, m]`.

    `hidden`: True where a key is masked. A query that sees no key of this part has out 0 and lse -inf.
    """
    scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - finite(lse).unsqueeze(-1)).exp() @ values, lse


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`outs`: `[parts, …, m, d]`, `lses`: `[parts, …, m]` → the out and the lse of all parts together."""
    lse = lses.logsumexp(0)
    shares = (lses - finite(lse)).exp()
    return (shares.unsqueeze(-1) * outs).sum(0), lse


def finite(lse: Tensor) -> Tensor:
    """`lse` with 0 in place of -inf, so that e^(-inf - lse) is 0 and not NaN."""
    return torch.where(lse == -math.inf, 0.0, lse)
