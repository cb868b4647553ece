"""Lesson 12: speculation over a view with one mistake each. The docstring of each function is the mistake.

Each is a context: while it is open, `llm` (with the method `ViewDrafter`) makes the mistake. It gives the view to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from minillm import LLM
from minillm.batch import Segment
from minillm.teaching.workshop.l12_views import View

Mistake = Callable[[LLM, View, int], AbstractContextManager[View]]
"""`(llm, view, gamma)` → a context with the view."""


@contextmanager
def right(llm: LLM, view: View, gamma: int) -> Iterator[View]:
    """No mistake."""
    yield view


@contextmanager
def sparse_verification(llm: LLM, view: View, gamma: int) -> Iterator[View]:
    """The target verifies over the view, too."""
    runner: Any = llm.engine.runner
    original = runner.run

    def shortened(segment: Segment) -> Segment:
        if segment.num_logits == 1:  # no drafts to verify
            return segment
        table, start, left_out = view(list(segment.block_table), segment.start + 1, None)
        return replace(segment, start=start, block_table=table, num_skipped=left_out)

    runner.run = lambda segments: original([shortened(segment) for segment in segments])
    try:
        yield view
    finally:
        del runner.run


@contextmanager
def view_positions(llm: LLM, view: View, gamma: int) -> Iterator[View]:
    """Drafts get their positions in the view, not those in the text."""
    yield lambda block_table, num_tokens, attention: (*view(block_table, num_tokens, attention)[:2], 0)


class StaleView:
    """A view that starts behind all drafts of the last round, the rejected ones included, as far as blocks reach."""

    def __init__(self, view: View, gamma: int, block_size: int) -> None:
        self.view, self.gamma, self.block_size = view, gamma, block_size
        self.table: list[int] = []
        """The request's first blocks in the last round: another request has others."""
        self.end = 0

    def __call__(self, block_table: list[int], num_tokens: int, attention: Tensor | None) -> tuple[list[int], int, int]:
        """See `l12_views.View`."""
        room = len(block_table) * self.block_size - self.gamma + 1
        same = block_table[: len(self.table)] == self.table and self.end <= num_tokens + self.gamma
        first = max(num_tokens, min(self.end, room)) if same else num_tokens
        self.table, self.end = block_table[: num_tokens // self.block_size], num_tokens + self.gamma
        return self.view(block_table, first, attention)


@contextmanager
def no_rollback(llm: LLM, view: View, gamma: int) -> Iterator[View]:
    """The draft does not roll back: it goes on behind the rejected drafts of the last round."""
    yield StaleView(view, gamma, llm.engine.runner.block_size)


@contextmanager
def short_window(llm: LLM, view: View, gamma: int) -> Iterator[View]:
    """The window has room for one new token: each draft takes the place of the one before."""
    drafter: Any = llm.engine.drafter

    def one_slot(first: Sequence[Segment], num_drafts: Sequence[int]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in first]
        segments = list(first)
        for _ in range(max(num_drafts)):
            for i, [token] in enumerate(drafter.runner.draft(segments, 1)):
                tokens[i].append(token)
                segments[i] = replace(segments[i], token_ids=[token], num_skipped=segments[i].num_skipped + 1)
        return [found[:most] for found, most in zip(tokens, num_drafts, strict=True)]

    drafter.draft_argmax = one_slot
    try:
        yield view
    finally:
        del drafter.draft_argmax


MISTAKES: dict[str, Mistake] = {
    "right": right,
    "verifies over the view": sparse_verification,
    "positions of the view": view_positions,
    "no rollback": no_rollback,
    "window of one token": short_window,
}
"""By what they do; the first is none."""
