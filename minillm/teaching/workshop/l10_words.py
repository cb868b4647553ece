"""Lesson 10: a world of three words in which everything can be counted, and a round enumerated without chance.

A model of this world gives a row of three probabilities, all multiples of 1/12. The row depends on *every* row of its
cache and on their order, so a cache with a missing, a stale or a doubled row gives another distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

WORDS = ("for", "if", "return")
TWELFTHS = 12
Judge = Callable[[list[int], Tensor, Tensor, list[float]], list[int]]
"""`(drafts, p [γ + 1, 3], q [γ, 3], γ + 1 uniforms)` → the tokens that a round commits."""


def turned(row: Sequence[int], by: int) -> tuple[int, ...]:
    """The same numbers, each `by` places further on."""
    return tuple(row[(i - by) % len(row)] for i in range(len(row)))


def state_of(cache: Sequence[int]) -> int:
    """0, 1 or 2. Another word in any one row gives another state; the words count once or twice, by position."""
    return (len(cache) + sum((1 + i * 5 // 3 % 2) * token for i, token in enumerate(cache))) % 3


@dataclass(frozen=True)
class WordModel:
    """A model of the three words: one row of probabilities, in twelfths, for each of the three states of its cache."""

    twelfths: tuple[tuple[int, ...], ...]

    def row(self, cache: Sequence[int]) -> tuple[int, ...]:
        """The distribution of the word after `cache`, in twelfths."""
        return self.twelfths[state_of(cache)]

    def forward(self, cache: list[int], tokens: Sequence[int]) -> Tensor:
        """Append `tokens` to the cache, one by one. Returns the distribution after each, `[len(tokens), 3]`."""
        states = []
        for token in tokens:
            cache.append(token)
            states.append(state_of(cache))
        return self._rows[states]

    @cached_property
    def _rows(self) -> Tensor:
        return torch.tensor(self.twelfths, dtype=torch.float64) / TWELFTHS


TARGET = WordModel(tuple(turned((3, 3, 6), s) for s in range(3)))
DRAFT = WordModel(((6, 2, 4), turned((6, 2, 4), 1), turned((4, 2, 6), 2)))


def role(cache: Sequence[int], token: int) -> int:
    """Which place of the target's row (3, 3, 6) the token takes after this text: 0, 1, or 2 for the likely one."""
    return (token - state_of(cache)) % len(WORDS)


# ------------------------------------------------------------------------------------------------------- enumeration

FOUR_MIDDLES = tuple((2 * i + 1) / 8 for i in range(4))
TWELVE_MIDDLES = tuple((2 * i + 1) / 24 for i in range(12))
"""One uniform in each interval between two thresholds stands for all in it. A draft's chance is a multiple of 1/4, and
the thresholds of the last token are multiples of 1/12. A judge that also *draws* with the uniform of a draft, as
`l10_broken.OneUniform` does, compares it with multiples of 1/3 too, and needs twelve."""

Joint = dict[tuple[int, ...], Fraction]


def enumerate_round(
    judge: Judge, prompt: list[int], gamma: int = 2, accept_middles: Sequence[float] = FOUR_MIDDLES
) -> Joint:
    """The distribution of the first γ + 1 tokens after `prompt`: one round by `judge`, over all drafts and uniforms,
    and the rest of the γ + 1 tokens by the target itself.

    It is exact if `judge` compares the uniform of a draft only with thresholds that separate `accept_middles`: by
    default with chances of acceptance, which are multiples of 1/4."""
    found: Joint = defaultdict(Fraction)
    uniforms = list(product(*[accept_middles] * gamma, TWELVE_MIDDLES))
    for drafts in product(range(len(WORDS)), repeat=gamma):
        chance = math.prod(_probability(DRAFT, [*prompt, *drafts[:i]], x) for i, x in enumerate(drafts))
        p = TARGET.forward(prompt[:-1], [prompt[-1], *drafts])
        q = DRAFT.forward(prompt[:-1], [prompt[-1], *drafts[:-1]])
        for u in uniforms:
            found[tuple(judge(list(drafts), p, q, list(u)))] += chance / len(uniforms)
    return _completed(found, prompt, gamma + 1)


def target_joint(prompt: list[int], length: int) -> Joint:
    """The target's own distribution of the next `length` tokens."""
    return _completed({(): Fraction(1)}, prompt, length)


def _completed(found: Joint, prompt: list[int], length: int) -> Joint:
    whole: Joint = defaultdict(Fraction)
    for tokens, weight in found.items():
        for rest in product(range(len(WORDS)), repeat=length - len(tokens)):
            text = (*tokens, *rest)
            after = range(len(tokens), length)
            whole[text] += weight * math.prod(_probability(TARGET, [*prompt, *text[:i]], text[i]) for i in after)
    return dict(whole)


def _probability(model: WordModel, cache: list[int], token: int) -> Fraction:
    return Fraction(model.row(cache)[token], TWELFTHS)
