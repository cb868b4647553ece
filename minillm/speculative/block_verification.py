"""Block verification: judge all drafts of a request together. Exact, and accepts more than token-by-token rejection.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2. Token-by-token rejection stops at
the first rejected draft. Here a later draft that the target likes better than the draft model did can make up for an
earlier one: with p the target's distribution, q the draft's and x_1 … x_γ the drafts,

    w_0 = 1,    w_i = min(1, w_(i-1) · p(x_i) / q(x_i))                   how much of the first i drafts may be kept
    r_i = Σ_y max(0, w_i · p(y) - q(y))   at position i + 1               what the target still lacks there
    h_i = r_i / (r_i + 1 - w_i)  for i < γ,    h_γ = w_γ
    accepted: the largest i with u_i < h_i (0 if there is none), u_i uniform
    next token: from norm(max(0, w_i · p - q)) at position i + 1, or from p after all γ drafts

The committed tokens are distributed as the target's, and their expected number is the largest that any exact rule can
reach; so it is never below that of the standard rule.

Every u_i is looked at, also those behind the accepted drafts. So a uniform must not be used again when the same
positions are drafted in the next round: all of them are keyed by the position of the round's first draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import DraftError
from minillm.sampling import Draw, sample, uniform
from minillm.speculative.rejection_sampler import Verdict, check_drafts, draft_distribution


@dataclass(frozen=True)
class BlockRule:
    """`rejection_sample_method="block"`, for chains. A tree of a drafter that did not announce it
    (`Drafter.proposes_trees`) is judged by the standard rule."""

    is_exact = True

    def verdicts(
        self,
        draft_token_ids: Sequence[Sequence[int]],
        draft_probs: Sequence[Tensor | None],
        target_probs: Tensor,
        seeds: Sequence[int],
        first_index: Sequence[int],
    ) -> list[Verdict]:
        """See `block_verify`."""
        return block_verify(draft_token_ids, draft_probs, target_probs, seeds, first_index)


def block_verify(
    draft_token_ids: Sequence[Sequence[int]],  # per request, k_i drafts (k_i may be 0)
    draft_probs: Sequence[Tensor | None],  # per request [k_i, vocab] fp32, or None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [sum(k_i + 1), vocab] fp32; a request's row j judges its draft j, its last row is the bonus
    seeds: Sequence[int],  # per request
    first_index: Sequence[int],  # per request: token index (from the start of the sequence) of its first draft
) -> list[Verdict]:
    """Like `rejection_sample`, with at least as many accepted drafts on average. Raises what it raises."""
    check_drafts(draft_token_ids, draft_probs, target_probs.shape, seeds, first_index)
    verdicts, start = [], 0
    for token_ids, probs, seed, index in zip(draft_token_ids, draft_probs, seeds, first_index, strict=True):
        rows = target_probs[start : start + len(token_ids) + 1]
        start += len(rows)
        verdicts.append(_verify(token_ids, probs, rows, seed, index))
    return verdicts


def kept_weights(
    p: Tensor,  # [k, vocab] target
    q: Tensor,  # [k, vocab] draft
    x: Tensor,  # [k] int64, the drafts
) -> Tensor:  # [k + 1] fp64
    """w_0 … w_k. NaN from the first draft on that its own q gives probability 0."""
    p_x, q_x = (rows.double().gather(1, x[:, None]).squeeze(1) for rows in (p, q))
    ratio = torch.where(q_x > 0, p_x / q_x, math.nan)
    weights = [torch.ones((), dtype=torch.float64, device=p.device)]
    for step in ratio:
        weights.append((weights[-1] * step).clamp(max=1.0))
    return torch.stack(weights)


def acceptance(
    weights: Tensor,  # [k + 1] fp64: w
    p: Tensor,  # [k, vocab] target: row i is what follows i drafts
    q: Tensor,  # [k, vocab] draft
) -> Tensor:  # [k] fp64
    """h_1 … h_k. If w_i = 1 and p = q, h_i is 0 / 0; then w_(i+1) is 1 too, and any h_i gives the same tokens."""
    lacking = (weights[1:-1, None] * p[1:].double() - q[1:].double()).clamp(min=0.0).sum(dim=1)
    some = lacking / (lacking + 1.0 - weights[1:-1])
    return torch.cat((some.nan_to_num(1.0), weights[-1:]))


def _verify(token_ids: Sequence[int], probs: Tensor | None, target: Tensor, seed: int, index: int) -> Verdict:
    """The verdict of one request. `target`: `[k + 1, vocab]`."""
    k = len(token_ids)
    if not k:
        return Verdict(sample(target, [uniform(seed, index, Draw.SAMPLE)]).tolist(), 0)
    x = torch.tensor(token_ids, dtype=torch.int64, device=target.device)
    q = draft_distribution(x, probs, target, 0, k)
    weights = kept_weights(target[:k], q, x)
    if weights.isnan().any():
        raise DraftError(
            f"drafts {list(token_ids)} have probability 0 in draft_probs, or NaN: they must be the distribution that "
            "the drafts were drawn from"
        )
    chances = acceptance(weights, target[:k], q).tolist()
    hits = [i for i, h in enumerate(chances, start=1) if uniform(seed, index, Draw.ACCEPT, i) < h]
    accepted = hits[-1] if hits else 0
    if accepted == k:
        final, purpose = target[k:], Draw.SAMPLE
    else:
        left = (weights[accepted] * target[accepted].double() - q[accepted].double()).clamp(min=0.0)
        # Nothing left: p = q up to rounding, and the rejection had a chance of about 1e-7 instead of 0.
        final, purpose = (left if left.sum() > 0 else target[accepted].double())[None], Draw.RECOVER
    own = sample(final, [uniform(seed, index, purpose, accepted)]).tolist()
    return Verdict([*token_ids[:accepted], *own], accepted)
