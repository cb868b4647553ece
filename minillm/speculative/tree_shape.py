"""The shape of a draft tree, and the shape that gives the most tokens per second (Sequoia: Chen et al. 2024).

    parents (-1, -1, 0, 0, 1)      root ─┬─ 0 ─┬─ 2      ranks  0 1 0 1 0
                                         │     └─ 3      depths 0 0 1 1 1
                                         └─ 1 ─── 4

Assume, with Sequoia, that acceptance depends only on the rank of a draft among its siblings (and here optionally on its
depth). A node is reached with the product of the chances on its path, so

    expected tokens per round    E = 1 + Σ over all nodes of (chance that the target goes through the node)
    tokens per unit of time      E / (depth · t_draft + t_verify(nodes + 1))

Sequoia maximises E for each number of nodes and depth by dynamic programming. Where no chance rises with the rank, as
with children that are sorted by probability, a node is never more probable than its parent or its sibling before it,
and the n most probable nodes always form a tree: repeatedly adding the most probable next node gives the same E,
simpler, and for every n at once. Where a measured chance does rise, it gives a good shape, not always the best.
(`tests/speculative/test_tree_shape.py` compares it with the dynamic programme and with all trees.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from minillm.errors import ConfigError

Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """Which nodes a draft tree has. If there is room for fewer, the first ones are kept."""

    parents: tuple[int, ...]
    """The index of each node's parent, -1 for the root. Parents come before children, siblings in order of rank."""

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> TreeShape:
        """`branching[d]` children for each node of depth `d - 1`, level by level."""
        parents: list[int] = []
        level = [-1]
        for count in branching:
            first = len(parents)
            parents += [node for node in level for _ in range(count)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Sequence[Path]) -> TreeShape:
        """vLLM's spelling: each node is the ranks on the way to it, `[(0,), (1,), (0, 0)]`; in any order.

        Raises `ConfigError` if a node's parent or its sibling before it is missing, or a node is there twice.
        """
        order = sorted(paths, key=lambda path: (len(path), path))
        index: dict[Path, int] = {(): -1}
        for node, path in enumerate(order):
            needed = path[:-1] if not path or path[-1] == 0 else (*path[:-1], path[-1] - 1)
            if path in index:
                raise ConfigError(f"speculative_token_tree has node {path} twice, or the root; leave it out")
            if needed not in index:
                raise ConfigError(f"speculative_token_tree has node {path} without {needed}; add {needed}")
            index[path] = node
        return cls(tuple(index[path[:-1]] for path in order))

    @property
    def num_nodes(self) -> int:
        """Number of drafts."""
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(-1, self.num_nodes - 1))

    @cached_property
    def depths(self) -> list[int]:
        """The depth of each node; 0 for children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def leaves(self) -> list[int]:
        """The nodes without children."""
        return [node for node in range(self.num_nodes) if node not in self.parents]

    def keys_read(self, context: int) -> tuple[int, int]:
        """How many keys of one KV head attention needs to verify the tree after `context` computed tokens: with the
        tree as one request, and with one request for each branch.

        The first is what `tree_attention` reads: it shares the cached tokens among all branches, as DeFT (Yao et al.
        2024) does. (The Triton kernel reads them once per tile of queries.)
        """
        branches = sum(context + 2 + self.depths[leaf] for leaf in self.leaves)
        return context + 1 + self.num_nodes, branches

    @cached_property
    def ranks(self) -> list[int]:
        """Each node's rank among its siblings, from 0."""
        return [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]

    @property
    def num_levels(self) -> int:
        """Most drafts on one path: the number of draft forwards."""
        return max(self.depths, default=-1) + 1

    def num_children(self, node: int) -> int:
        """Number of children of a node; -1: of the root."""
        return self.parents.count(node)

    def cut(self, most: int) -> TreeShape:
        """The shape with at most `most` nodes."""
        return self if most >= len(self.parents) else TreeShape(self.parents[:most])


def chances_of_ranks(acceptance: Sequence[float]) -> list[float]:
    """P(the child of each rank is the accepted one | its parent was accepted).

    `acceptance[r]`: P(the child of rank r is accepted | it is judged), see `trace.acceptance_by_rank`.
    """
    chances, none_so_far = [], 1.0
    for accepted in acceptance:
        chances.append(none_so_far * accepted)
        none_so_far *= 1 - accepted
    return chances


def expected_tokens(shape: TreeShape, chances: Sequence[Sequence[float]]) -> float:
    """E, the target's own token included. `chances[depth][rank]`; the last row also holds for greater depths."""
    reached: list[float] = []
    for parent, depth, rank in zip(shape.parents, shape.depths, shape.ranks, strict=True):
        above = reached[parent] if parent >= 0 else 1.0
        reached.append(above * chances[min(depth, len(chances) - 1)][rank])
    return 1.0 + sum(reached)


def most_probable_nodes(
    chances: Sequence[Sequence[float]], max_nodes: int, max_levels: int
) -> tuple[TreeShape, list[float]]:
    """The `max_nodes` most probable nodes, most probable first, and how probable each is. Nodes of chance 0 are left
    out. `chances[depth][rank]`; the last row also holds for greater depths.

    The first n of them have the largest E of all trees with n nodes if no row of `chances` rises.
    """
    parents: list[int] = []
    reached: list[float] = []
    heap: list[tuple[float, int, int, int, int]] = []
    num_pushed = 0

    def offer(parent: int, depth: int, rank: int) -> None:
        nonlocal num_pushed
        row = chances[min(depth, len(chances) - 1)]
        chance = row[rank] * (reached[parent] if parent >= 0 else 1.0) if rank < len(row) else 0.0
        if depth < max_levels and chance > 0:
            heappush(heap, (-chance, num_pushed, parent, depth, rank))
            num_pushed += 1

    offer(-1, 0, 0)
    while heap and len(parents) < max_nodes:
        negative, _, parent, depth, rank = heappop(heap)
        parents.append(parent)
        reached.append(-negative)
        offer(len(parents) - 1, depth + 1, 0)
        offer(parent, depth, rank + 1)
    return TreeShape(tuple(parents)), reached


def best_shape(
    chances: Sequence[Sequence[float]],  # [depth][rank], see `chances_of_ranks`
    max_nodes: int,
    max_levels: int,
    draft_cost: float = 0.0,
    verify_cost: Callable[[int], float] = lambda rows: 1.0,
) -> TreeShape:
    """The shape with the most tokens per unit of time, if no chance rises with the rank; of equal ones, the smallest.
    It may be empty.

    `draft_cost`: of one draft forward, that is of one level. `verify_cost(rows)`: of a target forward with so many
    tokens of the request. With the defaults, this is the largest E.
    """
    best, best_rate = TreeShape(()), 1 / verify_cost(1)
    for levels in range(1, min(max_levels, max_nodes) + 1):
        shape, reached = most_probable_nodes(chances, max_nodes, levels)
        tokens = 1.0
        for n, chance in enumerate(reached, start=1):
            tokens += chance
            rate = tokens / (levels * draft_cost + verify_cost(n + 1))  # a flatter tree was rated with fewer levels
            if rate > best_rate:
                best, best_rate = shape.cut(n), rate
    return best
