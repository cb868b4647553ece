"""Lesson 11, the speed of speculative decoding: tokens per round, γ, n-grams, trees, adaptive drafts, distillation."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from minillm.teaching.compare import values_match
from minillm.teaching.drives.l11 import loss_and_gradient
from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l11_mistakes as mistakes
from minillm.teaching.exercises._l11_reference import (
    best_gamma,
    choose_drafts,
    distil_loss,
    expected_tokens,
    ngram_propose,
    tree_mask,
)
from minillm.teaching.source import body_of


def _about_tokens(attempt: Attempt) -> str | None:
    most = 1 + len(attempt.case.args[0])
    if not isinstance(attempt.got, int | float):
        return None
    if attempt.got < 1:
        return "a round gives fewer than one token; the target always adds one"
    if attempt.got > most:
        return f"a round of {most - 1} drafts gives more than {most} tokens"
    return f"{attempt.got:g} tokens are too {'few' if attempt.got < attempt.expected else 'many'}"


_TOKENS = Exercise(
    name="l11.expected_tokens",
    reference=expected_tokens,
    cases=[
        Case("one draft, accepted half of the time", ([0.5],)),
        Case("two drafts: the second is judged only if the first was accepted", ([0.5, 0.5],)),
        Case("no drafts: the target's own token", ([],)),
        Case("later drafts are accepted more often than earlier ones", ([0.25, 0.5, 1.0],)),
        Case("the same three in the other order", ([1.0, 0.5, 0.25],)),
        Case("a draft that is never accepted ends every round", ([0.5, 0.0, 1.0, 1.0],)),
        Case("every draft is accepted", ([1.0, 1.0, 1.0],)),
        Case("four drafts as in a table of measurements", ([0.72, 0.81, 0.76, 0.85],)),
    ],
    hints=(
        "The third draft of a round counts only if three things happened. Which?",
        "A draft is kept if it and all drafts before it are accepted: with probability α₁·α₂·…·αᵢ. Add these products "
        "for all positions, and 1 for the target's own token.",
        "tokens = survival = 1.0\nfor alpha in alphas:\n    survival *= …\n    tokens += …\nreturn tokens",
        body_of(expected_tokens),
    ),
    wrong=mistakes.TOKENS,
    fallback_diagnosis=_about_tokens,
)


def _about_gamma(attempt: Attempt) -> str | None:
    alphas, c, v = attempt.case.args
    if not isinstance(attempt.got, int | np.integer):
        return f"return one number of drafts, an int, and not a value of type {type(attempt.got).__name__}"
    if not 0 <= attempt.got <= len(alphas):
        return f"the number of drafts must be from 0 to {len(alphas)}"
    mine, best = (expected_tokens(alphas[:g]) / (g * c + v[g]) for g in (attempt.got, attempt.expected))
    if math.isclose(mine, best):
        return "of equally fast numbers of drafts, the smallest is wanted"
    return f"γ = {attempt.got} gives a speed-up of {mine:.3g}, γ = {attempt.expected} gives {best:.3g}"


_EVEN = [0.75] * 6
_FREE = [1.0] * 7
_GAMMA = Exercise(
    name="l11.best_gamma",
    reference=best_gamma,
    cases=[
        Case("one draft, which pays", ([0.75], 0.1, [1.0, 1.1])),
        Case("drafts cost a tenth of a step, verifying is free", (_EVEN, 0.1, _FREE)),
        Case("the same, but every row makes the forward longer", (_EVEN, 0.1, [1 + 0.2 * g for g in range(7)])),
        Case("drafts are free, but each row costs almost a step", (_EVEN, 0.0, [1 + 0.9 * g for g in range(7)])),
        Case("a draft costs as much as a step of the target", (_EVEN, 1.0, _FREE)),
        Case("a draft costs three quarters of a step, and is accepted half of the time", ([0.5], 0.75, [1.0, 1.0])),
        Case("no drafts are possible", ([], 0.1, [1.0])),
        Case("the second draft is rarely accepted, the third nearly always", ([0.9, 0.2, 1.0, 1.0], 0.125, _FREE[:5])),
        Case("the first draft is rarely accepted, later ones always", ([0.4, 1.0, 1.0, 1.0], 0.125, _FREE[:5])),
        Case("free drafts, never accepted: all numbers are equally fast", ([0.0] * 4, 0.0, _FREE[:5])),
        Case("verifying four takes as long as verifying one", ([0.5] * 4, 0.0, [1.0, 1.5, 1.5, 1.5, 1.5])),
        Case("the same, and a draft costs a tenth of a step", ([0.6] * 4, 0.1, [1.0, 1.5, 1.5, 1.5, 1.5])),
        Case("a jump: verifying four rows needs a second pass", ([0.9] * 5, 0.02, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0])),
        Case("verifying two is cheaper than verifying one", ([0.25, 0.25], 0.0, [1.0, 1.5, 1.25])),
        Case("cheap drafts, nearly always accepted", ([0.97] * 6, 0.03, [1 + 0.03 * g for g in range(7)])),
        Case("cheap drafts, always accepted, but rows get dearer and dearer", ([1.0] * 3, 0.0, [1.0, 1.5, 2.5, 4.0])),
    ],
    hints=(
        "For one number of drafts g: how many tokens does a round give, and how many plain steps does it take?",
        "Tokens: τ of the first g acceptances. Time: g·c + v[g]. No drafts: 1 token in 1 step. The best g has the "
        "largest quotient; take the smallest g of equals.",
        "speeds = [1.0]\ntokens = survival = 1.0\nfor gamma, alpha in enumerate(alphas, start=1):\n    survival *= …\n"
        "    tokens += …\n    speeds.append(… / …)\nreturn speeds.index(max(speeds))",
        body_of(best_gamma),
    ),
    wrong=mistakes.GAMMA,
    fallback_diagnosis=_about_gamma,
)


def _about_drafts(attempt: Attempt) -> str | None:
    _, shortest, longest, count = attempt.case.args
    if not isinstance(attempt.got, list):
        return None
    if len(attempt.got) not in (0, count):
        return f"{len(attempt.got)} drafts: return {count}, or none if nothing matches"
    if attempt.expected and not attempt.got:
        return f"a match of {shortest} to {longest} tokens exists, but it was not found"
    if attempt.got and not attempt.expected:
        return f"no match of {shortest} to {longest} tokens exists, but drafts were returned"
    wrong = next(i for i, (a, b) in enumerate(zip(attempt.expected, attempt.got, strict=True)) if a != b)
    return f"draft {wrong + 1} is {attempt.got[wrong]}, not {attempt.expected[wrong]}"


_NGRAM = Exercise(
    name="l11.ngram_propose",
    reference=ngram_propose,
    cases=[
        Case("the last two tokens occurred before", ([1, 2, 3, 4, 5, 1, 2], 2, 3, 2)),
        Case("nothing occurred before", ([1, 2, 3, 4], 1, 3, 2)),
        Case("they occurred twice, followed by different tokens", ([7, 1, 9, 7, 2, 9, 5, 7], 1, 2, 1)),
        Case("a long match and a later short one", ([1, 2, 3, 8, 9, 4, 3, 6, 5, 1, 2, 3], 1, 3, 3)),
        Case("the text ends before there are enough drafts", ([5, 6, 7, 5, 6], 2, 2, 7)),
        Case("more tokens follow an earlier occurrence", ([1, 2, 7, 8, 9, 5, 1, 2, 4, 1, 2], 2, 3, 4)),
        Case("one token again and again: the match overlaps the end", ([4, 9, 9, 9], 2, 3, 4)),
        Case("a match of three overlaps the last three tokens", ([5, 1, 2, 1, 2, 1], 3, 3, 2)),
        Case("the match begins with the first token", ([1, 2, 8, 1, 2], 2, 2, 1)),
        Case("a match shorter than the shortest n", ([3, 1, 2, 8, 5, 2], 2, 3, 2)),
        Case("a match of exactly the shortest n", ([6, 1, 2, 8, 5, 1, 2], 2, 4, 2)),
        Case("the match is longer than the longest n", ([1, 2, 3, 4, 5, 9, 2, 3, 8, 1, 2, 3], 1, 2, 2)),
        Case("the tokens with the first draft occurred again later", ([1, 2, 3, 9, 2, 3, 8, 1, 2], 2, 2, 2)),
        Case("a longer match is earlier than a short one", ([1, 2, 7, 3, 2, 8, 1, 2], 1, 2, 1)),
        Case("the longest n is longer than the text", ([2, 5, 2], 1, 9, 3)),
        Case("the shortest n is longer than the text", ([2, 2], 3, 5, 3)),
        Case("a single token", ([2], 1, 3, 3)),
        Case("the match is far back", ([1, 2, 3, *range(10, 30), 1, 2], 2, 3, 4)),
    ],
    hints=(
        "Which n do you try first, and where in the text do you begin to search?",
        "For n from `longest` down to `shortest`: compare the last n tokens with the n tokens from `start` on, for "
        "`start` from right to left. The last n tokens themselves are no match. Return what follows the first match.",
        "for n in range(longest, shortest - 1, -1):\n"
        "    for start in range(len(token_ids) - n - 1, -1, -1):\n"
        "        if token_ids[start : start + n] == …:\n"
        "            followed = …\n"
        "            return [followed[…] for i in range(count)]   # repeats from the first\n"
        "return []",
        body_of(ngram_propose),
    ),
    wrong=mistakes.NGRAM,
    fallback_diagnosis=_about_drafts,
)


def _about_mask(attempt: Attempt) -> str | None:
    wanted, got = attempt.expected, attempt.got
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != torch.bool:
        return None
    row = int((got != wanted).any(-1).nonzero()[0])
    name = "the root" if row == 0 else f"draft {row - 1}"
    more, less = (got & ~wanted)[row].nonzero()[:, 0].tolist(), (wanted & ~got)[row].nonzero()[:, 0].tolist()
    facts = [f"attends to column {', '.join(map(str, more))}, which is on no path to it"] if more else []
    facts += [f"does not attend to column {', '.join(map(str, less))}"] if less else []
    return f"row {row} ({name}) {' and '.join(facts)}"


_TREE = Exercise(
    name="l11.tree_mask",
    reference=tree_mask,
    cases=[
        Case("two drafts for the same position", ([-1, -1],)),
        Case("a chain of three", ([-1, 0, 1],)),
        Case("a chain of five", ([-1, 0, 1, 2, 3],)),
        Case("a chain, and a second child of the root", ([-1, 0, -1],)),
        Case("two levels: (2, 1) as the engine numbers it", ([-1, -1, 0, 1],)),
        Case("five drafts: two, then two below the first and one below the second", ([-1, -1, 0, 0, 1],)),
        Case("three levels", ([-1, -1, 0, 0, 1, 2, 4],)),
        Case("no drafts", ([],)),
    ],
    hints=(
        "Which tokens does draft i share with its parent? What does it see besides?",
        "A draft attends to all that its parent attends to, and to itself. Parents come first, so the parent's row is "
        "already complete. Row 0 is the root, so draft i has row i + 1, and parent -1 has row 0.",
        "mask = torch.eye(…, dtype=torch.bool)   # every token sees itself\n"
        "for row, parent in enumerate(parents, start=1):\n"
        "    mask[row] |= mask[…]\n"
        "return mask",
        body_of(tree_mask),
    ),
    wrong=mistakes.TREE,
    fallback_diagnosis=_about_mask,
    draw=lambda expected, got: (expected, got) if isinstance(got, Tensor) and got.shape == expected.shape else None,
)


def _about_choice(attempt: Attempt) -> str | None:
    survival, seconds = attempt.case.args
    got = attempt.got
    if not isinstance(got, list) or len(got) != len(survival):
        return "return one number for each request"
    whole = all(isinstance(n, int | np.integer) for n in got)
    if not whole or not all(0 <= n <= len(chances) for n, chances in zip(got, survival, strict=True)):
        return "a request gets from 0 to all of its drafts"
    got = list(map(int, got))

    def rate(counts: list[int]) -> float:
        tokens = sum(1 + sum(chances[:n]) for n, chances in zip(counts, survival, strict=True))
        return tokens / seconds[sum(counts)]

    if math.isclose(rate(got), rate(attempt.expected)):
        if sum(got) > sum(attempt.expected):
            return "of equally fast numbers of drafts, the fewest is wanted"
        return "of equally probable drafts, those of an earlier request come first"
    return f"{got} gives {rate(got):.3g} tokens per second, {attempt.expected} gives {rate(attempt.expected):.3g}"


_CHOOSE = Exercise(
    name="l11.choose_drafts",
    reference=choose_drafts,
    cases=[
        Case("one request, each draft costs a quarter of a step", ([[0.5, 0.25]], [1.0, 1.25, 1.5])),
        Case("drafts cost nothing", ([[0.5, 0.25]], [1.0, 1.0, 1.0])),
        Case("drafts cost as much as a step", ([[0.5, 0.25]], [1.0, 2.0, 3.0])),
        Case(
            "one request repeats itself, the other does not",
            ([[0.9375, 0.875, 0.8125], [0.25, 0.0625, 0.015625]], [1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75]),
        ),
        Case(
            "the second request is the better one",
            ([[0.25, 0.0625], [0.875, 0.75]], [1.0, 1.125, 1.25, 1.375, 1.5]),
        ),
        Case("equal chances, one slot pays: the earlier request", ([[0.75], [0.75]], [1.0, 1.125, 4.0])),
        Case(
            "a later draft of the earlier request is equally probable", ([[0.75, 0.75], [0.75]], [1.0, 1.0, 1.1, 4.0])
        ),
        Case(
            "a step of three drafts takes as long as one of one draft",
            ([[0.5, 0.375, 0.25]], [1.0, 1.75, 1.75, 1.75]),
        ),
        Case("the first draft does not pay, three together do", ([[0.875, 0.75, 0.625]], [1.0, 2.0, 2.0, 2.0])),
        Case("never accepted and free: all numbers are equal", ([[0.0, 0.0]], [1.0, 1.0, 1.0])),
        Case("as fast as a plain step, but not faster", ([[0.5, 0.5]], [1.0, 1.5, 2.0])),
        Case("eight requests: a row costs nearly a step", ([[0.5]] * 8, [1.0 + 0.25 * m for m in range(9)])),
        Case("requests may have different numbers of drafts", ([[0.75], [], [0.875, 0.5]], [1.0, 1.0, 1.125, 1.25])),
        Case(
            "only the step is dear: two requests, drafts nearly free",
            ([[0.5, 0.25], [0.5, 0.125]], [8.0, 8.25, 8.5, 8.75, 9.0]),
        ),
        Case("a plain step takes half a second", ([[0.125, 0.0625]], [0.5, 0.5625, 0.625])),
    ],
    hints=(
        "Every draft of every request asks for a place in the same forward. Which one deserves the first place?",
        "List (probability, request) of all drafts, the largest probability first. A request's drafts stay in order, "
        "because its probabilities fall. The step gives one token per request and the sum of the chosen probabilities. "
        "Divide by seconds[m], and keep the m with the largest quotient.",
        "slots = sorted(((p, r) for r, chances in enumerate(survival) for p in chances), key=lambda slot: …)\n"
        "tokens, counts, chosen = float(…), [0] * len(survival), [0] * len(survival)\n"
        "fastest = … / seconds[0]\n"
        "for m, (p, r) in enumerate(slots, start=1):\n"
        "    tokens += …; counts[r] += 1\n"
        "    if tokens / seconds[m] > fastest: remember the quotient and a copy of counts\n"
        "return chosen",
        body_of(choose_drafts),
    ),
    wrong=mistakes.CHOOSE,
    fallback_diagnosis=_about_choice,
)


def _about_loss(attempt: Attempt) -> str | None:
    loss, expected = attempt.got["loss"], attempt.expected  # type: ignore[index]
    if not isinstance(loss, Tensor) or loss.dim():
        return "return one number, a tensor: the mean over the rows"
    if loss < 0:
        return "the loss is negative; the logarithm of a probability is at most 0, and the loss is minus that"
    p, q = attempt.case.args
    if torch.equal(p, q) and loss.abs() > 1e-5:
        return "p = q, so every draft is accepted and the loss must be 0"
    if values_match(expected["loss"], loss) is None:
        return "the loss is right, and its gradient is not: compute all of it from the logits, with functions of torch"
    return None


def _logits(seed: int, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=draw) * 2, torch.randn(rows, vocab, generator=draw) * 2


def _loss_cases() -> list[Case]:
    same = torch.tensor([[2.0, 0.0, 1.0]])
    return [
        Case("p = q: everything is accepted", (same, same.clone())),
        Case("two tokens: p = (½, ½), q = (¾, ¼)", (torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log())),
        Case("one row of five tokens", _logits(0, 1, 5)),
        Case("three rows of four tokens", _logits(1, 3, 4)),
        Case("two rows of seven tokens", _logits(2, 2, 7)),
    ]


_DISTIL = Exercise(
    name="l11.distil_loss",
    reference=distil_loss,
    cases=_loss_cases,
    hints=(
        "Which sum over the vocabulary is the probability that a draft is accepted?",
        "p and q are softmax of the logits, over the vocabulary (the last dimension). The acceptance is Σ min(p, q) in "
        "each row. The loss is minus the logarithm of it, averaged over the rows.",
        "p, q = target_logits.softmax(…), draft_logits.softmax(…)\nreturn -torch.minimum(…, …).sum(…).log().mean()",
        body_of(distil_loss),
    ),
    wrong=mistakes.DISTIL,
    fallback_diagnosis=_about_loss,
    run_case=loss_and_gradient,
)

EXERCISES = [_TOKENS, _GAMMA, _NGRAM, _TREE, _CHOOSE, _DISTIL]
