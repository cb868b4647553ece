"""Which drafts stay: rejection sampling that leaves the target's distribution unchanged.

Leviathan et al. 2023, "Fast inference from Transformers via speculative decoding"; Chen et al. 2023, "Accelerating
large language model decoding with speculative sampling". With p the target's distribution and q the draft's, *both
after* temperature, penalties and filters:

    draft token       x ~ q, a guess of the draft model at some position
    accepted token    a draft that stays: with probability min(1, p(x) / q(x))
    recovered token   the target's own token in place of the first draft that did not: from norm(max(0, p - q))
    bonus token       the target's own token after the last draft if all stayed: from p one position further

       drafts                   x₁        x₂        x₃
       target row judges        p₁        p₂        p₃        p₄
       all accepted             x₁        x₂        x₃        bonus ~ p₄
       x₂ rejected              x₁        recovered, and x₃ is forgotten

So each round commits 1 to γ + 1 tokens, and each is distributed as p: P(y) = q(y)·min(1, p(y)/q(y)) from acceptance,
plus max(0, p(y) - q(y)) from recovery. A draft is accepted with probability α = Σ min(p, q) = 1 - TV(p, q).

The proof needs q to be what x really was drawn from. A drafter may decide *whether* to draft a position by looking at
the tokens before it, but not at x: dropping guesses it finds unlikely changes q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from minillm.errors import DraftError
from minillm.sampling import Draw, sample, uniform


@dataclass(frozen=True)
class Verdict:
    """The outcome for one request."""

    token_ids: list[int]
    """The accepted drafts, then one token of the target's own: recovered after a rejection, else the bonus."""
    num_accepted: int


def acceptance_probability(
    p: Tensor,  # [..., vocab] target
    q: Tensor,  # [..., vocab] draft
    x: Tensor,  # [...] int64, the drafts
) -> Tensor:  # [...]
    """min(1, p(x) / q(x)); NaN where q(x) = 0, for then x was not drawn from q.

    Where q is one-hot (deterministic drafts, or temperature 0) this is p(x).
    """
    p_x = p.gather(-1, x[..., None]).squeeze(-1)
    q_x = q.gather(-1, x[..., None]).squeeze(-1)
    return torch.where(q_x > 0, (p_x / q_x).clamp(max=1.0), math.nan)


def residual(
    p: Tensor,  # [..., vocab] target
    q: Tensor,  # [..., vocab] draft
) -> Tensor:  # [..., vocab]
    """norm(max(0, p - q)): what acceptance has left undone of p. One-hot q: p without x, renormalised.

    If p nowhere exceeds q, the two are equal up to rounding and a rejection has a chance of about 1e-7 instead of 0.
    Then the answer is p itself: nothing drawn in so rare a case can be noticed in the distribution, and p alone never
    emits a token that the target rules out.
    """
    left = (p - q).clamp(min=0.0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


@dataclass(frozen=True)
class AcceptRule:
    """The two functions that make up the rule. Replace either to try your own: the defaults are the exact ones."""

    accept: Callable[[Tensor, Tensor, Tensor], Tensor] = acceptance_probability
    """`(p [k, vocab], q [k, vocab], x [k])` → `[k]`: the probability to accept each draft of one request."""
    recover: Callable[[Tensor, Tensor], Tensor] = residual
    """`(p [n, vocab], q [n, vocab])` → `[n, vocab]`: what to draw from in place of each rejected draft."""


EXACT = AcceptRule()


def rejection_sample(
    draft_token_ids: Sequence[Sequence[int]],  # per request, k_i drafts (k_i may be 0)
    draft_probs: Sequence[Tensor | None],  # per request [k_i, vocab] fp32, or None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [sum(k_i + 1), vocab] fp32; a request's row j judges its draft j, its last row is the bonus
    seeds: Sequence[int],  # per request
    first_index: Sequence[int],  # per request: token index (from the start of the sequence) of its first draft
    rule: AcceptRule = EXACT,
) -> list[Verdict]:
    """Accept each draft x with probability min(1, p(x)/q(x)); at the first rejection draw from norm(max(0, p-q)).

    A token's uniforms hang on its index in the sequence: `Draw.ACCEPT` judges a draft, `Draw.RECOVER` replaces it,
    `Draw.SAMPLE` draws the bonus, which makes a request without drafts sample exactly as without speculation. Each is
    used once: only the first rejection is replaced, and the next round starts one index later. (The next round draws
    other drafts for forgotten positions from the same `Draw.DRAFT` uniforms; no committed token depends on the old.)

    Raises `DraftError` if the arguments do not fit together or a draft has probability 0 under its own q, and
    `NonFiniteLogitsError` if a row to draw from has no probability in it.
    """
    check_drafts(draft_token_ids, draft_probs, target_probs.shape, seeds, first_index)
    if not draft_token_ids:
        return []
    num_drafts = [len(drafts) for drafts in draft_token_ids]
    starts = [0, *accumulate(k + 1 for k in num_drafts)][:-1]
    flat = torch.tensor(
        [x for drafts in draft_token_ids for x in drafts], dtype=torch.int64, device=target_probs.device
    )
    drafts = flat.split(num_drafts)

    chances = _acceptance(drafts, draft_probs, target_probs, starts, rule)
    accepted = [
        _count_accepted(chance, seed, index) for chance, seed, index in zip(chances, seeds, first_index, strict=True)
    ]
    final = target_probs[[start + n for start, n in zip(starts, accepted, strict=True)]]  # [num_requests, vocab]
    rejected = [r for r, n in enumerate(accepted) if n < num_drafts[r]]
    if rejected:
        q = torch.cat([_proposal(drafts[r], draft_probs[r], final, accepted[r], accepted[r] + 1) for r in rejected])
        final[rejected] = rule.recover(final[rejected], q)
    own = sample(final, _last_uniforms(accepted, num_drafts, seeds, first_index, final.device)).tolist()
    return [Verdict([*ids[:n], token], n) for ids, n, token in zip(draft_token_ids, accepted, own, strict=True)]


def greedy_verdicts(
    draft_token_ids: Sequence[Sequence[int]],  # per request, k_i drafts (k_i may be 0)
    likeliest: list[int],  # sum(k_i + 1): the target's likeliest token in each of the rows
) -> list[Verdict]:
    """What `rejection_sample` decides without chance: a draft stays if it is what the target would have said.

    With a one-hot p, min(1, p(x)/q(x)) is 1 for that token and 0 for any other, and norm(max(0, p - q)) is p.
    """
    verdicts, start = [], 0
    for drafts in draft_token_ids:
        own = likeliest[start : start + len(drafts) + 1]
        accepted = next((j for j, x in enumerate(drafts) if x != own[j]), len(drafts))
        verdicts.append(Verdict(own[: accepted + 1], accepted))
        start += len(own)
    return verdicts


def _acceptance(
    drafts: Sequence[Tensor],  # per request [k_i] int64
    draft_probs: Sequence[Tensor | None],  # per request [k_i, vocab]
    target_probs: Tensor,  # [sum(k_i + 1), vocab]
    starts: Sequence[int],  # per request: its first row in target_probs
    rule: AcceptRule,
) -> list[list[float]]:
    """The acceptance probability of every draft of every request.

    Requests take their turns, because p and q are then views: gathered for all at once they would be copied whole.
    Only the numbers that matter cross to the host, in one transfer.
    """
    chances = [
        rule.accept(target_probs[start : start + len(x)], _proposal(x, probs, target_probs, 0, len(x)), x)
        for x, probs, start in zip(drafts, draft_probs, starts, strict=True)
        if len(x)
    ]
    flat = iter(torch.cat(chances).tolist() if chances else ())
    listed = [list(islice(flat, len(x))) for x in drafts]
    for r, chance in enumerate(listed):
        if any(map(math.isnan, chance)):
            raise DraftError(
                f"request {r}: drafts {drafts[r].tolist()} are accepted with probabilities {chance}; NaN means that "
                "draft_probs give the token 0: they must be the distribution it was drawn from, and hold no NaN"
            )
    return listed


def _count_accepted(chances: list[float], seed: int, index: int) -> int:
    """How many drafts stay before the first rejection. `u < chance` accepts surely at 1 and never at 0."""
    for j, chance in enumerate(chances):
        if not uniform(seed, index + j, Draw.ACCEPT) < chance:
            return j
    return len(chances)


def _last_uniforms(
    accepted: Sequence[int],
    num_drafts: Sequence[int],
    seeds: Sequence[int],
    first_index: Sequence[int],
    device: torch.device,
) -> Tensor:  # [num_requests] fp64
    """What draws the target's own token of each request: the recovered one or the bonus."""
    uniforms = [
        uniform(seed, index + n, Draw.RECOVER if n < k else Draw.SAMPLE)
        for n, k, seed, index in zip(accepted, num_drafts, seeds, first_index, strict=True)
    ]
    return torch.tensor(uniforms, dtype=torch.float64, device=device)


def _proposal(
    drafts: Tensor,  # [k] int64
    probs: Tensor | None,  # [k, vocab]
    like: Tensor,  # [..., vocab]: where one-hot rows live
    first: int,
    end: int,
) -> Tensor:  # [end - first, vocab]
    """q of the drafts `first … end - 1` of one request; one-hot rows where drafts are deterministic.

    One-hot rows are made where they are looked at and dropped again: all at once they are as large as `target_probs`.
    """
    if probs is not None:
        return probs[first:end]
    return like.new_zeros(end - first, like.shape[-1]).scatter_(1, drafts[first:end, None], 1.0)


def check_drafts(
    draft_token_ids: Sequence[Sequence[int]],
    draft_probs: Sequence[Tensor | None],
    target_shape: Sequence[int],  # of target_probs, or of the logits they will be made from
    seeds: Sequence[int],
    first_index: Sequence[int],
) -> None:
    """Raise `DraftError` if the arguments of `rejection_sample` do not fit together. Looks at no number on a device."""
    counts = {len(draft_token_ids), len(draft_probs), len(seeds), len(first_index)}
    if len(counts) > 1:
        raise DraftError(
            f"drafts of {len(draft_token_ids)} requests came with {len(draft_probs)} draft_probs, {len(seeds)} seeds "
            f"and {len(first_index)} first indices: give one of each per request"
        )
    num_rows, vocab = target_shape
    needed = sum(len(drafts) + 1 for drafts in draft_token_ids)
    if num_rows != needed:
        raise DraftError(
            f"target_probs has {num_rows} rows, {needed} are needed: one per draft and one more per request, "
            "for the bonus token"
        )
    for r, (drafts, probs) in enumerate(zip(draft_token_ids, draft_probs, strict=True)):
        if probs is not None and probs.shape != (len(drafts), vocab):
            raise DraftError(
                f"request {r}: draft_probs has shape {list(probs.shape)}, must be [drafts, vocab] = "
                f"{[len(drafts), vocab]}; pad or cut the draft's vocabulary to the target's"
            )
        if not all(0 <= token < vocab for token in drafts):
            raise DraftError(f"request {r}: drafts {list(drafts)} leave the vocabulary of {vocab} tokens")
