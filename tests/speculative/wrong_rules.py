"""Planted mistakes: each looks like rejection sampling and emits tokens, but not from the target's distribution.

Most were found in public implementations. A test of exactness that lets one of them through is worthless, so
`test_rejection_sampler.py` demands that every one fails. All have the signature of `rejection_sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from minillm.sampling import Draw, uniform
from minillm.speculative import rejection_sampler
from minillm.speculative.rejection_sampler import (
    AcceptRule,
    Verdict,
    acceptance_probability,
    rejection_sample,
    residual,
)
from minillm.speculative.typical import likely_enough

Judge = Callable[..., list[Verdict]]


def inverted_ratio(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Accept with q(x) / p(x): keeps what the draft likes too much."""
    return acceptance_probability(q, p, x)


def target_alone(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Accept with p(x). Exact if p without x follows; not with max(0, p - q), which makes good for min(1, p/q)."""
    return p.gather(-1, x[:, None]).squeeze(-1)


def first_draft_unseen(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Accept the first draft whatever it is: what happens if the last committed token is not in the verify input."""
    chances = acceptance_probability(p, q, x)
    chances[0] = 1.0
    return chances


def full_target(p: Tensor, q: Tensor) -> Tensor:
    """Recover from all of p: tokens that acceptance has served already are served twice."""
    return p


def refiltered_residual(p: Tensor, q: Tensor) -> Tensor:
    """Recover from the residual after top-k (here 1) was applied to it a second time."""
    left = residual(p, q)
    return torch.zeros_like(left).scatter_(-1, left.argmax(-1, keepdim=True), 1.0)


def one_uniform_for_both(*arguments: Sequence, **options: AcceptRule) -> list[Verdict]:
    """Replace a draft with the same uniform that rejected it: that one is never below p(x)/q(x)."""

    def reused(seed: int, index: int, purpose: Draw) -> float:
        return uniform(seed, index, Draw.ACCEPT if purpose is Draw.RECOVER else purpose)

    with patch.object(rejection_sampler, "uniform", reused):
        return rejection_sample(*arguments, **options)


def _with_rows(pick: Callable[[int], list[int]]) -> Judge:
    """`pick(num_drafts)` says which row stands in for each of the `num_drafts + 1` rows of a request."""

    def judge(
        draft_token_ids: Sequence[Sequence[int]],
        draft_probs: Sequence[Tensor | None],
        target_probs: Tensor,
        seeds: Sequence[int],
        first_index: Sequence[int],
    ) -> list[Verdict]:
        rows: list[int] = []
        for drafts in draft_token_ids:
            start = len(rows)
            rows += [start + row for row in pick(len(drafts))]
        return rejection_sample(draft_token_ids, draft_probs, target_probs[rows], seeds, first_index)

    return judge


WRONG_RULES: dict[str, Judge] = {
    "full target after a rejection": partial(rejection_sample, rule=AcceptRule(recover=full_target)),
    "residual filtered again": partial(rejection_sample, rule=AcceptRule(recover=refiltered_residual)),
    "ratio upside down": partial(rejection_sample, rule=AcceptRule(accept=inverted_ratio)),
    "p(x) with the residual of p/q": partial(rejection_sample, rule=AcceptRule(accept=target_alone)),
    "typical acceptance": partial(rejection_sample, rule=AcceptRule(accept=likely_enough, recover=full_target)),
    "first draft never judged": partial(rejection_sample, rule=AcceptRule(accept=first_draft_unseen)),
    "one uniform to accept and to recover": one_uniform_for_both,
    "rows one too early": _with_rows(lambda k: [0, *range(k)]),
    "rows one too late": _with_rows(lambda k: [*range(1, k + 1), k]),
    "bonus from the last judged row": _with_rows(lambda k: [*range(k), max(0, k - 1)]),
}
