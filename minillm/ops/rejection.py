"""Rejection sampling of draft chains in tensors: what `speculative.rejection_sampler` decides, without the host.

The drafts of all requests are concatenated: request r has the drafts `draft_start[r] … draft_start[r + 1] - 1`. It has
one row of target probabilities per draft and one more, so its rows begin at `draft_start[r] + r`. A draft x is accepted
if its uniform is below min(1, p(x) / q(x)). If n of k drafts are accepted, the next token is recovered from
norm(max(0, p - q)) if n < k, or else it is a bonus token from p. It is drawn with the uniform of row n. (Leviathan et
al. 2023, Chen et al. 2023.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minillm.ops.sample import one_hot, sample


class Verdicts(NamedTuple):
    """The outcome for each request."""

    num_accepted: Tensor
    """`[requests]` int64."""
    token_ids: Tensor
    """`[requests]` int64: the recovered or bonus token after the accepted drafts."""
    is_valid: Tensor
    """`[requests]` bool. False if a draft has probability 0 under its own q or is outside the vocabulary, or if the row
    to draw from sums to 0, NaN or infinity. The other two fields are then meaningless."""


def rejection(
    draft_token_ids: Tensor,  # [drafts] int64
    draft_start: Tensor,  # [requests + 1] int32 or int64
    draft_probs: Tensor | None,  # [drafts, vocab] fp32; None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [drafts + requests, vocab] fp32
    accept_uniforms: Tensor,  # [drafts] fp64
    next_token_uniforms: Tensor,  # [drafts + requests] fp64: row n of a request is used if n drafts are accepted
) -> Verdicts:
    """Return the verdict on every request's chain. The reference of the kernel."""
    vocab, device = target_probs.shape[1], target_probs.device
    start, count = draft_start[:-1].long(), draft_start.diff().long()
    draft = torch.arange(len(draft_token_ids), device=device)
    request = torch.searchsorted(start, draft, right=True) - 1 if len(draft) else draft
    in_vocab = (draft_token_ids >= 0) & (draft_token_ids < vocab)
    x = draft_token_ids.clamp(0, vocab - 1)

    q_x = torch.ones_like(accept_uniforms, dtype=torch.float32) if draft_probs is None else draft_probs[draft, x]
    ratio = target_probs[draft + request, x] / q_x  # min(1, ratio) is not needed: a uniform is below 1
    is_draft_valid = in_vocab & (q_x > 0) & ~ratio.isnan()
    index = draft - start[request]
    # The index of each rejected draft, or the number of drafts: the minimum is the number of accepted drafts.
    rejected_at = torch.where(accept_uniforms < ratio, count[request], index)
    accepted = count.scatter_reduce(0, request, rejected_at, "amin")

    row = start + torch.arange(len(start), device=device) + accepted
    p, rejected = target_probs[row], accepted < count
    residual = p
    if len(draft):
        first_rejected = (start + accepted).clamp(max=len(draft) - 1)
        q = one_hot(x[first_rejected], p) if draft_probs is None else draft_probs[first_rejected]
        residual = torch.where(rejected[:, None], (p - q).clamp(min=0), p)
    # If p and q are equal up to rounding, there is no residual: draw from p itself.
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    tokens, can_be_drawn = sample(weights, next_token_uniforms[row])
    are_valid = torch.ones_like(count).scatter_reduce(0, request, is_draft_valid.long(), "amin").bool()
    return Verdicts(accepted, tokens, are_valid & can_be_drawn)
