"""The shape of a tree learnt from verdicts: what it converges to, and who may learn from whom."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.request import Request
from minillm.speculative import measured_shape, tree_shape
from minillm.speculative.draft_tree import DraftTreeDrafter
from minillm.speculative.drafter import Draft, Drafter
from minillm.speculative.measured_shape import AcceptanceEstimate, MeasuredShapes
from minillm.speculative.rejection_sampler import Verdict
from minillm.speculative.tree_shape import TreeShape, best_shape, chances_of_ranks, expected_tokens
from minillm.trace import DraftProposed, TokensCommitted
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
MANY = 99
"""More nodes than any of these trees may have."""


def request(salt: str = "", params: SamplingParams = GREEDY) -> Request:
    return Request("a", "", [1], 1, params, 8, 0, cache_salt=salt)


def shapes(nodes: int = 12, levels: int = 6) -> MeasuredShapes:
    return MeasuredShapes(nodes, levels, 0.0, lambda rows: 1.0)


def verdict_of(shape: TreeShape, acceptance: list[float], generator: random.Random) -> list[int]:
    """The accepted path if the child of each rank is accepted with this probability once it is judged."""
    path, node = [], -1
    while True:
        children = [i for i, parent in enumerate(shape.parents) if parent == node]
        node = next((c for c, p in zip(children, acceptance, strict=False) if generator.random() < p), None)
        if node is None:
            return path
        path.append(node)


@pytest.mark.parametrize("acceptance", [[0.9, 0.3, 0.1], [0.3, 0.3, 0.3], [0.6, 0.6, 0.1]], ids=str)
def test_after_some_hundred_verdicts_the_tree_is_nearly_the_best_there_is(acceptance: list[float]) -> None:
    generator, learning, asked = random.Random(1), shapes(), request()
    for _ in range(600):
        shape = learning.shape_for(asked, MANY)
        learning.judged(asked, shape.parents, verdict_of(shape, acceptance, generator))
    truth = [chances_of_ranks(acceptance + [0.0] * 5)]
    best = expected_tokens(best_shape(truth, 12, 6), truth)
    assert expected_tokens(learning.shape_for(asked, MANY), truth) > 0.97 * best


def test_an_estimate_moves_from_the_prior_to_what_was_counted() -> None:
    estimate = AcceptanceEstimate()
    [before] = estimate.chances(1)
    assert before == pytest.approx(chances_of_ranks([0.6 / 2**rank for rank in range(8)]))
    for _ in range(1000):
        estimate.add([-1, -1], [1])  # the second child, each time
    first, deeper = estimate.chances(2)
    assert first[0] < 0.01 and first[1] > 0.98 and deeper[0] < 0.01  # a depth without verdicts takes the rank's


def test_a_level_that_is_different_is_learnt_as_different() -> None:
    estimate = AcceptanceEstimate()
    for _ in range(500):
        estimate.add([-1, 0], [0])  # right at first, wrong below
    first, second = estimate.chances(2)
    assert first[0] > 0.95 and second[0] < 0.05


def test_tenants_and_temperatures_do_not_learn_from_each_other() -> None:
    learning, alice, bob = shapes(), request("alice"), request("bob")
    before = learning.shape_for(bob, MANY)
    for _ in range(200):
        learning.judged(alice, [-1, -1], [])
    assert learning.shape_for(alice, MANY) != before == learning.shape_for(bob, MANY)
    assert learning.shape_for(request("alice", SamplingParams(temperature=1)), MANY) == before


def test_only_so_many_salts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_shape, "MAX_KINDS", 3)
    learning = shapes()
    for salt in "abcdadefa":
        learning.judged(request(salt), [-1], [0])
    assert list(learning._kinds) == [("e", True), ("f", True), ("a", True)]


def test_where_no_draft_pays_one_is_made_all_the_same() -> None:
    learning = MeasuredShapes(8, 4, 0.0, lambda rows: float(rows**3))
    assert learning.shape_for(request(), MANY) == TreeShape((-1,))


def test_where_fewer_nodes_are_allowed_the_tree_is_the_best_one_of_that_size(tiny: TinyPair) -> None:
    """A second level pays if it has many nodes. Of two nodes it would hold one."""
    learning = MeasuredShapes(14, 4, 0.35, lambda rows: 1.0)
    whole = learning.shape_for(request(), 14)
    assert whole.num_levels == 2 and whole.cut(2).parents == (-1, 0)
    assert learning.shape_for(request(), 2).parents == (-1, -1)
    assert learning.shape_for(request(), MANY) == whole
    options = {"method": "draft_tree", "model": str(tiny.draft), "tree_shape": "measured", "tree_draft_cost": 0.35}
    llm = LLM(str(tiny.target), speculative_config={**options, "num_speculative_tokens": 2, "adaptive": False})
    with llm.trace() as trace:
        llm.generate("def add(a, b):", GREEDY, use_tqdm=False)
    assert trace.of(DraftProposed)[0].parents == [-1, -1]


def test_levels_that_no_tree_of_these_nodes_has_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    whole = tree_shape.most_probable_nodes
    monkeypatch.setattr(
        tree_shape, "most_probable_nodes", lambda c, n, levels: (tried.append(levels), whole(c, n, levels))[1]
    )
    best_shape([[0.9, 0.05]], 6, 10**9)
    assert tried == [1, 2, 3, 4, 5, 6]


def test_a_tree_learns_from_the_engines_verdicts(tiny: TinyPair) -> None:
    """A draft that is the target is always right, so the tree becomes a chain; one that is always wrong, a fan."""
    options: dict[str, Any] = {"method": "draft_tree", "tree_shape": "measured", "tree_nodes": 5, "tree_levels": 5}
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config={**options, "model": str(tiny.target)})
    with llm.trace() as trace:
        llm.generate(["def add(a, b):"] * 6, GREEDY, use_tqdm=False)
    trees = [event.parents for event in trace.of(DraftProposed) if len(event.token_ids) == 5]
    assert trees[0] is not None and trees[-1] is None
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftTreeDrafter)
    drafter.shapes = shapes(5, 5)
    drafter.greedy = True
    for _ in range(300):
        drafter.judged(request(), Draft([1, 2, 3], parents=[-1, -1, -1]), Verdict([9], 0, []))
    assert drafter.shapes.shape_for(request(), MANY).num_levels < 5


def test_a_tree_learns_from_the_verdicts_on_chains() -> None:
    drafter = DraftTreeDrafter(None, 64, True, shapes(5, 5))  # type: ignore[arg-type]  (it runs no model here)
    for _ in range(300):
        drafter.judged(request(), Draft([1, 2, 3]), Verdict([1, 9], 1))
    first, second, _ = drafter.shapes._kind_of(request()).estimate.chances(3)
    assert first[0] > 0.95 and second[0] < 0.05


class Told(Drafter):
    """Guesses two tokens, and writes down what it is told."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[str, list[int], int]] = []

    def propose(self, requests: Any, num_drafts: Any) -> list[Draft]:
        return [Draft([1, 2][:k] if r.num_tokens % 2 else []) for r, k in zip(requests, num_drafts, strict=True)]

    def judged(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        assert request.token_ids[-len(verdict.token_ids) :] == verdict.token_ids
        self.verdicts.append((request.request_id, draft.token_ids, verdict.num_accepted))


def test_a_drafter_is_told_each_verdict_once(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": Told, "num_speculative_tokens": 2})
    with llm.trace() as trace:
        llm.generate(["def add(a, b):", "for line in"], GREEDY, use_tqdm=False)
    events = [event for event in trace.of(TokensCommitted) if event.num_drafts]
    told = llm.engine.drafter.verdicts
    assert [(e.request_id, e.num_drafts, e.num_accepted) for e in events] == [
        (name, len(draft), accepted) for name, draft, accepted in told
    ]
    assert told and all(draft for _, draft, _ in told)


def test_a_seed_of_ones_own_gets_the_shape_from_before_anything_was_measured() -> None:
    learning, generator = shapes(), random.Random(2)
    seeded = request(params=SamplingParams(temperature=1.0, seed=1))
    other = request(params=SamplingParams(temperature=1.0))
    before = learning.shape_for(seeded, MANY).parents
    for _ in range(300):
        shape = learning.shape_for(other, MANY)
        learning.judged(other, shape.parents, verdict_of(shape, [0.05, 0.05, 0.9], generator))
    assert learning.shape_for(other, MANY).parents != before == learning.shape_for(seeded, MANY).parents
