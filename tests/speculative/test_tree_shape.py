"""The best shape of a draft tree, against a dynamic programme and against every tree there is."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from minillm.errors import ConfigError
from minillm.speculative.tree_shape import (
    TreeShape,
    best_shape,
    chances_of_ranks,
    expected_tokens,
    most_probable_nodes,
)
from tests.speculative.sequoia import most_tokens

RANKS = 3


def every_tree(num_nodes: int) -> Iterator[TreeShape]:
    """All shapes of so many nodes with at most `RANKS` children per node, each at least once."""

    def grow(parents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(parents) == num_nodes:
            yield parents
            return
        for parent in range(-1, len(parents)):
            if parents.count(parent) < RANKS:
                yield from grow((*parents, parent))

    return map(TreeShape, grow(()))


def random_chances(seed: int, sort: bool = True) -> list[list[float]]:
    """Of three depths; each row sums to less than 1 and, if sorted, falls."""
    generator = random.Random(seed)
    rows = []
    for _ in range(3):
        weights = [generator.random() for _ in range(RANKS + 1)]
        row = [weight / sum(weights) for weight in weights[:RANKS]]
        rows.append(sorted(row, reverse=True) if sort else row)
    return rows


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_no_tree_of_up_to_five_nodes_is_better(seed: int, levels: int) -> None:
    chances = random_chances(seed)
    for n in range(1, 6):
        allowed = [shape for shape in every_tree(n) if shape.num_levels <= levels]
        by_force = max((expected_tokens(shape, chances) for shape in allowed), default=0.0)
        shape, reached = most_probable_nodes(chances, n, levels)
        assert expected_tokens(shape, chances) == pytest.approx(1 + sum(reached))
        assert most_tokens(chances, n, levels) == pytest.approx(1 + sum(reached))
        assert not allowed or by_force == pytest.approx(1 + sum(reached))


@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_programme_finds_nothing_better_for_larger_trees(seed: int) -> None:
    chances = random_chances(100 + seed)
    shape, _ = most_probable_nodes(chances, 24, 6)
    for n in (8, 16, 24):
        assert expected_tokens(shape.cut(n), chances) == pytest.approx(most_tokens(chances, n, 6))


def test_if_a_chance_rises_with_the_rank_only_the_dynamic_programme_is_exact() -> None:
    """So the order of siblings is a premise: an unlikely second child hides a third that is nearly always right."""
    chances = [[0.1, 0.05, 0.8], [0.9, 0.0, 0.0]]
    shape, _ = most_probable_nodes(chances, 3, 3)
    assert expected_tokens(shape, chances) == pytest.approx(1 + 0.1 + 0.09 + 0.081)
    assert most_tokens(chances, 3, 3) == pytest.approx(1 + 0.1 + 0.05 + 0.8)


def brute_rate(chances: list[list[float]], nodes: int, levels: int, draft_cost: float, row_cost: float) -> float:
    rates = [1.0]
    for n in range(1, nodes + 1):
        rates += [
            expected_tokens(shape, chances) / (shape.num_levels * draft_cost + 1 + row_cost * n)
            for shape in every_tree(n)
            if shape.num_levels <= levels
        ]
    return max(rates)


@pytest.mark.parametrize(("draft_cost", "row_cost"), [(0.0, 0.0), (0.12, 0.16), (0.3, 0.02), (0.02, 0.3), (2.0, 0.0)])
def test_no_tree_of_up_to_five_nodes_gives_more_tokens_per_second(draft_cost: float, row_cost: float) -> None:
    for seed in range(3):
        chances = random_chances(seed)
        shape = best_shape(chances, 5, 4, draft_cost, lambda rows: 1 + row_cost * (rows - 1))
        rate = expected_tokens(shape, chances) / (shape.num_levels * draft_cost + 1 + row_cost * shape.num_nodes)
        assert rate == pytest.approx(brute_rate(chances, 5, 4, draft_cost, row_cost))


def test_a_dear_level_makes_trees_flat_and_a_dear_row_makes_them_thin() -> None:
    chances = [[0.6, 0.25, 0.1]]
    free = best_shape(chances, 12, 6)
    flat = best_shape(chances, 12, 6, draft_cost=0.3)
    thin = best_shape(chances, 12, 6, draft_cost=0.02, verify_cost=lambda rows: 1 + 0.15 * rows)
    assert free.num_nodes == 12 and free.num_levels == 5
    assert flat.num_levels < free.num_levels
    assert thin.parents == (-1, 0, -1)
    assert best_shape(chances, 12, 6, draft_cost=2.0).num_nodes == 0


def test_of_ten_nodes_the_first_five_are_the_best_five() -> None:
    chances = random_chances(7)
    shape, _ = most_probable_nodes(chances, 10, 4)
    assert shape.cut(5) == most_probable_nodes(chances, 5, 4)[0] and shape.cut(99) is shape


def test_what_is_counted_becomes_a_share_of_all_rounds() -> None:
    assert chances_of_ranks([0.5, 0.5, 1.0]) == pytest.approx([0.5, 0.25, 0.25])


def test_a_shape_is_spelt_as_branching_or_as_paths() -> None:
    shape = TreeShape.from_branching((2, 1))
    assert shape.parents == (-1, -1, 0, 1) and shape.ranks == [0, 1, 0, 0] and shape.depths == [0, 0, 1, 1]
    assert TreeShape.from_paths([(1, 0), (0,), (0, 0), (1,)]) == shape
    assert TreeShape.from_paths([(0,), (0, 0), (0, 0, 0)]) == TreeShape.from_branching((1, 1, 1))
    assert shape.num_children(-1) == 2 and shape.num_children(3) == 0 and shape.num_levels == 2


@pytest.mark.parametrize(
    ("paths", "words"),
    [([(0, 0)], r"\(0, 0\) without \(0,\)"), ([(1,)], r"\(1,\) without \(0,\)"), ([(0,), (0,)], r"\(0,\) twice"),
     ([()], "or the root")],
)  # fmt: skip
def test_paths_that_make_no_tree_name_the_node(paths: list[tuple[int, ...]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TreeShape.from_paths(paths)
