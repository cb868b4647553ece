"""Lesson 10: speculative decoding of one text in the world of three words, with two models and two caches.

Every step is a method, so that a mistake is a subclass that replaces one of them (`l10_broken`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.errors import LessonError
from minillm.teaching.workshop.l10_words import DRAFT, TARGET, Judge, WordModel

Rollback = Callable[[list[int], list[int], int, int], tuple[list[int], list[int]]]
MAX_ROUNDS = 1000


@dataclass
class Generated:
    """The new tokens of one text, and how many tokens each round committed."""

    tokens: list[int]
    rounds: list[int] = field(default_factory=list)


def pick(row: Sequence[float], u: float) -> int:
    """The token that the uniform `u` draws from `row`."""
    for token, probability in enumerate(row):
        u -= probability
        if u < 0:
            return token
    return max(i for i, probability in enumerate(row) if probability > 0)


class Loop:
    """As it should be."""

    def __init__(
        self,
        verify: Judge,
        rollback: Rollback,
        gamma: int = 2,
        greedy: bool = False,
        draft: WordModel = DRAFT,
        target: WordModel = TARGET,
    ) -> None:
        self.verify, self.rollback, self.gamma, self.greedy = verify, rollback, gamma, greedy
        self.draft, self.target = draft, target
        self.draft_cache: list[int] = []
        self.target_cache: list[int] = []

    def generate(self, prompt: list[int], max_tokens: int, seed: int = 0, end: int | None = None) -> Generated:
        """Continue `prompt` until `max_tokens` tokens, or the token `end`, are generated."""
        self.uniform = random.Random(seed).random
        self.draft_cache, self.target_cache = [], prompt[:-1]
        text, found = list(prompt), Generated([])
        while len(found.tokens) < max_tokens and end not in found.tokens:
            drafts, q = self.propose(text)
            p = self.judged(self.target.forward(self.target_cache, [text[-1], *drafts]))
            new = self.judge(drafts, p, q, [self.uniform() for _ in range(len(drafts) + 1)])
            self.roll_back(len(drafts), len(new) - 1)
            found.rounds.append(len(new))
            found.tokens += self.cut(new, max_tokens - len(found.tokens), end)
            text = [*prompt, *found.tokens]
            if len(found.rounds) > MAX_ROUNDS:
                raise LessonError(f"{MAX_ROUNDS} rounds gave {len(found.tokens)} of {max_tokens} tokens")
        return found

    def propose(self, text: list[int]) -> tuple[list[int], Tensor]:
        """γ drafts, and the distribution that each was drawn from."""
        drafts: list[int] = []
        rows = self.draft.forward(self.draft_cache, self.unread(text))
        q: list[Tensor] = []
        for _ in range(self.gamma):
            if drafts:
                rows = self.draft.forward(self.draft_cache, drafts[-1:])
            token, reported = self.draw_draft(rows[-1:])
            drafts.append(token)
            q.append(reported)
        return drafts, self.judged(torch.cat(q))

    def unread(self, text: list[int]) -> list[int]:
        """The committed tokens that are not in the draft model's cache: one, or two after full acceptance."""
        return text[len(self.draft_cache) :]

    def draw_draft(self, row: Tensor) -> tuple[int, Tensor]:
        """A draft, and the row that is reported as its distribution."""
        return pick(self.at_temperature(row)[0].tolist(), self.uniform()), row

    def judged(self, rows: Tensor) -> Tensor:
        """The rows by which drafts are judged: at the temperature of the request, like those that are drawn from."""
        return self.at_temperature(rows)

    def at_temperature(self, rows: Tensor) -> Tensor:
        """At temperature 0 each row becomes one-hot."""
        return torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1]).double() if self.greedy else rows

    def judge(self, drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
        """The tokens that the round commits."""
        return self.verify(drafts, p, q, uniforms)

    def roll_back(self, num_drafts: int, num_accepted: int) -> None:
        """Drop the rows of rejected drafts from both caches."""
        self.target_cache, self.draft_cache = self.rollback(
            self.target_cache, self.draft_cache, num_drafts, num_accepted
        )

    def cut(self, new: list[int], room: int, end: int | None) -> list[int]:
        """The tokens up to the end of the text: at most `room`, and none after `end`."""
        stop = new.index(end) + 1 if end in new else len(new)
        return new[: min(stop, room)]
