"""Typical acceptance: keep a draft that the target finds likely enough (Medusa: Cai et al. 2024, section 2.3.1).

    accept x if  p(x) > min(ε, δ · exp(-H(p)))          H(p): the entropy of p in nats

Where the target is sure, only its likely tokens pass; where many tokens are about equally likely, most of them do. The
draft's own distribution plays no part, so a deterministic draft is accepted as readily as a drawn one, and more drafts
are accepted than by rejection sampling.

**It is lossy.** A likely draft is always accepted, however seldom the target would draw it, so the text is not
distributed as the target's: it follows the draft among the tokens that pass. At temperature 0 it is exact: p is
one-hot, and only its token passes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minillm.config import share
from minillm.errors import ConfigError
from minillm.speculative.rejection_sampler import AcceptRule

THRESHOLD, ALPHA = 0.09, 0.3
"""ε and δ: the defaults of Medusa's code (`posterior_threshold`, `posterior_alpha`)."""


def likely_enough(p: Tensor, q: Tensor, x: Tensor, threshold: float = THRESHOLD, alpha: float = ALPHA) -> Tensor:
    """`AcceptRule.accept`: 1 where p(x) > min(`threshold`, `alpha` · exp(-entropy of p)), else 0."""
    entropy = torch.special.entr(p).sum(-1)
    return (p.gather(-1, x[:, None]).squeeze(-1) > (alpha * (-entropy).exp()).clamp(max=threshold)).to(p.dtype)


def from_target(p: Tensor, q: Tensor) -> Tensor:
    """`AcceptRule.recover`: after a rejection, a token of the target."""
    return p


def typical_rule(threshold: float | None = None, alpha: float | None = None) -> AcceptRule:
    """The rule with these ε and δ; None: `THRESHOLD` and `ALPHA`. Raises `ConfigError` unless both are above 0 and at
    most 1, and one is below 1: otherwise even a token of probability 1 would be rejected."""
    given = {"posterior_threshold": threshold, "posterior_alpha": alpha}
    for name, value in given.items():
        if value is not None:
            share(name, value)
    chosen = {"threshold": threshold or THRESHOLD, "alpha": alpha or ALPHA}
    if min(chosen.values()) == 1:
        raise ConfigError("posterior_threshold=1 and posterior_alpha=1 reject every draft; lower one of them")
    return AcceptRule(partial(likely_enough, **chosen), from_target)
