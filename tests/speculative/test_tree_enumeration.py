"""A draft tree of two children on three levels: exact by enumeration of everything that chance may decide."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from minillm.sampling import Draw
from minillm.speculative import rejection_sampler
from minillm.speculative.rejection_sampler import EXACT, AcceptRule, judge_tree
from tests.speculative.test_block_verification import LENGTH, VOCAB, expected, follow, random_model

Model = dict[tuple[int, ...], Tensor]
Pair = tuple[int, int]


def siblings(q: Tensor, is_drawn: bool) -> Iterator[tuple[Pair, float]]:
    """Every pair of siblings and its probability: drawn from q without replacement, or the two most likely tokens."""
    if not is_drawn:
        first, second = q.topk(2).indices.tolist()
        yield (first, second), 1.0
        return
    for a, b in permutations(range(VOCAB), 2):
        yield (a, b), float(q[a] * q[b] / (1 - q[a]))


def paths() -> Iterator[tuple[int, ...]]:
    """Which child was accepted on each level, for every number of levels."""
    for depth in range(LENGTH + 1):
        yield from product((0, 1), repeat=depth)


def rounds(draft: Model, path: tuple[int, ...], is_drawn: bool) -> Iterator[tuple[list[Pair], float]]:
    """The siblings at each node on the way to the end of `path`, in every way they may be drawn, and its probability.
    What is drawn elsewhere in the tree plays no part."""

    def drawn(context: tuple[int, ...], level: int) -> Iterator[tuple[list[Pair], float]]:
        if level == LENGTH or level > len(path):
            yield [], 1.0
            return
        for pair, chance in siblings(draft[context], is_drawn):
            below = (*context, pair[path[level]]) if level < len(path) else ()
            for pairs, further in drawn(below, level + 1):
                yield [pair, *pairs], chance * further

    return drawn((), 0)


def whole_tree(pairs: list[Pair], path: tuple[int, ...], draft: Model) -> tuple[list[int], list[int], list[Tensor]]:
    """Tokens, parents and q of the tree that has `pairs` along `path`, and the tokens 0 and 1 everywhere else."""
    tokens, parents, q = [], [], []
    contexts: dict[int, tuple[int, ...]] = {-1: ()}
    level_above, on_path = [-1], -1
    for level in range(LENGTH):
        added = []
        for parent in level_above:
            row = draft[contexts[parent]].clone()
            for token in pairs[level] if parent == on_path and level < len(pairs) else (0, 1):
                contexts[len(tokens)] = (*contexts[parent], token)
                added.append(len(tokens))
                tokens.append(token)
                parents.append(parent)
                q.append(row / row.sum())
                row = row.clone()
                row[token] = 0
        if level < len(path):
            on_path = [node for node in added if parents[node] == on_path][path[level]]
        level_above = added
    return tokens, parents, q


def enumerated(
    monkeypatch: pytest.MonkeyPatch, target: Model, draft: Model, is_drawn: bool, rule: AcceptRule = EXACT
) -> Tensor:
    """The distribution of the first `LENGTH + 1` tokens: `judge_tree` is led along every path of every tree."""
    found = torch.zeros([VOCAB] * (LENGTH + 1), dtype=torch.float64)
    decisions: list[bool] = []
    chances: list[float] = []
    last: list[Tensor] = []

    def accept(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        chances.append(float(rule.accept(p, q, x)))
        return torch.ones(1)

    def uniform(seed: int, index: int, purpose: Draw, sibling: int = 0) -> float:
        return (0.0 if decisions[len(chances) - 1] else 1.0) if purpose is Draw.ACCEPT else 0.5

    def sample(p: Tensor, uniforms: object) -> Tensor:
        last.append(p[0])
        return torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr(rejection_sampler, "uniform", uniform)
    monkeypatch.setattr(rejection_sampler, "sample", sample)
    led = AcceptRule(accept, rule.recover)
    for path in paths():
        decisions[:] = [accepted for child in path for accepted in [False] * child + [True]] + [False, False]
        for pairs, weight in rounds(draft, path, is_drawn):
            tokens, parents, q = whole_tree(pairs, path, draft)
            contexts = [()]
            for token, parent in zip(tokens, parents, strict=True):
                contexts.append((*contexts[parent + 1], token))
            chances.clear()
            rows = torch.stack([target[context] for context in contexts])
            verdict = judge_tree(tokens, parents, torch.stack(q) if is_drawn else None, rows, 0, 0, led)
            assert verdict.num_accepted == len(path)
            for chance, accepted in zip(chances, decisions, strict=False):
                weight *= chance if accepted else 1 - chance
            if weight:
                follow(found, target, tuple(verdict.token_ids[: len(path)]), weight * last[-1])
    return found


@pytest.mark.parametrize("is_drawn", [False, True], ids=["top two", "drawn"])
@pytest.mark.parametrize("seed", range(3))
def test_the_output_is_distributed_as_the_targets(monkeypatch: pytest.MonkeyPatch, seed: int, is_drawn: bool) -> None:
    target, draft = random_model(seed), random_model(100 + seed)
    assert torch.allclose(enumerated(monkeypatch, target, draft, is_drawn), expected(target), atol=1e-12)


def leave_p(p: Tensor, q: Tensor) -> Tensor:
    """The second sibling is judged against all of p, as if the first had not been."""
    return p


def zero_without_renormalising(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0)


def accept_twice_as_often(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return (2 * rejection_sampler.acceptance_probability(p, q, x)).clamp(max=1)


@pytest.mark.parametrize("is_drawn", [False, True], ids=["top two", "drawn"])
@pytest.mark.parametrize(
    "rule",
    [
        AcceptRule(recover=leave_p),
        AcceptRule(recover=zero_without_renormalising),
        AcceptRule(accept=accept_twice_as_often),
    ],
    ids=["all of p for each sibling", "not renormalised", "too generous"],
)
def test_wrong_rules_are_seen(monkeypatch: pytest.MonkeyPatch, rule: AcceptRule, is_drawn: bool) -> None:
    target, draft = random_model(1), random_model(101)
    found = enumerated(monkeypatch, target, draft, is_drawn, rule)
    assert float((found - expected(target)).abs().max()) > 1e-4
