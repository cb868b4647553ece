"""Judging a draft tree: exact for any tree, and for a chain the same as judging a chain."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from minillm.errors import DraftError
from minillm.sampling import Draw, uniform
from minillm.speculative import rejection_sampler
from minillm.speculative.rejection_sampler import (
    check_tree,
    greedy_tree_verdict,
    judge_tree,
    rejection_sample,
    residual,
)
from tests.chi_square import p_value

VOCAB = 5
TOP_TWO = ([1, 3, 0, 1, 2, 4], [-1, -1, 0, 0, 1, 1])
"""Two guesses after the root, two after each of them."""
DRAWS = 4000


def tables(seed: int) -> dict[tuple[int, ...], Tensor]:
    """The target's distribution after every context of up to two guesses."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [(), *((a,) for a in range(VOCAB)), *((a, b) for a in range(VOCAB) for b in range(VOCAB))]
    return {c: torch.rand(VOCAB, generator=generator).pow(2).add(0.01) for c in contexts}


def normalised(tables: dict[tuple[int, ...], Tensor]) -> dict[tuple[int, ...], Tensor]:
    return {context: weights / weights.sum() for context, weights in tables.items()}


def rows(tree: tuple[list[int], list[int]], target: dict[tuple[int, ...], Tensor]) -> Tensor:
    """`target_probs` of a tree."""
    contexts: list[tuple[int, ...]] = []
    for token, parent in zip(*tree, strict=True):
        contexts.append((*(contexts[parent] if parent >= 0 else ()), token))
    return torch.stack([target[context] for context in ((), *contexts)])


def first_two(
    make: Callable[[int], tuple[tuple[list[int], list[int]], Tensor | None]], target: dict[tuple[int, ...], Tensor]
) -> Tensor:
    """How often each pair of first tokens came, `[VOCAB, VOCAB]`, over `DRAWS` seeds. Where a verdict has one token,
    the second is drawn from the target, as the next round would."""
    counts = torch.zeros(VOCAB, VOCAB)
    for seed in range(DRAWS):
        tree, q = make(seed)
        tokens = judge_tree(*tree, q, rows(tree, target), seed, 0).token_ids[:2]
        if len(tokens) < 2:
            cumulative = target[tuple(tokens)].cumsum(0)
            tokens.append(int((cumulative <= uniform(seed, 1, Draw.SAMPLE)).sum().clamp(max=VOCAB - 1)))
        counts[tokens[0], tokens[1]] += 1
    return counts


def expected(target: dict[tuple[int, ...], Tensor]) -> Tensor:
    return torch.stack([target[()][a] * target[(a,)] for a in range(VOCAB)])


def fixed(seed: int) -> tuple[tuple[list[int], list[int]], None]:
    """Guesses that do not depend on chance."""
    return TOP_TWO, None


def drawn(seed: int) -> tuple[tuple[list[int], list[int]], Tensor]:
    """Siblings drawn from a draft's distribution, one after the other: the second may equal the first."""
    draft = normalised(tables(99))
    generator = random.Random(seed)
    tokens, parents, q, contexts = [], [], [], []
    for parent in (-1, -1, 0, 0):
        context = () if parent < 0 else (tokens[parent],)
        q.append(draft[context])
        tokens.append(generator.choices(range(VOCAB), draft[context].tolist())[0])
        parents.append(parent)
        contexts.append(context)
    return (tokens, parents), torch.stack(q)


@pytest.mark.parametrize("guesses", [fixed, drawn])
def test_two_tokens_after_any_tree_follow_the_target(guesses: Callable) -> None:
    """χ² over 25 pairs; a correct sampler fails with probability 1e-6 over the choice of seeds, which are fixed."""
    target = normalised(tables(3))
    assert p_value(first_two(guesses, target).flatten(), expected(target).flatten()) > 1e-6


def test_siblings_that_share_a_uniform_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    really = uniform
    monkeypatch.setattr(
        rejection_sampler, "uniform", lambda seed, index, purpose, sibling=0: really(seed, index, purpose)
    )
    target = normalised(tables(3))
    assert p_value(first_two(fixed, target).flatten(), expected(target).flatten()) < 1e-6


@pytest.mark.parametrize("with_probs", [False, True])
def test_a_chain_is_judged_as_the_chain_it_is(with_probs: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    for seed in range(200):
        tokens = torch.randint(0, VOCAB, (3,), generator=generator).tolist()
        p = torch.rand(4, VOCAB, generator=generator).softmax(-1)
        q = torch.rand(3, VOCAB, generator=generator).softmax(-1) if with_probs else None
        chain = rejection_sample([tokens], [q], p, [seed], [7])[0]
        tree = judge_tree(tokens, [-1, 0, 1], q, p, seed, 7)
        assert (tree.token_ids, tree.num_accepted) == (chain.token_ids, chain.num_accepted)
        assert tree.path == list(range(chain.num_accepted))


def test_greedy_goes_down_the_branch_that_the_target_takes() -> None:
    tokens, parents = TOP_TWO
    #               root: 3, behind node 0: ·, behind node 1: 4, then behind nodes 2 … 5
    assert greedy_tree_verdict(tokens, parents, [3, 0, 4, 0, 0, 0, 2]).path == [1, 5]
    assert greedy_tree_verdict(tokens, parents, [3, 0, 4, 0, 0, 0, 2]).token_ids == [3, 4, 2]
    assert greedy_tree_verdict(tokens, parents, [0, 0, 4, 0, 0, 0, 2]).token_ids == [0]
    assert greedy_tree_verdict(tokens, parents, [1, 4, 0, 0, 0, 0, 0]).token_ids == [1, 4]
    one_hot = torch.eye(VOCAB)[torch.tensor([3, 0, 4, 0, 0, 0, 2])]
    assert judge_tree(tokens, parents, None, one_hot, 1, 0).token_ids == [3, 4, 2]


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([1, 2], [-1], "2 tokens has 1 parents"),
        ([1, 2], [-1, 1], "node 1 of a draft tree follows node 1"),
        ([1, 2], [-2, 0], "node 0 of a draft tree follows node -2"),
        ([1] * 64, [-1] * 64, "64 nodes: at most 63"),
    ],
)
def test_what_is_no_tree_says_so(tokens: Sequence[int], parents: Sequence[int], words: str) -> None:
    with pytest.raises(DraftError, match=words):
        check_tree(tokens, parents)


def test_a_node_that_its_distribution_rules_out_says_so() -> None:
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])
    with pytest.raises(DraftError, match="node 0 of a draft tree, token 0"):
        judge_tree([0], [-1], q, torch.full((2, VOCAB), 0.2), 1, 0)


def test_what_is_left_is_all_of_p_without_the_siblings_that_were_rejected() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0.0]])
    one_hot = torch.eye(VOCAB)
    left = residual(residual(p, one_hot[0:1]), one_hot[1:2])
    assert torch.allclose(left, torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("shape", [(1, 3), (2, 4)])
def test_distributions_that_do_not_fit_say_so(shape: tuple[int, int]) -> None:
    probs, target = torch.full(shape, 1 / shape[1]), torch.full((3, 3), 1 / 3)
    with pytest.raises(DraftError, match=r"draft_probs has shape .*, must be \[drafts, vocab\] = \[2, 3\]"):
        judge_tree([1, 2], [-1, -1], probs, target, 0, 5)
