"""Which drafts of a tree were judged, by their rank among their siblings and by their depth, and which accepted.

    rank       0: the draft model's most probable child of a node, 1: the second, …
    depth      0: a child of the last committed token
    judged     the parent was accepted and all siblings of lower rank were rejected
    accepted / judged estimates P(the target chooses this child | its parent was chosen, earlier siblings were not)

Siblings are judged in order of rank. So of the children of an accepted node, those up to the accepted one were judged,
and all if none was accepted. Nodes below a rejected one were not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass
class JudgedCount:
    """How many drafts were judged, and how many of them accepted."""

    judged: int = 0
    accepted: int = 0

    def add(self, is_accepted: bool) -> None:
        """Count one verdict."""
        self.judged += 1
        self.accepted += is_accepted


def judged_nodes(parents: Sequence[int], path: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield `(depth, rank, is_accepted)` of each judged node of a draft tree.

    `parents`: the parent of each node, -1 for the last committed token; for a chain `range(-1, n - 1)`. `path`: the
    accepted nodes, from the root down; for a chain `range(num_accepted)`.
    """
    for depth, node in enumerate([-1, *path]):
        accepted = path[depth] if depth < len(path) else None
        for rank, child in enumerate(i for i, parent in enumerate(parents) if parent == node):
            yield depth, rank, child == accepted
            if child == accepted:
                break
