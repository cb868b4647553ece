"""Lesson 11, planted mistakes: wrong versions of each exercise, with the sentence that names them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l11_reference import (
    best_gamma,
    choose_drafts,
    distil_loss,
    expected_tokens,
    ngram_propose,
    tree_mask,
)
from minillm.teaching.source import wrong_versions

# ---------------------------------------------------------------------------------------------------- expected_tokens


def _mean(alphas: list[float]) -> float:
    return sum(alphas) / max(1, len(alphas))


TOKENS = (
    WrongVersion(
        "adds the conditional probabilities themselves: a draft counts only if all drafts before it were accepted, "
        "too (multiply)",
        lambda alphas: 1 + sum(alphas),
    ),
    WrongVersion(
        "leaves out the token that the target adds to every round", lambda alphas: expected_tokens(alphas) - 1
    ),
    WrongVersion(
        "counts drafts only if all of them are accepted",
        lambda alphas: 1 + len(alphas) * (expected_tokens(alphas) > 0) * ([*accumulate(alphas, mul, initial=1.0)][-1]),
    ),
    WrongVersion(
        "uses the first position's acceptance for all positions",
        lambda alphas: expected_tokens(alphas[:1] * len(alphas)),
    ),
    WrongVersion(
        "uses the mean acceptance for all positions; their order matters",
        lambda alphas: expected_tokens([_mean(alphas)] * len(alphas)),
    ),
    WrongVersion("reads the positions from the last to the first", lambda alphas: expected_tokens(alphas[::-1])),
    WrongVersion("leaves out the last draft", lambda alphas: expected_tokens(alphas[:-1])),
    WrongVersion("leaves out the first draft", lambda alphas: expected_tokens(alphas[1:])),
    WrongVersion("returns the number of tokens if every draft were accepted", lambda alphas: 1.0 + len(alphas)),
    *wrong_versions(
        expected_tokens,
        {
            "adds the acceptances up in a running sum instead of a running product": (
                "survival *= alpha",
                "survival += alpha",
            ),
            "counts each draft before its own acceptance is multiplied in": (
                "        survival *= alpha\n        tokens += survival",
                "        tokens += survival\n        survival *= alpha",
            ),
            "multiplies the tokens by the probabilities instead of adding them": (
                "tokens += survival",
                "tokens *= survival",
            ),
            "returns only the last probability": ("tokens += survival", "tokens = survival"),
        },
    ),
)

# --------------------------------------------------------------------------------------------------------- best_gamma

Speed = Callable[[list[float], float, list[float], int], float]


def _fastest(speed: Speed, first: int = 0) -> Callable[[list[float], float, list[float]], int]:
    def choose(alphas: list[float], c: float, v: list[float]) -> int:
        return max(range(min(first, len(alphas)), len(alphas) + 1), key=lambda g: speed(alphas, c, v, g))

    return choose


GAMMA = (
    WrongVersion(
        "counts drafts as free: it leaves out γ·c",
        _fastest(lambda alphas, c, v, g: expected_tokens(alphas[:g]) / v[g]),
    ),
    WrongVersion(
        "treats verification as free: it takes 1 for v[γ]",
        _fastest(lambda alphas, c, v, g: expected_tokens(alphas[:g]) / (g * c + 1)),
    ),
    WrongVersion(
        "counts the price of one draft only: c instead of γ·c",
        _fastest(lambda alphas, c, v, g: expected_tokens(alphas[:g]) / ((g > 0) * c + v[g])),
    ),
    WrongVersion(
        "multiplies the times of drafting and of verifying: (1 + γ·c)·v[γ]; they add up",
        _fastest(lambda alphas, c, v, g: expected_tokens(alphas[:g]) / ((1 + g * c) * v[g])),
    ),
    WrongVersion(
        "leaves out the token that the target adds to every round",
        _fastest(lambda alphas, c, v, g: (expected_tokens(alphas[:g]) - 1 if g else 1) / (g * c + v[g])),
    ),
    WrongVersion(
        "counts 1 + γ·acceptance tokens, as if a rejected draft did not end the round",
        _fastest(lambda alphas, c, v, g: (1 + sum(alphas[:g])) / (g * c + v[g])),
    ),
    WrongVersion(
        "uses the first position's acceptance for all positions",
        _fastest(lambda alphas, c, v, g: expected_tokens(alphas[:1] * g) / (g * c + v[g])),
    ),
    WrongVersion(
        "drafts even where plain decoding is faster",
        _fastest(lambda alphas, c, v, g: expected_tokens(alphas[:g]) / (g * c + v[g]), first=1),
    ),
    WrongVersion(
        "maximises the tokens of a round and ignores its time",
        _fastest(lambda alphas, c, v, g: expected_tokens(alphas[:g])),
    ),
    WrongVersion(
        "never drafts, or picks the shortest round and ignores its tokens",
        _fastest(lambda alphas, c, v, g: -(g * c + v[g])),
    ),
    WrongVersion(
        "picks the slowest number of drafts",
        _fastest(lambda alphas, c, v, g: -expected_tokens(alphas[:g]) / (g * c + v[g])),
    ),
    WrongVersion("always drafts as many as it has acceptances for", lambda alphas, c, v: len(alphas)),
    WrongVersion(
        "returns the index of the best draft instead of the number of drafts: it is one too small",
        lambda alphas, c, v: max(0, best_gamma(alphas, c, v) - 1),
    ),
    WrongVersion(
        "returns the largest of equals; more drafts for the same speed are not worth it",
        lambda alphas, c, v: max(
            reversed(range(len(alphas) + 1)), key=lambda g: expected_tokens(alphas[:g]) / (g * c + v[g])
        ),
    ),
    WrongVersion(
        "uses the cost of verifying one draft less",
        lambda alphas, c, v: best_gamma(alphas, c, [1.0, *v[:-1]]),
    ),
    WrongVersion(
        "returns the speed-up instead of the number of drafts",
        lambda alphas, c, v: max(expected_tokens(alphas[:g]) / (g * c + v[g]) for g in range(len(alphas) + 1)),
    ),
)

# ------------------------------------------------------------------------------------------------------ ngram_propose


def _of_kind(
    *,
    earliest: bool = False,
    short_first: bool = False,
    distance: int = 1,
    loops: bool = True,
    skip: int = 0,
) -> Callable[[list[int], int, int, int], list[int]]:
    """`ngram_propose` with one part replaced."""

    def propose(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
        sizes = list(range(min(longest, len(token_ids) - 1), shortest - 1, -1))
        for n in sizes[::-1] if short_first else sizes:
            starts = list(range(len(token_ids) - n - distance, -1, -1))
            for start in starts[::-1] if earliest else starts:
                if token_ids[start : start + n] == token_ids[-n:]:
                    followed = token_ids[start + n + skip :]
                    if not loops:
                        return followed[:count]
                    return [followed[i % len(followed)] for i in range(count)] if followed else []
        return []

    return propose


def _without_overlap(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for start in range(len(token_ids) - 2 * n, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                followed = token_ids[start + n :]
                return [followed[i % len(followed)] for i in range(count)]
    return []


def _returns_the_match(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                followed = token_ids[start:]
                return [followed[i % len(followed)] for i in range(count)]
    return []


def _repeats_the_last(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    found = _of_kind(loops=False)(token_ids, shortest, longest, count)
    return found + found[-1:] * (count - len(found))


def _prefers_enough(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        ends = [end for end in range(len(token_ids) - 1, n - 1, -1) if token_ids[end - n : end] == token_ids[-n:]]
        for end in [end for end in ends if len(token_ids) - end >= count] or ends:
            followed = token_ids[end:]
            return [followed[i % len(followed)] for i in range(count)]
    return []


def _searches_again(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    text = list(token_ids)
    for _ in range(count):
        text += ngram_propose(text, shortest, longest, 1)
    return text[len(token_ids) :]


NGRAM = (
    WrongVersion("takes the earliest occurrence; the latest one decides", _of_kind(earliest=True)),
    WrongVersion(
        "uses a match of the shortest n where a longer one exists; the longest match decides",
        _of_kind(short_first=True),
    ),
    WrongVersion("finds nothing but the last n tokens themselves, which nothing follows", _of_kind(distance=0)),
    WrongVersion(
        "stops at the end of the text; the drafts must repeat from the first one until there are `count`",
        _of_kind(loops=False),
    ),
    WrongVersion("takes an earlier occurrence because more tokens follow it; the latest one decides", _prefers_enough),
    WrongVersion("repeats the last draft at the end of the text; repeat from the first one", _repeats_the_last),
    WrongVersion("searches again after each draft; the first match decides all drafts", _searches_again),
    WrongVersion("misses occurrences that overlap the last n tokens", _without_overlap),
    WrongVersion("misses the occurrence one token before the end", _of_kind(distance=2)),
    WrongVersion("proposes the matched tokens again; propose those that followed them", _returns_the_match),
    WrongVersion("skips the first token that followed", _of_kind(skip=1)),
    WrongVersion(
        "tries only the longest n",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids, longest, longest, count),
    ),
    WrongVersion(
        "does not try the shortest n itself",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids, shortest + 1, longest, count),
    ),
    WrongVersion(
        "does not try the longest n itself",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids, shortest, longest - 1, count),
    ),
    WrongVersion(
        "also matches fewer tokens than the shortest n",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids, 1, longest, count),
    ),
    WrongVersion(
        "also matches more tokens than the longest n",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids, shortest, len(token_ids), count),
    ),
    WrongVersion(
        "proposes one token too few",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids, shortest, longest, count - 1),
    ),
    WrongVersion(
        "proposes one token too many",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids, shortest, longest, count + 1),
    ),
    WrongVersion(
        "proposes all tokens that followed, and ignores count",
        lambda token_ids, shortest, longest, count: _of_kind(loops=False)(token_ids, shortest, longest, len(token_ids)),
    ),
    WrongVersion(
        "searches only in the last tokens of the text, not in all of it",
        lambda token_ids, shortest, longest, count: ngram_propose(token_ids[-2 * longest :], shortest, longest, count),
    ),
    *wrong_versions(
        ngram_propose,
        {
            "misses the occurrence at the very beginning of the text": ("n - 1, -1, -1)", "n - 1, 0, -1)"),
            "repeats only the first token that followed": ("followed[i % len(followed)]", "followed[0]"),
        },
    ),
)

# ---------------------------------------------------------------------------------------------------------- tree_mask


def _from(parents: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(tree_mask(parents).clone())


def _only_the_parent(parents: list[int]) -> Tensor:
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for row, parent in enumerate(parents, start=1):
        mask[row, parent + 1] = True
    return mask


def _to_the_grandparent(parents: list[int]) -> Tensor:
    mask = _only_the_parent(parents)
    mask[:, 0] = True
    for row, parent in enumerate(parents, start=1):
        mask[row] |= mask[parent + 1] & _only_the_parent(parents)[parent + 1]
    return mask


def _no_root(mask: Tensor) -> Tensor:
    mask[1:, 0] = False
    return mask


def _root_sees_all(mask: Tensor) -> Tensor:
    mask[0] = True
    return mask


def _with_siblings(parents: list[int]) -> Tensor:
    same = torch.tensor([[True] + [False] * len(parents)] + [[False, *(p == q for q in parents)] for p in parents])
    return tree_mask(parents) | (same & torch.ones_like(same).tril())


def _same_depth_or_less(parents: list[int]) -> Tensor:
    depth = tree_mask(parents).sum(-1)
    return (depth[None] < depth[:, None]) | torch.eye(len(depth), dtype=torch.bool)


TREE = (
    WrongVersion(
        "lets every token attend to all tokens before it: that is the mask of a chain; other branches must be hidden",
        lambda parents: torch.ones(len(parents) + 1, len(parents) + 1, dtype=torch.bool).tril(),
    ),
    WrongVersion("attends to the parent only, not to the parent's ancestors", _only_the_parent),
    WrongVersion("stops at the grandparent, and attends to the root; all ancestors count", _to_the_grandparent),
    WrongVersion(
        "leaves out the token itself",
        lambda parents: _from(parents, lambda mask: mask & ~torch.eye(len(mask), dtype=torch.bool)),
    ),
    WrongVersion(
        "leaves out the last committed token, the root of all paths", lambda parents: _from(parents, _no_root)
    ),
    WrongVersion(
        "is transposed: tokens attend to their descendants instead of their ancestors",
        lambda parents: tree_mask(parents).T.contiguous(),
    ),
    WrongVersion(
        "attends in both directions, to ancestors and to descendants",
        lambda parents: tree_mask(parents) | tree_mask(parents).T,
    ),
    WrongVersion("also attends to earlier siblings", _with_siblings),
    WrongVersion("attends to every token of a lower depth, on any branch", _same_depth_or_less),
    WrongVersion("lets the root attend to its drafts", lambda parents: _from(parents, _root_sees_all)),
    WrongVersion(
        "has no row and column for the last committed token", lambda parents: tree_mask(parents)[1:, 1:].clone()
    ),
    WrongVersion("is all false", lambda parents: torch.zeros(len(parents) + 1, len(parents) + 1, dtype=torch.bool)),
    WrongVersion(
        "lets every token attend to itself only", lambda parents: torch.eye(len(parents) + 1, dtype=torch.bool)
    ),
    WrongVersion("returns numbers instead of truth values", lambda parents: tree_mask(parents).int()),
    WrongVersion("marks what is hidden instead of what is seen", lambda parents: ~tree_mask(parents)),
    *wrong_versions(
        tree_mask,
        {
            "takes parents[i] as a row of the mask: rows are one larger, because row 0 is the root": (
                "mask[parent + 1]",
                "mask[parent]",
            )
        },
    ),
)

# ------------------------------------------------------------------------------------------------------ choose_drafts


def _every_seconds(
    change: Callable[[list[float]], list[float]],
) -> Callable[[list[list[float]], list[float]], list[int]]:
    return lambda survival, seconds: choose_drafts(survival, change(seconds))


def _stops_early(survival: list[list[float]], seconds: list[float]) -> list[int]:
    slots = sorted(((p, r) for r, chances in enumerate(survival) for p in chances), key=lambda slot: -slot[0])
    tokens, counts = float(len(survival)), [0] * len(survival)
    for m, (p, r) in enumerate(slots, start=1):
        if (tokens + p) / seconds[m] <= tokens / seconds[m - 1]:
            break
        tokens += p
        counts[r] += 1
    return counts


def _same_for_all(survival: list[list[float]], seconds: list[float]) -> list[int]:
    longest = min((len(chances) for chances in survival), default=0)
    number = len(survival)

    def speed(g: int) -> float:
        return (number + sum(sum(chances[:g]) for chances in survival)) / seconds[g * number]

    return [max(range(longest + 1), key=speed)] * number


def _each_alone(survival: list[list[float]], seconds: list[float]) -> list[int]:
    return [choose_drafts([chances], seconds)[0] for chances in survival]


def _in_order_of_requests(survival: list[list[float]], seconds: list[float]) -> list[int]:
    total = sum(choose_drafts(survival, seconds))
    counts = []
    for chances in survival:
        counts.append(min(total, len(chances)))
        total -= counts[-1]
    return counts


def _ties(survival: list[list[float]], seconds: list[float]) -> list[int]:
    return choose_drafts(survival[::-1], seconds)[::-1]


CHOOSE = (
    WrongVersion(
        "stops at the first draft that does not pay; a later one may, where rows come in groups", _stops_early
    ),
    WrongVersion("gives every request the same number of drafts", _same_for_all),
    WrongVersion(
        "decides for each request alone, as if it had the step for itself; all share the forward", _each_alone
    ),
    WrongVersion("gives the drafts to the first requests instead of the most probable drafts", _in_order_of_requests),
    WrongVersion("takes the later request first where drafts are equally probable", _ties),
    WrongVersion(
        "counts the time of a plain step for all numbers: drafts seem to be free",
        _every_seconds(lambda seconds: seconds[:1] * len(seconds)),
    ),
    WrongVersion("uses the seconds of one draft less", _every_seconds(lambda seconds: [seconds[0], *seconds[:-1]])),
    WrongVersion(
        "gives every request all its drafts, or returns the last number tried instead of the best",
        lambda survival, seconds: [len(chances) for chances in survival],
    ),
    WrongVersion("gives no request any drafts", lambda survival, seconds: [0] * len(survival)),
    WrongVersion(
        "returns the number of drafts in all instead of one number per request",
        lambda survival, seconds: sum(choose_drafts(survival, seconds)),
    ),
    *wrong_versions(
        choose_drafts,
        {
            "takes the first drafts of all requests before the second ones, where all are equally probable": (
                "slots = [(p, r) for r, chances in enumerate(survival) for p in chances]",
                "slots = [(c[i], r) for i in range(len(seconds) - 1) for r, c in enumerate(survival) if i < len(c)]",
            ),
            "takes the least probable drafts first": ("-slot[0]", "slot[0]"),
            "leaves out the token that the target adds for each request": ("float(len(survival))", "0.0"),
            "counts one token of the target for the whole step; every request gets one": (
                "float(len(survival))",
                "1.0",
            ),
            "counts every draft as accepted": ("tokens += p", "tokens += 1"),
            "takes the most of equals; the fewest drafts should win": ("> fastest", ">= fastest"),
            "drafts even where a plain step is faster": ("fastest = tokens / seconds[0]", "fastest = 0.0"),
        },
    ),
)

# -------------------------------------------------------------------------------------------------------- distil_loss


def _overlap(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    return torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1)


def _kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    return (
        F.kl_div(q_logits.log_softmax(-1), p_logits.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
    )


DISTIL = (
    WrongVersion("is the KL divergence KL(p‖q), not the acceptance", _kl),
    WrongVersion("is the KL divergence the other way round, KL(q‖p)", lambda p, q: _kl(q, p)),
    WrongVersion(
        "is the rejection rate 1 − Σ min(p, q): the logarithm is missing", lambda p, q: (1 - _overlap(p, q)).mean()
    ),
    WrongVersion(
        "takes the logarithm of the mean acceptance; take the mean of the logarithms",
        lambda p, q: -_overlap(p, q).mean().log(),
    ),
    WrongVersion("has the wrong sign: a loss falls when acceptance rises", lambda p, q: _overlap(p, q).log().mean()),
    WrongVersion("sums over the rows; it should be their mean", lambda p, q: -_overlap(p, q).log().sum()),
    WrongVersion("returns one loss per row; it should be their mean", lambda p, q: -_overlap(p, q).log()),
    WrongVersion("is the cross-entropy −Σ p log q", lambda p, q: -(p.softmax(-1) * q.log_softmax(-1)).sum(-1).mean()),
    WrongVersion(
        "is −log Σ p·q: the probability that two samples are equal, not the acceptance",
        lambda p, q: -(p.softmax(-1) * q.softmax(-1)).sum(-1).log().mean(),
    ),
    WrongVersion(
        "takes the softmax over the rows instead of the vocabulary",
        lambda p, q: -torch.minimum(p.softmax(0), q.softmax(0)).sum(-1).log().mean(),
    ),
    WrongVersion(
        "takes the minimum of the logits, and softmax too late",
        lambda p, q: -torch.minimum(p, q).softmax(-1).sum(-1).log().mean(),
    ),
    WrongVersion(
        "returns a number without a gradient: .item(), float(), math.log, torch.tensor and .detach() cut it off",
        lambda p, q: torch.tensor(distil_loss(p, q).item()),
    ),
    WrongVersion("is the mean acceptance, not a loss", lambda p, q: _overlap(p, q).mean()),
    *wrong_versions(
        distil_loss,
        {
            "takes the target's softmax over the rows instead of the vocabulary": (
                "target_logits.softmax(-1)",
                "target_logits.softmax(0)",
            ),
            "takes the draft model's softmax over the rows instead of the vocabulary": (
                "draft_logits.softmax(-1)",
                "draft_logits.softmax(0)",
            ),
            "takes the logarithm to base 2 instead of the natural one": (".log()", ".log2()"),
            "takes the larger of p and q instead of the smaller": ("torch.minimum", "torch.maximum"),
            "takes the minimum over the vocabulary instead of the sum": (".sum(-1).log()", ".amin(-1).log()"),
            "takes the logarithm of each probability before the sum": (".sum(-1).log()", ".log().sum(-1)"),
            "averages over the vocabulary instead of summing": (".sum(-1).log()", ".mean(-1).log()"),
        },
    ),
)
