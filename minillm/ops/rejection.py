"""The verdict on chains of drafts, as tensors: what `speculative.rejection_sampler` decides, without its host.

Drafts of all requests lie flat: request r has the drafts `draft_start[r] … draft_start[r + 1] - 1`, and one row of
target probabilities for each and one more, so its rows begin at `draft_start[r] + r`. A draft x is accepted if its
uniform is below min(1, p(x) / q(x)). After n of k accepted ones comes the target's own token: from norm(max(0, p - q))
if n < k, else from p, with the uniform that stands at row n. (Leviathan et al. 2023, Chen et al. 2023.)
"""

from __future__ import annotations

from itertools import pairwise
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
    draft_start: Tensor,  # [requests + 1] int32
    draft_probs: Tensor | None,  # [drafts, vocab] fp32; None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [drafts + requests, vocab] fp32
    accept_uniforms: Tensor,  # [drafts] fp64
    own_uniforms: Tensor,  # [drafts + requests] fp64: at row n of a request what draws its token if n are accepted
) -> Verdicts:
    """Judge every request's chain. One request after the other, plainly: the reference of the kernel."""
    starts, vocab = draft_start.tolist(), target_probs.shape[1]
    verdicts = []
    for r, (start, end) in enumerate(pairwise(starts)):
        drafts, rows = draft_token_ids[start:end, None], slice(start + r, end + r)
        in_vocabulary = (drafts >= 0) & (drafts < vocab)
        index = drafts.clamp(0, vocab - 1)
        if draft_probs is None:
            q = torch.zeros_like(target_probs[rows]).scatter_(1, index, 1.0)
        else:
            q = draft_probs[start:end]
        p_x, q_x = target_probs[rows].gather(1, index).squeeze(1), q.gather(1, index).squeeze(1)
        chances = (p_x / q_x).clamp(max=1.0)
        is_valid = (in_vocabulary.squeeze(1) & (q_x > 0) & ~chances.isnan()).all()
        accepted = int((accept_uniforms[start:end] < chances).long().cumprod(0).sum())
        p = target_probs[start + r + accepted]
        left = (p - q[accepted]).clamp(min=0) if start + accepted < end else p
        weights = torch.where(left.sum() > 0, left, p)
        token, can_be_drawn = sample(weights[None], own_uniforms[start + r + accepted][None])
        verdicts.append(torch.stack((token.new_tensor(accepted), token[0], (is_valid & can_be_drawn[0]).long())))
    decided = torch.stack(verdicts) if verdicts else draft_token_ids.new_empty(0, 3)
    return Verdicts(decided[:, 0], decided[:, 1], decided[:, 2].bool())
