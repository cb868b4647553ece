"""Sequoia's dynamic programme (Chen et al. 2024, section 3.1), with a chance for each depth and rank: the oracle of
`best_shape`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def most_tokens(chances: Sequence[Sequence[float]], num_nodes: int, num_levels: int) -> float:
    """The largest expected number of tokens per round of any tree with at most `num_nodes` nodes and `num_levels`
    levels, the target's own token included. `chances[depth][rank]` may rise with the rank."""

    @cache
    def below(nodes: int, depth: int) -> float:
        """The most that up to `nodes` descendants of a node can add; its children have this depth."""
        return children(nodes, depth, 0) if depth < num_levels else 0.0

    @cache
    def children(nodes: int, depth: int, rank: int) -> float:
        """The most from the child of this rank and those after it, with their descendants."""
        row = chances[min(depth, len(chances) - 1)]
        if not nodes or rank == len(row):
            return 0.0
        sizes = range(1, nodes + 1)
        with_child = (row[rank] * (1 + below(n - 1, depth + 1)) + children(nodes - n, depth, rank + 1) for n in sizes)
        return max(0.0, *with_child)

    return 1.0 + below(num_nodes, 0)
