"""Acceptance by rank and depth, counted from a trace."""

from __future__ import annotations

import pytest

from minillm.errors import TraceError
from minillm.trace import DraftProposed, TokensCommitted
from minillm.trace.acceptance_by_rank import acceptance_by_rank, judged_nodes
from minillm.trace.events import Event

TREE = [-1, -1, 0, 0, 1]
"""Two drafts after the last committed token; two after the first of them, one after the second."""


def proposed(parents: list[int] | None, count: int) -> DraftProposed:
    return DraftProposed("a", [1] * count, [""] * count, parents)


def committed(num_drafts: int, num_accepted: int, path: list[int] | None = None) -> TokensCommitted:
    return TokensCommitted("a", [1], [""], ["sampled"], num_drafts, num_accepted, 1, path)


@pytest.mark.parametrize(
    ("path", "judged"),
    [
        ([], [(0, 0, False), (0, 1, False)]),
        ([0], [(0, 0, True), (1, 0, False), (1, 1, False)]),
        ([0, 2], [(0, 0, True), (1, 0, True)]),
        ([1, 4], [(0, 0, False), (0, 1, True), (1, 0, True)]),
    ],
)
def test_siblings_are_judged_up_to_the_accepted_one(path: list[int], judged: list[tuple[int, int, bool]]) -> None:
    assert list(judged_nodes(TREE, path)) == judged


def test_chains_and_trees_of_a_trace_are_counted_together() -> None:
    events: list[Event] = [
        committed(0, 0),  # a step without drafts
        proposed(None, 3), committed(3, 1),
        proposed(TREE, 5), committed(5, 2, [1, 4]),
        proposed(TREE, 5), committed(5, 0, []),
    ]  # fmt: skip
    counts = {key: (count.accepted, count.judged) for key, count in acceptance_by_rank(events).items()}
    assert counts == {(0, 0): (1, 3), (0, 1): (1, 2), (1, 0): (1, 2)}


def test_verified_drafts_that_nobody_proposed_are_an_error() -> None:
    with pytest.raises(TraceError, match="5 drafts of request a were verified, but none were proposed"):
        acceptance_by_rank([committed(5, 0, [])])
