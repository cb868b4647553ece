"""Which drafts are accepted: rejection sampling that leaves the target's distribution unchanged.

Leviathan et al. 2023, "Fast inference from Transformers via speculative decoding"; Chen et al. 2023, "Accelerating
large language model decoding with speculative sampling". With p the target's distribution and q the draft's, *both
after* temperature, penalties and filters:

    draft token       x ~ q, a proposal for one position
    accepted token    a draft that becomes output, with probability min(1, p(x) / q(x))
    recovered token   a token of the target in place of the first rejected draft, from norm(max(0, p - q))
    bonus token       a token of the target after the last draft if all are accepted, from p one position further

       drafts                   x₁        x₂        x₃
       target rows              p₁        p₂        p₃        p₄
       all accepted             x₁        x₂        x₃        bonus ~ p₄
       x₂ rejected              x₁        recovered           (x₃ is discarded)

Several drafts for the same position (siblings in a tree) are judged in order. After each rejection, p is replaced by
the residual norm(max(0, p - q)), and the next sibling is judged against that (SpecInfer: Miao et al. 2024, section
4.3).

So each round commits 1 to γ + 1 tokens, and each is distributed as p: P(y) = q(y)·min(1, p(y)/q(y)) from acceptance,
plus max(0, p(y) - q(y)) from recovery. A draft is accepted with probability α = Σ min(p, q) = 1 - TV(p, q).

The proof requires that x was really drawn from q. A drafter may decide *whether* to draft a position from the tokens
before it, but not from x: dropping drafts that look unlikely changes q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import torch
from torch import Tensor

from minillm.batch import MAX_TREE_TOKENS
from minillm.errors import DraftError
from minillm.sampling import Draw, sample, uniform


@dataclass(frozen=True)
class Verdict:
    """The outcome for one request."""

    token_ids: list[int]
    """The accepted drafts, then one token of the target: recovered after a rejection, else the bonus token."""
    num_accepted: int
    path: list[int] | None = None
    """The accepted nodes of a draft tree, from the root on; None for a chain."""


def acceptance_probability(
    p: Tensor,  # [..., vocab] target
    q: Tensor,  # [..., vocab] draft
    x: Tensor,  # [...] int64, the drafts
) -> Tensor:  # [...]
    """min(1, p(x) / q(x)); NaN where q(x) = 0, because then x was not drawn from q.

    Where q is one-hot (deterministic drafts, or temperature 0) this is p(x).
    """
    p_x = p.gather(-1, x[..., None]).squeeze(-1)
    q_x = q.gather(-1, x[..., None]).squeeze(-1)
    return torch.where(q_x > 0, (p_x / q_x).clamp(max=1.0), math.nan)


def residual(
    p: Tensor,  # [..., vocab] target
    q: Tensor,  # [..., vocab] draft
) -> Tensor:  # [..., vocab]
    """norm(max(0, p - q)): the part of p that acceptance does not cover. For a one-hot q: p without x, renormalised.

    If p nowhere exceeds q, the two are equal up to rounding, and a rejection has probability about 1e-7 instead of 0.
    Then the result is p: such a rare case does not change the distribution measurably, and p never emits a token that
    the target excludes.
    """
    left = (p - q).clamp(min=0.0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


class Rule(Protocol):
    """How the drafts of a step are judged: `AcceptRule` one by one, `BlockRule` all of a request together."""

    @property
    def is_exact(self) -> bool:
        """Whether it leaves the target's distribution unchanged; then greedy requests need no distributions."""

    def verdicts(
        self,
        draft_token_ids: Sequence[Sequence[int]],
        draft_probs: Sequence[Tensor | None],
        target_probs: Tensor,
        seeds: Sequence[int],
        first_index: Sequence[int],
    ) -> list[Verdict]:
        """One verdict per request. The arguments are those of `rejection_sample`."""


@dataclass(frozen=True)
class AcceptRule:
    """The two functions that decide acceptance. The defaults are exact; replace either to try your own."""

    accept: Callable[[Tensor, Tensor, Tensor], Tensor] = acceptance_probability
    """`(p [k, vocab], q [k, vocab], x [k])` → `[k]`: the acceptance probability of each draft of one request."""
    recover: Callable[[Tensor, Tensor], Tensor] = residual
    """`(p [n, vocab], q [n, vocab])` → `[n, vocab]`: the distribution of each recovered token."""

    @property
    def is_exact(self) -> bool:
        """Whether both functions are the exact ones."""
        return self == EXACT

    def verdicts(
        self,
        draft_token_ids: Sequence[Sequence[int]],
        draft_probs: Sequence[Tensor | None],
        target_probs: Tensor,
        seeds: Sequence[int],
        first_index: Sequence[int],
    ) -> list[Verdict]:
        """See `rejection_sample`."""
        return rejection_sample(draft_token_ids, draft_probs, target_probs, seeds, first_index, self)


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

    The uniforms of a token depend on its index in the sequence: `Draw.ACCEPT` judges a draft, `Draw.RECOVER` draws the
    recovered token, `Draw.SAMPLE` the bonus token. So a request without drafts samples the same token as without
    speculation. Each uniform is used once: only the first rejection is replaced, and the next round starts one index
    later.

    Raises `DraftError` if the arguments do not match or a draft has probability 0 under its own q, and
    `NonFiniteLogitsError` if a row to sample from sums to 0, NaN or infinity.
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
        q = torch.cat(
            [draft_distribution(drafts[r], draft_probs[r], final, accepted[r], accepted[r] + 1) for r in rejected]
        )
        final[rejected] = rule.recover(final[rejected], q)
    own = sample(final, _final_uniforms(accepted, num_drafts, seeds, first_index, final.device)).tolist()
    return [Verdict([*ids[:n], token], n) for ids, n, token in zip(draft_token_ids, accepted, own, strict=True)]


def greedy_verdicts(
    draft_token_ids: Sequence[Sequence[int]],  # per request, k_i drafts (k_i may be 0)
    argmax_ids: list[int],  # sum(k_i + 1): the argmax of the target's logits in each of the rows
) -> list[Verdict]:
    """`rejection_sample` for greedy requests: a draft is accepted if it is the target's argmax.

    With a one-hot p, min(1, p(x)/q(x)) is 1 for the argmax and 0 for any other token, and norm(max(0, p - q)) is p.
    """
    verdicts, start = [], 0
    for drafts in draft_token_ids:
        own = argmax_ids[start : start + len(drafts) + 1]
        accepted = next((j for j, x in enumerate(drafts) if x != own[j]), len(drafts))
        verdicts.append(Verdict(own[: accepted + 1], accepted))
        start += len(own)
    return verdicts


def judge_tree(
    token_ids: Sequence[int],  # k nodes
    parents: Sequence[int],  # k: index of each node's parent, -1: the last committed token; parents come first
    draft_probs: Tensor | None,  # [k, vocab] fp32, or None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [k + 1, vocab] fp32; row 0 follows the last committed token, row i + 1 follows node i
    seed: int,
    first_index: int,  # token index (from the start of the sequence) of the root's children
    rule: AcceptRule = EXACT,
) -> Verdict:
    """Walk down from the root: judge the children of each accepted node in order, until none is accepted.

    A child is accepted with probability min(1, p(x)/q(x)). After a rejection, p ← norm(max(0, p - q)) for the next
    child. If every node has one child, this is `rejection_sample`. Raises the same errors.
    """
    check_drafts([token_ids], [draft_probs], target_probs.shape, [seed], [first_index])
    path: list[int] = []
    node = -1
    while True:
        p = target_probs[node + 1 : node + 2]  # [1, vocab]
        index = first_index + len(path)
        children = [i for i, parent in enumerate(parents) if parent == node]
        for sibling, child in enumerate(children):
            x = torch.tensor([token_ids[child]], device=p.device)
            q = draft_distribution(x, None if draft_probs is None else draft_probs[child : child + 1], p, 0, 1)
            chance = float(rule.accept(p, q, x))
            if math.isnan(chance):
                raise DraftError(
                    f"node {child} of a draft tree, token {token_ids[child]}, has probability 0 in draft_probs: it "
                    "must be the distribution the token was drawn from, without NaN"
                )
            if uniform(seed, index, Draw.ACCEPT, sibling) < chance:
                path.append(child)
                node = child
                break
            p = rule.recover(p, q)
        else:
            purpose = Draw.RECOVER if children else Draw.SAMPLE
            own = sample(p, [uniform(seed, index, purpose)]).tolist()
            return Verdict([*(token_ids[i] for i in path), *own], len(path), path)


def greedy_tree_verdict(
    token_ids: Sequence[int],  # k nodes
    parents: Sequence[int],  # k
    argmax: Sequence[int],  # k + 1: the target's argmax in each row of `judge_tree`
) -> Verdict:
    """`judge_tree` for greedy requests: follow the child that is the target's argmax, as long as there is one."""
    path: list[int] = []
    node = -1
    while True:
        own = argmax[node + 1]
        child = next((i for i, parent in enumerate(parents) if parent == node and token_ids[i] == own), None)
        if child is None:
            return Verdict([*(token_ids[i] for i in path), own], len(path), path)
        path.append(child)
        node = child


def check_tree(token_ids: Sequence[int], parents: Sequence[int]) -> None:
    """Raise `DraftError` unless each node has a parent, parents come before children, and the tree is not too large."""
    if len(parents) != len(token_ids):
        raise DraftError(f"a draft tree of {len(token_ids)} tokens has {len(parents)} parents: give one per token")
    if len(token_ids) >= MAX_TREE_TOKENS:
        raise DraftError(
            f"a draft tree of {len(token_ids)} nodes: at most {MAX_TREE_TOKENS - 1} can be verified; draft fewer"
        )
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise DraftError(f"node {node} of a draft tree follows node {parent}: parents are -1 or come before")


def path_to(node: int, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The tokens of a draft tree from the root to `node`."""
    tokens = []
    while node >= 0:
        tokens.append(token_ids[node])
        node = parents[node]
    return tokens[::-1]


def _acceptance(
    drafts: Sequence[Tensor],  # per request [k_i] int64
    draft_probs: Sequence[Tensor | None],  # per request [k_i, vocab]
    target_probs: Tensor,  # [sum(k_i + 1), vocab]
    starts: Sequence[int],  # per request: its first row in target_probs
    rule: AcceptRule,
) -> list[list[float]]:
    """The acceptance probability of every draft of every request.

    Requests are processed one by one, so that p and q are views; gathering them for all requests would copy them. Only
    the acceptance probabilities are copied to the host, in one transfer.
    """
    chances = [
        rule.accept(target_probs[start : start + len(x)], draft_distribution(x, probs, target_probs, 0, len(x)), x)
        for x, probs, start in zip(drafts, draft_probs, starts, strict=True)
        if len(x)
    ]
    flat = iter(torch.cat(chances).tolist() if chances else ())
    listed = [list(islice(flat, len(x))) for x in drafts]
    for r, chance in enumerate(listed):
        if any(map(math.isnan, chance)):
            raise DraftError(
                f"request {r}: drafts {drafts[r].tolist()} are accepted with probabilities {chance}; NaN means that "
                "draft_probs is 0 for the token: it must be the distribution it was drawn from, without NaN"
            )
    return listed


def _count_accepted(chances: list[float], seed: int, index: int) -> int:
    """How many drafts are accepted before the first rejection. `u < chance` always accepts at 1 and never at 0."""
    for j, chance in enumerate(chances):
        if not uniform(seed, index + j, Draw.ACCEPT) < chance:
            return j
    return len(chances)


def _final_uniforms(
    accepted: Sequence[int],
    num_drafts: Sequence[int],
    seeds: Sequence[int],
    first_index: Sequence[int],
    device: torch.device,
) -> Tensor:  # [num_requests] fp64
    """The uniform that samples each request's last token: the recovered or the bonus token."""
    uniforms = [
        uniform(seed, index + n, Draw.RECOVER if n < k else Draw.SAMPLE)
        for n, k, seed, index in zip(accepted, num_drafts, seeds, first_index, strict=True)
    ]
    return torch.tensor(uniforms, dtype=torch.float64, device=device)


def draft_distribution(
    drafts: Tensor,  # [k] int64
    probs: Tensor | None,  # [k, vocab]
    like: Tensor,  # [..., vocab]: dtype and device of the result
    first: int,
    end: int,
) -> Tensor:  # [end - first, vocab]
    """q of the drafts `first … end - 1` of one request; one-hot rows for deterministic drafts.

    One-hot rows are created only when needed: those of all requests together are as large as `target_probs`.
    """
    if probs is not None:
        return probs[first:end].to(like)
    return like.new_zeros(end - first, like.shape[-1]).scatter_(1, drafts[first:end, None], 1.0)


def check_drafts(
    draft_token_ids: Sequence[Sequence[int]],
    draft_probs: Sequence[Tensor | None],
    target_shape: Sequence[int],  # of target_probs, or of the logits they will be made from
    seeds: Sequence[int],
    first_index: Sequence[int],
) -> None:
    """Raise `DraftError` if the arguments of `rejection_sample` do not match. Does not read tensor values."""
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
            raise DraftError(f"request {r}: drafts {list(drafts)} are outside the vocabulary of {vocab} tokens")
