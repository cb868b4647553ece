"""How far a draft's distribution is from its target's: the two parts of the losses that train drafts."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_and_rejection(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p‖q) and the rejection rate 1 − Σ min(p, q), each averaged over the tokens. `log_p`, `log_q`: `[…, vocab]`,
    log-probabilities of the target and of the draft."""
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1).mean()
    rejected = 1 - torch.minimum(p, log_q.exp()).sum(-1).mean()
    return kl, rejected
