"""Lesson 10: loops of speculative decoding with one mistake each. The docstring of each is the mistake."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.sampling import sample
from minillm.speculative.rejection_sampler import acceptance_probability, residual
from minillm.teaching.workshop.l10_loop import Loop


def chain(
    accept: Callable[[Tensor, Tensor, Tensor], Tensor],
    recover: Callable[[Tensor, Tensor, int], Tensor],
    same_uniform: bool = False,
) -> Callable[[list[int], Tensor, Tensor, list[float]], list[int]]:
    """A round that judges by `accept`; `recover(p, q, x)` is what replaces the rejected draft x.

    `same_uniform`: the uniform that rejected a draft also draws the recovered token.
    """

    def judge(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
        chances = accept(p[:-1], q, torch.tensor(drafts)).tolist()
        for n, (x, chance) in enumerate(zip(drafts, chances, strict=True)):
            if not uniforms[n] < chance:
                row = recover(p[n : n + 1], q[n : n + 1], x)
                return [*drafts[:n], int(sample(row, [uniforms[n] if same_uniform else uniforms[-1]]))]
        return [*drafts, int(sample(p[-1:], uniforms[-1:]))]

    return judge


def of_target(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """p(x)."""
    return p.gather(-1, x[:, None]).squeeze(-1)


def without(p: Tensor, q: Tensor, x: int) -> Tensor:
    """p without the rejected draft (`sample` need not have it renormalised)."""
    left = p.clone()
    left[0, x] = 0.0
    return left


class FullTarget(Loop):
    """After a rejection, draws from all of p instead of from the residual."""

    judge = staticmethod(chain(acceptance_probability, lambda p, q, x: p))


class FilteredTwice(Loop):
    """Applies a filter (here top-k with k = 1) once more, to the residual."""

    judge = staticmethod(chain(acceptance_probability, lambda p, q, x: top(residual(p, q), 1)))


class OneUniform(Loop):
    """Draws the recovered token with the uniform that rejected the draft."""

    judge = staticmethod(chain(acceptance_probability, lambda p, q, x: residual(p, q), same_uniform=True))


class MixedRule(Loop):
    """Accepts with p(x), and recovers from the residual that belongs to p(x) / q(x)."""

    judge = staticmethod(chain(of_target, lambda p, q, x: residual(p, q)))


class TargetAlone(Loop):
    """Accepts with min(1, p(x)), and recovers from p without x. It never looks at q."""

    judge = staticmethod(chain(of_target, without))


class ZeroByZero(Loop):
    """Divides the residual by its sum, also where that is 0."""

    judge = staticmethod(
        chain(acceptance_probability, lambda p, q, x: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum())
    )


class FirstUnseen(Loop):
    """Verifies the drafts without the last committed token in front, so that no row judges the first draft."""

    def judge(self, drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
        """See `Loop.judge`."""
        return [drafts[0], *self.verify(drafts[1:], p[1:], q[1:], uniforms[1:])]


class NoBonus(Loop):
    """Adds no token when all drafts are accepted."""

    def judge(self, drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
        """See `Loop.judge`."""
        return super().judge(drafts, p, q, uniforms)[: len(drafts)]


class ArgmaxDraft(Loop):
    """Drafts the argmax, and reports the softmax row as its distribution."""

    def draw_draft(self, row: Tensor) -> tuple[int, Tensor]:
        """See `Loop.draw_draft`."""
        return int(row.argmax()), row


class HiddenFilter(Loop):
    """Drafts from the draft model's two most likely words, and reports the row before this filter."""

    def draw_draft(self, row: Tensor) -> tuple[int, Tensor]:
        """See `Loop.draw_draft`."""
        return super().draw_draft(top(row, 2))[0], row


class OpenFilter(Loop):
    """No mistake: drafts from the draft model's two most likely words, and reports the row after this filter."""

    def draw_draft(self, row: Tensor) -> tuple[int, Tensor]:
        """See `Loop.draw_draft`."""
        return super().draw_draft(top(row, 2))


class SoftmaxAtZero(Loop):
    """At temperature 0, drafts the argmax but judges by the rows of temperature 1."""

    def judged(self, rows: Tensor) -> Tensor:
        """See `Loop.judged`."""
        return rows


class DraftOneShort(Loop):
    """After full acceptance, gives the draft model only the bonus token, though its cache lacks the last draft, too."""

    def unread(self, text: list[int]) -> list[int]:
        """See `Loop.unread`."""
        return text[len(self.draft_cache) :][-1:] if self.draft_cache else text


class MinusZero(Loop):
    """Drops rejected rows by `rows[:-rejected]`, also when nothing was rejected."""

    def roll_back(self, num_drafts: int, num_accepted: int) -> None:
        """See `Loop.roll_back`."""
        self.draft_cache = accepted_rows(self.draft_cache, num_drafts, num_accepted)
        self.target_cache = self.target_cache[: -(num_drafts - num_accepted)]


class NoRollback(Loop):
    """Keeps the rows of rejected drafts in the target's cache."""

    def roll_back(self, num_drafts: int, num_accepted: int) -> None:
        """See `Loop.roll_back`."""
        self.draft_cache = accepted_rows(self.draft_cache, num_drafts, num_accepted)


class NeverCuts(Loop):
    """Commits the whole run of accepted drafts, past the end of the text or past max_tokens."""

    def cut(self, new: list[int], room: int, end: int | None) -> list[int]:
        """See `Loop.cut`."""
        return new


def accepted_rows(draft_cache: list[int], num_drafts: int, num_accepted: int) -> list[int]:
    """The draft model's cache without the rows of rejected drafts. The last draft has none."""
    return draft_cache[: len(draft_cache) - max(0, num_drafts - num_accepted - 1)]


def top(row: Tensor, k: int) -> Tensor:
    """`row`, `[1, vocab]`, with all but its k largest numbers set to 0, renormalised."""
    kept = torch.zeros_like(row).scatter_(-1, row.topk(k).indices, row.topk(k).values)
    return kept / kept.sum()


BROKEN = (
    *(FullTarget, FilteredTwice, OneUniform, MixedRule, FirstUnseen, ArgmaxDraft, HiddenFilter, SoftmaxAtZero),
    *(MinusZero, NoRollback),
    *(ZeroByZero, DraftOneShort, NeverCuts, NoBonus, TargetAlone),
)
