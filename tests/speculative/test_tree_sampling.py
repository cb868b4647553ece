"""Trees whose siblings are drawn without replacement, through the whole engine: sampled text follows the target.

χ² of the second and third token of a few hundred completions against their exact probabilities. Seeds are fixed; over
the choice of seeds, a correct engine fails with probability 1e-6, and each planted mistake is off by far more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.request import Request
from minillm.speculative import draft_tree
from minillm.speculative.draft_tree import DraftTree, draw_siblings
from minillm.speculative.tree_shape import TreeShape
from tests.chi_square import p_value
from tests.conftest import TinyPair

TOP = 3
"""Tokens that each distribution has."""
PROMPT = "def add(a, b):"
COUNT = 400
Nodes = Sequence[tuple[DraftTree, int, int]]
Drawn = tuple[list[list[int]], list[list[Tensor]]]


def params(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, top_k=TOP, temperature=1.3, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny: TinyPair) -> dict[tuple[int, ...], float]:
    """The probabilities of the first three tokens, from the target alone."""
    llm = LLM(str(tiny.target), enforce_eager=True)
    prompt = llm.get_tokenizer().encode(PROMPT)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        asked = [{"prompt_token_ids": [*prompt, *path]} for path in found]
        raw = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP, ignore_eos=True)
        grown = {}
        for (path, above), output in zip(found.items(), llm.generate(asked, raw, use_tqdm=False), strict=True):
            row = output.outputs[0].logprobs[0]
            probs = torch.tensor([entry.logprob / 1.3 for entry in row.values()]).double().softmax(0)
            grown |= {(*path, token): above * p for token, p in zip(row, probs.tolist(), strict=True)}
        found = grown
    return found


def p_of_engine(tiny: TinyPair, expected: dict[tuple[int, ...], float], **options: Any) -> float:
    """The p-value of the first three tokens. A request is aborted as soon as it has them."""
    config = {"method": "draft_tree", "model": str(tiny.draft), "draft_sample_method": "probabilistic", **options}
    llm = LLM(str(tiny.target), max_num_seqs=COUNT, enforce_eager=True, speculative_config=config)
    requests = llm.submit([PROMPT] * COUNT, [params(seed) for seed in range(COUNT)])
    while llm.engine.requests:
        for request in llm.engine.step():
            if request.num_output_tokens >= 3:
                llm.engine.abort(request.request_id)
    got = [tuple(request.output_token_ids[:3]) for request in requests]
    assert set(got) <= set(expected)
    return p_value(torch.tensor([got.count(path) for path in expected]), torch.tensor([*expected.values()]))


@pytest.mark.parametrize("shape", [{"tree_branching": (3, 2)}, {"tree_shape": "measured", "tree_nodes": 7}], ids=str)
def test_sampled_trees_follow_the_target(tiny: TinyPair, expected: dict, shape: dict[str, Any]) -> None:
    assert p_of_engine(tiny, expected, **shape) > 1e-6


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
    tiny: TinyPair, expected: dict, wrong: Callable[..., Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_tree, "draw_siblings", wrong)
    assert p_of_engine(tiny, expected, tree_branching=(3, 2)) < 1e-6


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


def test_where_q_has_too_few_tokens_the_tree_has_fewer_nodes() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 2.0]])
    some, one = tree(1, TreeShape((-1,) * 3), top_k=2), tree(2, TreeShape((-1,) * 3), top_k=1)
    tokens, probs = draw_siblings(logits, [(some, -1, 3), (one, -1, 3)])
    assert sorted(tokens[0]) == [0, 1] and tokens[1] == [1]
    assert [len(rows) for rows in probs] == [2, 1] and all(bool(q.isfinite().all()) for rows in probs for q in rows)


def test_greedy_requests_beside_sampled_ones_get_the_whole_tree(tiny: TinyPair) -> None:
    config = {"method": "draft_tree", "model": str(tiny.draft), "draft_sample_method": "probabilistic"}
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config=config)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    seen = {}
    real = llm.engine.drafter.propose

    def propose(requests: Sequence[Request], num_drafts: Sequence[int]) -> list:
        drafts = real(requests, num_drafts)
        if len(requests) == 2:
            seen.setdefault("both", drafts)
        return drafts

    llm.engine.drafter.propose = propose
    outputs = llm.generate([PROMPT, PROMPT], [greedy, params(3)], use_tqdm=False)
    alone = LLM(str(tiny.target), enforce_eager=True).generate(PROMPT, greedy, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    sure, drawn = seen["both"]
    assert len(sure.token_ids) == 14 and sure.probs is None
    assert drawn.probs.shape == (len(drawn.token_ids), 300) and len(drawn.token_ids) > 3
