"""The verdict on chains of drafts, as tensors: what `speculative.rejection_sampler` decides, without its host.

Drafts of all requests lie flat: request r has the drafts `draft_start[r] … draft_start[r + 1] - 1`, and one row of
target probabilities for each and one more, so its rows begin at `draft_start[r] + r`. A draft x is accepted if its
uniform is below min(1, p(x) / q(x)). After n of k accepted ones comes the target's own token: from norm(max(0, p - q))
if n < k, else from p, with the uniform that stands at row n. (Leviathan et al. 2023, Chen et al. 2023.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minillm.ops.sample import sample


class Verdicts(NamedTuple):
    """What is decided for each request."""

    num_accepted: Tensor
    """`[requests]` int64."""
    token_ids: Tensor
    """`[requests]` int64: the target's own token after the accepted drafts."""
    is_valid: Tensor
    """`[requests]` bool. False: a draft has probability 0 under its own q, or lies outside the vocabulary, or the row
    to draw from sums to 0, NaN or infinity; the other two then mean nothing."""


def rejection(
    draft_token_ids: Tensor,  # [drafts] int64
    draft_start: Tensor,  # [requests + 1] int32 or int64
    draft_probs: Tensor | None,  # [drafts, vocab] fp32; None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [drafts + requests, vocab] fp32
    accept_uniforms: Tensor,  # [drafts] fp64
    own_uniforms: Tensor,  # [drafts + requests] fp64: at row n of a request what draws its token if n are accepted
) -> Verdicts:
    """Judge every request's chain, all at once: the reference of the kernel."""
    vocab, device = target_probs.shape[1], target_probs.device
    start, count = draft_start[:-1].long(), draft_start.diff().long()
    draft = torch.arange(len(draft_token_ids), device=device)
    request = torch.searchsorted(start, draft, right=True) - 1 if len(draft) else draft
    known = (draft_token_ids >= 0) & (draft_token_ids < vocab)
    x = draft_token_ids.clamp(0, vocab - 1)

    q_x = torch.ones_like(accept_uniforms, dtype=torch.float32) if draft_probs is None else draft_probs[draft, x]
    chance = target_probs[draft + request, x] / q_x  # no cap at 1: a uniform is below it
    fits = known & (q_x > 0) & ~chance.isnan()
    place = draft - start[request]
    # The place of the first draft that goes; where none does, the number of drafts.
    lost = torch.where(accept_uniforms < chance, count[request], place)
    accepted = count.scatter_reduce(0, request, lost, "amin")

    row = start + torch.arange(len(start), device=device) + accepted
    p, rejected = target_probs[row], accepted < count
    left = p
    if len(draft):
        first_lost = (start + accepted).clamp(max=len(draft) - 1)
        q = _one_hot(x[first_lost], p) if draft_probs is None else draft_probs[first_lost]
        left = torch.where(rejected[:, None], (p - q).clamp(min=0), p)
    weights = torch.where(left.sum(-1, keepdim=True) > 0, left, p)  # equal up to rounding: then p itself
    tokens, can_be_drawn = sample(weights, own_uniforms[row])
    all_fit = torch.ones_like(count).scatter_reduce(0, request, fits.long(), "amin").bool()
    return Verdicts(accepted, tokens, all_fit & can_be_drawn)


def _one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(1, tokens[:, None], 1.0)
