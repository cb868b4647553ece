"""Lesson 11, the references: tokens per round, the best γ, n-gram drafts, tree masks, adaptive drafts, distillation."""

from __future__ import annotations

import torch
from torch import Tensor


def expected_tokens(alphas: list[float]) -> float:
    """Return τ, the tokens of a round on average: 1 + Σᵢ Πⱼ≤ᵢ αⱼ.

    `alphas[i]`: probability that draft i + 1 is accepted if all drafts before it were (conditional acceptance). The 1
    is the token that the target adds to every round. (Leviathan et al. 2023, equation 1, for equal alphas.)
    """
    tokens = survival = 1.0
    for alpha in alphas:
        survival *= alpha
        tokens += survival
    return tokens


def best_gamma(alphas: list[float], c: float, v: list[float]) -> int:
    """Return the number of drafts per round that decodes fastest; the smallest of equals, 0 for none.

    A round of g drafts gives τ(g) tokens in g·c + v[g] plain steps. `alphas`: conditional acceptance by position;
    `c`: time to draft one token, and `v[g]`: time to verify g drafts, both divided by the time of a plain step.
    `v[0]` is 1. (Leviathan et al. 2023, theorem 3.8, with v instead of 1.)
    """
    speeds = [1.0]
    tokens = survival = 1.0
    for gamma, alpha in enumerate(alphas, start=1):
        survival *= alpha
        tokens += survival
        speeds.append(tokens / (gamma * c + v[gamma]))
    return speeds.index(max(speeds))


def ngram_propose(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """Return `count` drafts: the tokens that followed the last n tokens where they occurred before; [] if nowhere.

    The largest n decides, from `longest` down to `shortest`; of its earlier occurrences, the latest. If the text ends
    before there are `count` drafts, they repeat from the first one. (Prompt lookup, Saxena 2023; the results are those
    of `minillm.speculative.ngram`.)
    """
    for n in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                followed = token_ids[start + n :]
                return [followed[i % len(followed)] for i in range(count)]
    return []


def tree_mask(parents: list[int]) -> Tensor:
    """Return which tokens each token of a draft tree attends to: `[1 + n, 1 + n]` bool for n drafts.

    Row and column 0 are the last committed token, the root; row and column i + 1 are draft i. `parents[i]` is the
    index of another draft, or -1 for the root; parents come first. A token attends to itself and to its ancestors.
    """
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for row, parent in enumerate(parents, start=1):
        mask[row] |= mask[parent + 1]
    return mask


def choose_drafts(survival: list[list[float]], seconds: list[float]) -> list[int]:
    """Return how many drafts each request gets in this step.

    `survival[r][i]`: probability that draft i + 1 of request r and all before it are accepted. `seconds[m]`: a step
    with m drafts in all. The most probable drafts are taken, as many as give the most tokens per second, the fewest of
    equals. Of equally probable drafts, those of an earlier request come first.
    """
    slots = [(p, r) for r, chances in enumerate(survival) for p in chances]
    slots.sort(key=lambda slot: -slot[0])
    tokens, counts, chosen = float(len(survival)), [0] * len(survival), [0] * len(survival)
    fastest = tokens / seconds[0]
    for m, (p, r) in enumerate(slots, start=1):
        tokens += p
        counts[r] += 1
        if tokens / seconds[m] > fastest:
            fastest, chosen = tokens / seconds[m], list(counts)
    return chosen


def distil_loss(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return −log Σₓ min(p(x), q(x)), averaged over the rows: a scalar.

    Logits: `[rows, vocab]`; p and q are the softmax of the target's and of the draft
    model's. Σ min(p, q) is the probability
    that a draft is accepted, so this is the negative log-likelihood of acceptance (the LK loss).
    """
    p, q = target_logits.softmax(-1), draft_logits.softmax(-1)
    return -torch.minimum(p, q).sum(-1).log().mean()
