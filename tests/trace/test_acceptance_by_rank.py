"""Which drafts of a tree were judged, by rank and depth."""

from __future__ import annotations

import pytest

from minillm.trace.acceptance_by_rank import judged_nodes

TREE = [-1, -1, 0, 0, 1]
"""Two drafts after the last committed token; two after the first of them, one after the second."""


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
