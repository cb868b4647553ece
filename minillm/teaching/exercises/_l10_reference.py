"""Lesson 10, the references: the engine's own accept rule and residual, a whole round, and the rows that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.sampling import sample
from minillm.speculative.rejection_sampler import acceptance_probability as accept_rule
from minillm.speculative.rejection_sampler import residual


def verify_chain(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    """Return the tokens that one round commits: the accepted drafts, then one token of the target.

    `drafts`: γ token ids. `p`: `[γ + 1, vocab]`, row i judges draft i, the last row is the bonus token's. `q`:
    `[γ, vocab]`. `uniforms`: γ + 1 numbers in [0, 1), one per draft, the last for the recovered or bonus token.
    No input is changed.
    """
    chances = accept_rule(p[:-1], q, torch.tensor(drafts)).tolist()
    n = 0
    while n < len(drafts) and uniforms[n] < chances[n]:
        n += 1
    last = residual(p[n : n + 1], q[n : n + 1]) if n < len(drafts) else p[n : n + 1]
    return [*drafts[:n], int(sample(last, uniforms[-1:]))]


def rollback(target: list[int], draft: list[int], num_drafts: int, num_accepted: int) -> tuple[list[int], list[int]]:
    """Return the rows of the target's and the draft model's cache that are valid after a round.

    A row is written as the token whose key and value it holds. `target` ends with all `num_drafts` drafts, `draft` with
    all but the last of them, which never went through the draft model. Neither list is changed.
    """
    num_valid = len(target) - (num_drafts - num_accepted)
    return target[:num_valid], draft[:num_valid]
