"""Trees whose siblings are drawn without replacement, through the whole engine: sampled text follows the target.

χ² of the first three tokens of a few hundred completions against their exact probabilities. Seeds are fixed; over the
choice of seeds, a correct engine fails with probability 1e-6. Planted mistakes must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.request import Request
from minillm.sampling import uniform
from minillm.speculative import draft_tree
from minillm.speculative.draft_tree import DraftTree, draw_siblings
from minillm.speculative.tree_shape import TreeShape
from tests.chi_square import p_value
from tests.conftest import TinyPair
from tests.speculative.three_tokens import PROMPT, Expected, expected_triples, p_of_triples, sampled

Nodes = Sequence[tuple[DraftTree, int, int]]
Drawn = tuple[list[list[int]], list[list[Tensor]]]


@pytest.fixture(scope="module")
def expected(tiny: TinyPair) -> Expected:
    return expected_triples(tiny)


def drawn(tiny: TinyPair, **options: Any) -> dict[str, Any]:
    return {"method": "draft_tree", "model": str(tiny.draft), "draft_sample_method": "probabilistic", **options}


@pytest.mark.parametrize("shape", [{"tree_branching": (3, 2)}, {"tree_shape": "measured", "tree_nodes": 7}], ids=str)
def test_sampled_trees_follow_the_target(tiny: TinyPair, expected: Expected, shape: dict[str, Any]) -> None:
    assert p_of_triples(tiny, expected, drawn(tiny, **shape)) > 1e-6


def most_probable(logits: Tensor, nodes: Nodes) -> Drawn:
    """Takes the top-k and says that it was drawn."""
    _, probs = draw_siblings(logits, nodes)
    return [[int(q.argmax()) for q in rows] for rows in probs], probs


def siblings_in_order_of_probability(logits: Tensor, nodes: Nodes) -> Drawn:
    """Draws siblings and then judges the more probable ones first."""
    tokens, probs = draw_siblings(logits, nodes)
    for i, rows in enumerate(probs):
        tokens[i].sort(key=lambda token, rows=rows: -float(rows[0][token]))
        for rank in range(1, len(rows)):
            rows[rank] = rows[0].clone()
            rows[rank][tokens[i][:rank]] = 0
            rows[rank] /= rows[rank].sum()
    return tokens, probs


@pytest.mark.parametrize("wrong", [most_probable, siblings_in_order_of_probability])
def test_wrong_draws_are_noticed(
    tiny: TinyPair, expected: Expected, wrong: Callable[..., Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_tree, "draw_siblings", wrong)
    assert p_of_triples(tiny, expected, drawn(tiny, tree_branching=(3, 2))) < 1e-6


def tree(seed: int, shape: TreeShape, top_k: int = 0) -> DraftTree:
    return DraftTree(Request("a", "", [1, 2], 1, SamplingParams(top_k=top_k), 8, seed), shape)


def test_siblings_are_distinct_and_their_distributions_leave_out_those_before() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for seed in range(20):
        [tokens], [probs] = draw_siblings(logits, [(tree(seed, TreeShape((-1,) * 4)), -1, 4)])
        assert sorted(tokens) == [0, 1, 2, 3]
        left = logits[0].softmax(0)
        for token, q in zip(tokens, probs, strict=True):
            assert torch.allclose(q, left / left.sum())
            left[token] = 0


def test_pairs_of_siblings_come_as_often_as_q_says() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0]])
    q = logits[0].softmax(0).double()
    counts, probs = torch.zeros(4, 4), torch.zeros(4, 4)
    nodes = [(tree(seed, TreeShape((-1, -1))), -1, 2) for seed in range(4000)]
    for first, second in draw_siblings(logits.expand(4000, -1), nodes)[0]:
        counts[first, second] += 1
    for a in range(4):
        for b in range(4):
            probs[a, b] = q[a] * q[b] / (1 - q[a]) if a != b else 0
    off_diagonal = ~torch.eye(4, dtype=torch.bool)
    assert p_value(counts[off_diagonal], probs[off_diagonal]) > 1e-6 and not counts.diagonal().any()


def test_no_two_drafts_are_drawn_with_the_same_number(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that shares its parent's number is not drawn from q: which parent it has says where the number lies."""
    drawn_with = []

    def noted(*key: int) -> float:
        drawn_with.append(key)
        return uniform(*key)

    monkeypatch.setattr(draft_tree, "uniform", noted)
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config=drawn(tiny, tree_branching=(3, 3, 2)))
    llm.generate([PROMPT] * 2, [sampled(1), sampled(2)], use_tqdm=False)
    assert len(drawn_with) > 100 and len(set(drawn_with)) == len(drawn_with)


def test_a_penalty_counts_the_drafts_above() -> None:
    """As in the target's distribution, so that both agree."""
    params = SamplingParams(frequency_penalty=2.0)
    grown = DraftTree(Request("a", "", [1, 2], 1, params, 8, 5), TreeShape((-1, 0)))
    grown.grow([[3]], [[torch.ones(4) / 4]])
    _, [[q]] = draw_siblings(torch.zeros(1, 4), [(grown, 0, 1)])
    assert q[0] == q[1] > 6 * q[3] and torch.isclose(q[2], q[3])  # 2 is in the output so far, 3 a draft


def test_where_q_has_too_few_tokens_the_tree_has_fewer_nodes() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 2.0]])
    some, one = tree(1, TreeShape((-1,) * 3), top_k=2), tree(2, TreeShape((-1,) * 3), top_k=1)
    tokens, probs = draw_siblings(logits, [(some, -1, 3), (one, -1, 3)])
    assert sorted(tokens[0]) == [0, 1] and tokens[1] == [1]
    assert [len(rows) for rows in probs] == [2, 1] and all(bool(q.isfinite().all()) for rows in probs for q in rows)


def test_greedy_requests_beside_sampled_ones_get_the_whole_tree(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config=drawn(tiny))
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    seen = {}
    real = llm.engine.drafter.propose

    def propose(requests: Sequence[Request], num_drafts: Sequence[int]) -> list:
        drafts = real(requests, num_drafts)
        if len(requests) == 2:
            seen.setdefault("both", drafts)
        return drafts

    llm.engine.drafter.propose = propose
    outputs = llm.generate([PROMPT, PROMPT], [greedy, sampled(3)], use_tqdm=False)
    alone = LLM(str(tiny.target), enforce_eager=True).generate(PROMPT, greedy, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    sure, random = seen["both"]
    assert len(sure.token_ids) == 14 and sure.probs is None
    assert random.probs.shape == (len(random.token_ids), 300) and len(random.token_ids) > 3
