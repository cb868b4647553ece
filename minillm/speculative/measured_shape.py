"""The shape of a draft tree from the acceptance measured while the engine runs.

Each verdict tells for some drafts, by depth and rank, whether the target chose them. Few verdicts say little, so each
estimate starts from a coarser one, as if that had been seen in `PRIOR_COUNT` verdicts:

    at this rank and depth  ←  at this rank, all depths  ←  half of the rank before  ←  ⋯  ←  `PRIOR` for rank 0

The shape depends only on verdicts of earlier rounds, never on the drafts of this one, so drafts stay distributed as
they are for a fixed shape. Greedy tokens do not depend on it. The tokens of a sampled request do, although their
distribution does not, so a request with a seed of its own always gets the shape of an engine that has measured nothing.

Requests with different `cache_salt` do not learn shapes from each other, because these would show one tenant something
of another's text. (Whether there are drafts may still depend on it: `adaptive` in `config.py`.) Greedy and sampled
requests are kept apart, because their acceptance differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from minillm.request import Request
from minillm.speculative.tree_shape import TreeShape, best_shape, chances_of_ranks
from minillm.trace.acceptance_by_rank import JudgedCount, judged_nodes

PRIOR = 0.6
"""Acceptance of the first child of a node before anything was measured."""
PRIOR_COUNT = 8
"""How many verdicts the coarser estimate counts for."""
MAX_RANKS = 8
"""Most children of a node."""
MAX_KINDS = 512
"""Most salts, greedy and sampled, that are kept. Beyond that, the one used longest ago is forgotten."""


class AcceptanceEstimate:
    """Estimates acceptance by depth and rank from verdicts."""

    def __init__(self) -> None:
        self.num_verdicts = 0
        self._by_rank: dict[int, JudgedCount] = {}
        self._by_depth_and_rank: dict[tuple[int, int], JudgedCount] = {}

    def add(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Count the verdict of one tree: see `judged_nodes`."""
        for depth, rank, is_accepted in judged_nodes(parents, path):
            self._by_rank.setdefault(rank, JudgedCount()).add(is_accepted)
            self._by_depth_and_rank.setdefault((depth, rank), JudgedCount()).add(is_accepted)
        self.num_verdicts += 1

    def chances(self, num_levels: int) -> list[list[float]]:
        """`[num_levels][MAX_RANKS]`: P(the child of this rank is the accepted one | its parent was accepted)."""
        at_rank, before = [], 2 * PRIOR
        for rank in range(MAX_RANKS):
            before = _shrunk(self._by_rank.get(rank), before / 2)
            at_rank.append(before)
        return [
            chances_of_ranks([_shrunk(self._by_depth_and_rank.get((depth, r)), a) for r, a in enumerate(at_rank)])
            for depth in range(num_levels)
        ]


def _shrunk(count: JudgedCount | None, prior: float) -> float:
    """accepted / judged, with `PRIOR_COUNT` verdicts of `prior` added."""
    if count is None:
        return prior
    return (count.accepted + PRIOR_COUNT * prior) / (count.judged + PRIOR_COUNT)


class MeasuredShapes:
    """The best shapes so far for each kind of request: its salt, and whether it is greedy."""

    def __init__(self, max_nodes: int, max_levels: int, draft_cost: float, verify_cost: Callable[[int], float]) -> None:
        self.max_nodes, self.max_levels = max_nodes, min(max_levels, max_nodes)
        self.draft_cost, self.verify_cost = draft_cost, verify_cost
        self._kinds: OrderedDict[tuple[str, bool], _Kind] = OrderedDict()
        self._unmeasured = _Kind()

    def shape_for(self, request: Request, most: int) -> TreeShape:
        """The best shape for the next tree if it may have at most `most` nodes. It has at least one node: without
        drafts, nothing more would be learnt.

        A request that samples with its own seed gets the shape from before anything was measured, so that its text does
        not depend on other requests."""
        kind = self._unmeasured if request.samples_with_own_seed else self._kind_of(request)
        if kind.estimate.num_verdicts >= kind.next_update:
            kind.chances, kind.shapes = kind.estimate.chances(self.max_levels), {}
            kind.next_update = kind.estimate.num_verdicts * 5 // 4 + PRIOR_COUNT
        nodes = min(most, self.max_nodes)
        if nodes not in kind.shapes:
            found = best_shape(kind.chances, nodes, self.max_levels, self.draft_cost, self.verify_cost)
            kind.shapes[nodes] = found if found.num_nodes else TreeShape((-1,))
        return kind.shapes[nodes]

    def judged(self, request: Request, parents: Sequence[int], path: Sequence[int]) -> None:
        """Learn from one verdict."""
        self._kind_of(request).estimate.add(parents, path)

    def _kind_of(self, request: Request) -> _Kind:
        key = (request.cache_salt, request.params.is_greedy)
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return kind


class _Kind:
    """What is known about requests of one kind."""

    def __init__(self) -> None:
        self.estimate = AcceptanceEstimate()
        self.chances: list[list[float]] = []
        """What the estimate said at the latest update."""
        self.shapes: dict[int, TreeShape] = {}
        """The best shapes for these chances, by the number of nodes that were allowed."""
        self.next_update = 0
        """The number of verdicts at which the shapes are computed again."""
