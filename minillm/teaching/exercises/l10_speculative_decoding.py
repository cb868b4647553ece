"""Lesson 10, exact speculation: the chance of a draft, the residual, one round, and the rows that stay in two caches.

The first two references are the engine's own functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l10_slips as slips
from minillm.teaching.exercises._facts import about_tensor
from minillm.teaching.exercises._l10_mistakes import ACCEPT, RESIDUAL, ROLLBACK, VERIFY
from minillm.teaching.exercises._l10_reference import accept_rule, residual, rollback, verify_chain
from minillm.teaching.source import body_of


def _rows(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def _accept_cases() -> list[Case]:
    p, q = [0.25, 0.25, 0.5], [0.5, 0.125, 0.375]
    return [
        Case("the draft model likes x twice as much as the target does", (_rows(p), _rows(q), torch.tensor([0]))),
        Case("the target likes x more than the draft model does", (_rows(p), _rows(q), torch.tensor([1]))),
        Case(
            "three drafts, each with rows of its own",
            (_rows(p, [0.1, 0.8, 0.1], [0.5, 0.3, 0.2]), _rows(q, [0.2, 0.2, 0.6], q), torch.tensor([0, 2, 2])),
        ),
        Case("the target excludes x", (_rows([0.5, 0.0, 0.5]), _rows(q), torch.tensor([1]))),
        Case(
            "the first draft is of probability 0 in its own q",
            (_rows(p, p), _rows([0.0, 0.5, 0.5], q), torch.tensor([0, 0])),
        ),
        Case(
            "temperature 0: one-hot rows",
            (_rows([0, 1.0, 0], [0, 1.0, 0]), _rows([0, 1.0, 0], [1.0, 0, 0]), torch.tensor([1, 0])),
        ),
        Case(
            "a vocabulary of five",
            (
                _rows([0.4, 0.1, 0.1, 0.3, 0.1], [0.05, 0.6, 0.1, 0.2, 0.05]),
                _rows([0.1, 0.4, 0.2, 0.2, 0.1], [0.5, 0.1, 0.1, 0.2, 0.1]),
                torch.tensor([2, 0]),
            ),
        ),
    ]


def _about_chances(attempt: Attempt) -> str | None:
    return about_tensor(attempt.expected, attempt.got, ("draft",))


_ACCEPT = Exercise(
    name="l10.accept_rule",
    reference=accept_rule,
    cases=_accept_cases,
    hints=(
        "Where the draft model draws x more often than the target would, some of these x must be rejected. What share?",
        "Look up p(x) and q(x): gather picks one number of each row. Then divide, and limit the result to 1. Where "
        "q(x) is 0, the draft model cannot have drawn x: give NaN there (torch.where).",
        "p_x = p.gather(-1, x[..., None]).squeeze(-1), and the same for q_x. Then torch.where(…, (…).clamp(max=1.0), "
        "math.nan): the condition and the ratio are missing.",
        body_of(accept_rule),
    ),
    wrong=(*ACCEPT, *slips.ACCEPT),
    fallback_diagnosis=_about_chances,
)


def _residual_cases() -> list[Case]:
    p, q = [0.25, 0.25, 0.5], [0.5, 0.125, 0.375]
    return [
        Case("two tokens that the target likes more", (_rows(p), _rows(q))),
        Case("only one token that the target likes more", (_rows([0.25, 0.25, 0.5]), _rows([0.3, 0.3, 0.4]))),
        Case("p equals q", (_rows(p), _rows(p))),
        Case("p is q times a rounding error", (_rows(q) * (1 - 2**-22), _rows(q))),
        Case("temperature 0: p and q are one-hot", (_rows([0, 0, 1.0]), _rows([0, 1.0, 0]))),
        Case("a draft without sampling: q is one-hot", (_rows(p), _rows([0, 0, 1.0]))),
        Case("two rows with other sums", (_rows(p, [0.7, 0.2, 0.1]), _rows(q, [0.1, 0.3, 0.6]))),
        Case("two rows, of which the first has no residual", (_rows(p, [0.7, 0.2, 0.1]), _rows(p, [0.1, 0.3, 0.6]))),
        Case("a token that the target excludes, where p equals q", (_rows([0.5, 0.0, 0.5]), _rows([0.5, 0.0, 0.5]))),
    ]


def _about_residual(attempt: Attempt) -> str | None:
    return about_tensor(attempt.expected, attempt.got, ("row", "token"))


_RESIDUAL = Exercise(
    name="l10.residual",
    reference=residual,
    cases=_residual_cases,
    hints=(
        "Acceptance gives token y with probability min(p(y), q(y)). What is missing for p(y)?",
        "Subtract q from p and set negative numbers to 0 (clamp). Divide each row by its sum. Where the sum is 0, "
        "there is nothing to divide: return the row of p.",
        "left = (p - q).clamp(…); total = left.sum(…, keepdim=True); torch.where(…, left / total, p). Three parts are "
        "missing.",
        body_of(residual),
    ),
    wrong=(*RESIDUAL, *slips.RESIDUAL),
    fallback_diagnosis=_about_residual,
)


def _verify_cases() -> list[Case]:
    below_one = 1 - 2**-24  # the largest uniform that the engine draws
    one = _rows([0.25, 0.25, 0.5], [0.5, 0.25, 0.25]), _rows([0.5, 0.125, 0.375])
    p = _rows([0.25, 0.25, 0.5, 0.0], [0.5, 0.25, 0.25, 0.0], [0.125, 0.125, 0.25, 0.5], [0.1, 0.2, 0.3, 0.4])
    q = _rows([0.5, 0.125, 0.375, 0.0], [0.25, 0.5, 0.0, 0.25], [0.5, 0.25, 0.125, 0.125])
    two = p[[0, 2, 1]], q[[0, 2]]
    return [
        Case("one draft, accepted: a bonus token follows", ([0], *one, [0.4, 0.1])),
        Case("one draft, rejected: the recovered token instead", ([0], *one, [0.6, 0.1])),
        Case("a high uniform draws another recovered token", ([0], *one, [0.6, 0.9])),
        Case("all three are accepted", ([0, 1, 0], p, q, [0.45, 0.3, 0.2, 0.95])),
        Case("all three are accepted, another bonus token", ([0, 1, 0], p, q, [0.1, 0.4, 0.1, 0.2])),
        Case("the second of three is rejected", ([0, 1, 0], p, q, [0.45, 0.55, 0.1, 0.1])),
        Case("the second of three is rejected, with a high last uniform", ([0, 1, 0], p, q, [0.3, 0.9, 0.1, 0.9])),
        Case("the first of three is rejected, the others would be accepted", ([0, 1, 0], p, q, [0.55, 0.1, 0.1, 0.7])),
        Case("the third is rejected", ([0, 1, 0], p, q, [0.1, 0.2, 0.9, 0.5])),
        Case("the third is rejected, with a low last uniform", ([0, 1, 0], p, q, [0.1, 0.2, 0.6, 0.05])),
        Case("a draft that the target excludes, and u = 0", ([3], p[[1, 2]], q[1:2], [0.0, 0.3])),
        Case("two drafts, the first uniform high", ([1, 0], *two, [0.95, 0.1, 0.6])),
        Case("two drafts, both accepted with high uniforms", ([1, 2], *two, [0.9, 0.99, 0.05])),
        Case(
            "a draft rejected by rounding alone: p is q times 1 - 2^-22, and u is 1 - 2^-24",
            ([0], one[0] * torch.tensor([[1 - 2**-22], [1.0]]), one[0][:1], [below_one, 0.9]),
        ),
        Case(
            "temperature 0: the second draft is not the argmax",
            ([1, 2], torch.eye(4)[[1, 3, 0]], torch.eye(4)[[1, 2]], [0.9, 0.0, 0.5]),
        ),
        Case(
            "temperature 0: all drafts are the argmax",
            ([1, 3], torch.eye(4)[[1, 3, 0]], torch.eye(4)[[1, 3]], [0.9, 0.7, 0.5]),
        ),
    ]


_VERIFY = Exercise(
    name="l10.verify_chain",
    reference=verify_chain,
    cases=_verify_cases,
    hints=(
        "Judge the drafts in order. At which one do you stop, and which row of p belongs to the position after it?",
        "chances = my_accept(p[:-1], q, torch.tensor(drafts)) judges all drafts at once. Count the drafts before the "
        "first one with uniforms[i] >= chances[i]: n. Row n of p is at the position of the next token: draw from its "
        "residual if draft n was rejected, from the row itself if there is no draft n.",
        "n = 0; while n < len(drafts) and …: n += 1. Then last = … if n < len(drafts) else p[n : n + 1], and return "
        "[*drafts[:n], int(sample(last, uniforms[-1:]))]. The condition and the residual are missing.",
        "The whole of it (if you have skipped accept_rule or residual, call my_accept or my_residual instead):"
        + body_of(verify_chain),
    ),
    wrong=(*VERIFY, *slips.VERIFY),
)

_ROLLBACK = Exercise(
    name="l10.rollback",
    reference=rollback,
    cases=[
        Case("two of four accepted", ([11, 12, 21, 22, 23, 24], [11, 12, 21, 22, 23], 4, 2)),
        Case("none of three accepted", ([11, 12, 21, 22, 23], [11, 12, 21, 22], 3, 0)),
        Case("all of three accepted", ([11, 12, 21, 22, 23], [11, 12, 21, 22], 3, 3)),
        Case("three of four accepted", ([11, 21, 22, 23, 24], [11, 21, 22, 23], 4, 3)),
        Case("one draft, rejected", ([11, 12, 13, 21], [11, 12, 13], 1, 0)),
        Case("a rejected draft repeats a token of the text", ([11, 12, 11, 21], [11, 12, 11], 2, 0)),
        Case("one draft, accepted", ([11, 12, 13, 21], [11, 12, 13], 1, 1)),
        Case(
            "one of five accepted, a longer text",
            ([*range(11, 19), *range(21, 26)], [*range(11, 19), *range(21, 25)], 5, 1),
        ),
    ],
    hints=(
        "A row is valid if its token has been committed. Which rows of the two caches are not?",
        "The target's cache has one row too many for each rejected draft. Compute how many rows stay, and keep as many "
        "in both caches. The draft model's cache may have fewer; a slice beyond its end is no error.",
        "num_valid = len(target) - (…); return target[:num_valid], draft[…]. Two parts are missing. Do not write "
        "rows[:-rejected]: with rejected = 0 that is rows[:0].",
        body_of(rollback),
    ),
    wrong=ROLLBACK,
    parts=("target rows", "draft rows"),
)

EXERCISES = [_ACCEPT, _RESIDUAL, _VERIFY, _ROLLBACK]
