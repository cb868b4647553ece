"""Draft trees through the whole engine: whatever the tree, the batch and the cache, the tokens are the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.errors import ConfigError, DraftError, UnsupportedError
from minillm.request import Request
from minillm.speculative.draft_tree import DraftTree, DraftTreeDrafter
from minillm.speculative.drafter import Draft, Drafter
from minillm.speculative.rejection_sampler import AcceptRule
from minillm.speculative.tree_shape import TreeShape
from minillm.trace import BlocksShared, DraftProposed, RequestPreempted, StepRan, TokensCommitted
from minillm.trace.acceptance_state import AcceptanceState
from tests.cache.runs import PreemptingScheduler
from tests.conftest import TinyPair
from tests.speculative.reading import target_of
from tests.speculative.self_drafting import cache_is_that_of_a_plain_run

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "def add(a, b):\n    return"]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def tree(model: object, branching: tuple[int, ...] = (2, 2, 2), **options: Any) -> dict[str, Any]:
    return {"method": "draft_tree", "model": str(model), "tree_branching": branching, **options}


def tokens(llm: LLM, params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("number", range(3))
def test_greedy_tokens_are_the_plain_ones(tiny: TinyPair, number: int, place: int) -> None:
    """Every size of a block with every kind of cache, and both with plain PyTorch and with compiled steps."""
    block_size, kv_cache_dtype, eager = (1, 5, 16)[number], ("auto", "int8", "int4")[place], number != place
    options: dict[str, Any] = {
        "block_size": block_size, "kv_cache_dtype": kv_cache_dtype, "enforce_eager": eager,
    }  # fmt: skip
    target, draft = (str(tiny.target), str(tiny.draft)) if eager else ("minicoder", "minicoder-draft")
    llm = LLM(target, speculative_config=tree(draft), **options)
    assert (llm.engine.runner.executor is None) == eager
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(target, **options))
    judged = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    off_the_first_branch = [e for e in judged if e.path and e.path != list(range(len(e.path)))]
    assert off_the_first_branch, "no path had to be moved in the cache"


@pytest.mark.parametrize("eager", [True, False], ids=["pytorch", "compiled"])
def test_a_target_that_drafts_for_itself_reaches_a_leaf_every_time(tiny: TinyPair, eager: bool) -> None:
    """Catches a node that sees a cousin, a position that counts nodes and not depth, and a path that was not moved:
    then the draft would drift from the target, and some best guess would be wrong."""
    target = str(tiny.target) if eager else "minicoder"
    llm = LLM(target, speculative_config=tree(target), enforce_eager=eager)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(target, enforce_eager=eager))
    whole = [e for e in trace.of(TokensCommitted) if e.num_drafts == 14]
    assert whole and all(e.num_accepted == 3 and e.origins[-1] == "bonus" for e in whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_rule_of_ones_own_judges_trees_too(tiny: TinyPair, temperature: float) -> None:
    """One that accepts every draft takes the first child of every node."""
    accept_all = AcceptRule(accept=lambda p, q, x: torch.ones(len(x), dtype=p.dtype))
    llm = LLM(str(tiny.target), speculative_config=tree(tiny.draft, rejection_sample_method=accept_all))
    with llm.trace() as trace:
        tokens(llm, replace(GREEDY, temperature=temperature))
    whole = [e for e in trace.of(TokensCommitted) if e.num_drafts == 14]
    assert whole and all(e.path == [0, 2, 6] for e in whole)


def test_a_block_that_a_node_was_written_to_has_lost_its_hash(tiny: TinyPair) -> None:
    """Or the draft model would later skip that block as one it had filled with something else."""
    llm = LLM(str(tiny.target), block_size=2, num_kv_blocks=80, speculative_config=tree(tiny.draft))
    drafter, found = llm.engine.drafter, []
    propose, run = drafter.propose, drafter.runner.run

    def with_other_hashes(*arguments: Any) -> Any:
        drafter._filled = dict.fromkeys(range(80), b"of other tokens")
        return propose(*arguments)

    def noting(segments: Sequence[Segment]) -> torch.Tensor:
        for segment in segments:
            nodes = range(segment.start + 1, segment.end) if segment.parents else ()
            found.extend(drafter._filled.get(segment.block_table[position // 2]) for position in nodes)
        return run(segments)

    drafter.propose, drafter.runner.run = with_other_hashes, noting
    tokens(llm)
    assert found and not any(found)


@pytest.mark.parametrize("eager", [True, False], ids=["pytorch", "compiled"])
def test_a_tree_without_siblings_is_drafted_as_a_chain(
    tiny: TinyPair, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = (str(tiny.target), str(tiny.draft)) if eager else ("minicoder", "minicoder-draft")
    monkeypatch.setattr(DraftTreeDrafter, "_grow", None)
    llm = LLM(target, speculative_config=tree(draft, (1, 1, 1)), enforce_eager=eager)
    chain = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(target, enforce_eager=eager))
    with (other := LLM(target, speculative_config=chain, enforce_eager=eager)).trace() as chains:
        tokens(other)
    drafted = [(e.request_id, e.token_ids, e.parents) for e in trace.of(DraftProposed)]
    assert drafted == [(e.request_id, e.token_ids, e.parents) for e in chains.of(DraftProposed)]


def test_chains_and_trees_take_turns(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain leaves drafts in the draft's cache, a tree does not, and a step with both drafts trees."""
    llm = LLM(str(tiny.target), speculative_config=tree(tiny.draft))
    turns = cycle([(1, 1, 1)] * 5 + [(2, 2)] * 4 + [(1, 1)] * 4 + [(1, 2), (3,)])

    def shape_for(self: DraftTreeDrafter, request: Request, most: int) -> TreeShape:
        return TreeShape.from_branching(next(turns)).cut(most)

    monkeypatch.setattr(DraftTreeDrafter, "_shape_for", shape_for)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target)))
    parents = [e.parents for e in trace.of(DraftProposed)]
    assert parents.count(None) > 10 and len(parents) - parents.count(None) > 10


@pytest.mark.parametrize("sampled", [False, True])
def test_with_preemption_prefix_sharing_chunks_and_chains_beside_it(tiny: TinyPair, sampled: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    if sampled:  # top_k=1: chance takes part in every step, and has one outcome
        params = SamplingParams(temperature=0.7, top_k=1, seed=4, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    right = [LLM(str(tiny.target), **options).generate(p, params, use_tqdm=False) for p in PROMPTS]
    llm = LLM(str(tiny.target), num_kv_blocks=22, speculative_config=tree(tiny.draft), **options)
    for _ in range(2):  # the second time prompts are found in the prefix cache
        with llm.trace() as trace:
            got = tokens(llm, params)
        assert got == [outputs[0].outputs[0].token_ids for outputs in right]
    assert trace.of(RequestPreempted) and trace.of(BlocksShared)
    assert any(len(step.work) > 1 for step in trace.of(StepRan))


SHAPES: dict[str, dict[str, Any]] = {
    "as a list of paths": {"speculative_token_tree": [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]},
    "as vLLM's string": {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0), (1,), (1, 0)]"},
    "measured": {"tree_shape": "measured", "tree_nodes": 9, "tree_levels": 5},
    "measured, at a price": {"tree_shape": "measured", "tree_draft_cost": 0.1, "tree_verify_cost": 0.1},
    "measured, drawn": {"tree_shape": "measured", "draft_sample_method": "probabilistic"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "of one outcome"])
def test_trees_of_any_shape_change_no_token(tiny: TinyPair, shape: str, sampled: bool) -> None:
    """With preemption, chunks and a prefix cache; the second time with what was measured the first time."""
    params = SamplingParams(temperature=0.7 * sampled, top_k=int(sampled), seed=4, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 4, "enforce_eager": True}
    right = tokens(LLM(str(tiny.target), **options), params)
    speculative = {"method": "draft_tree", "model": str(tiny.draft), **SHAPES[shape]}
    llm = LLM(str(tiny.target), num_kv_blocks=22, speculative_config=speculative, **options)
    with llm.trace() as trace:
        assert tokens(llm, params) == right and tokens(llm, params) == right
    assert trace.of(RequestPreempted)
    assert any(e.num_accepted for e in trace.of(TokensCommitted))


def test_a_forked_tree_with_stop_strings_and_an_abort_leaves_the_others_as_they_are(tiny: TinyPair) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=2, top_k=1, max_tokens=24, ignore_eos=True)
    plain = LLM(str(tiny.target), block_size=4, enforce_eager=True)
    stop = plain.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].text[8:11]
    params = replace(params, stop=[stop])
    right = [[o.text for o in out.outputs] for out in plain.generate(PROMPTS, params, use_tqdm=False)]
    speculative = {"method": "draft_tree", "model": str(tiny.draft), **SHAPES["measured, drawn"]}
    llm = LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=speculative)
    [dropped] = llm.submit([PROMPTS[1]], GREEDY)
    llm.engine.step()
    llm.engine.step()
    llm.engine.abort(dropped.request_id)
    assert [[o.text for o in out.outputs] for out in llm.generate(PROMPTS, params, use_tqdm=False)] == right
    assert stop not in right[0][0] and llm.engine.pool.num_used == 0


def test_the_cache_holds_what_a_plain_run_would_have_put_there(tiny: TinyPair) -> None:
    cache_is_that_of_a_plain_run(tiny, tree(tiny.draft))


def test_sampled_text_follows_the_target(tiny: TinyPair) -> None:
    """χ² over the second and third token of 1500 completions with trees against as many without. Requests are preempted
    between, and share the blocks of their prompt.

    Both are samples, so this is a two-sample test; seeds are fixed, and a correct engine fails with probability 1e-6
    over their choice.
    """
    counts = []
    for speculative in (None, tree(tiny.draft)):
        options = {"max_num_seqs": 128, "block_size": 4, "scheduler_cls": PreemptingScheduler}
        llm = LLM(str(tiny.target), speculative_config=speculative, **options)
        params = [
            SamplingParams(seed=i + 10_000 * bool(speculative), max_tokens=4, ignore_eos=True, top_k=4)
            for i in range(1500)
        ]
        with llm.trace() as trace:
            outputs = llm.generate([PROMPTS[0]] * 1500, params, use_tqdm=False)
        assert trace.of(RequestPreempted) and trace.of(BlocksShared)
        counts.append([tuple(o.outputs[0].token_ids[1:3]) for o in outputs])
    pairs = sorted(set(counts[0] + counts[1]), key=(counts[0] + counts[1]).count, reverse=True)[:12]
    table = [[c.count(p) for p in pairs] + [sum(x not in pairs for x in c)] for c in counts]
    table = [[a for a, b in zip(*table, strict=True) if a + b], [b for a, b in zip(*table, strict=True) if a + b]]
    assert chi2_contingency(table).pvalue > 1e-6


def test_logprobs_are_those_of_the_plain_way(tiny: TinyPair) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    plain = LLM(str(tiny.target)).generate(PROMPTS, params, use_tqdm=False)
    drafted = LLM(str(tiny.target), speculative_config=tree(tiny.draft)).generate(PROMPTS, params, use_tqdm=False)
    for right, got in zip(plain, drafted, strict=True):
        assert len(got.outputs[0].logprobs) == 12 and len(got.prompt_logprobs) == len(got.prompt_token_ids)
        assert got.prompt_logprobs[0] is None and right.prompt_logprobs[0] is None  # nothing predicts the first token
        rows = zip(
            [*got.outputs[0].logprobs, *got.prompt_logprobs[1:]],
            [*right.outputs[0].logprobs, *right.prompt_logprobs[1:]],
            strict=True,
        )
        for mine, theirs in rows:
            assert mine.keys() == theirs.keys() and mine
            assert all(abs(mine[t].logprob - theirs[t].logprob) < 1e-4 for t in mine)


def test_the_trace_tells_the_tree_and_the_way_through_it(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config=tree(tiny.draft))
    with llm.trace() as trace:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    proposed = None
    for event in trace:
        if isinstance(event, DraftProposed):
            proposed = event
        if isinstance(event, TokensCommitted) and event.num_drafts:
            assert proposed is not None and proposed.parents is not None and event.path is not None
            assert [proposed.parents[node] for node in event.path] == [-1, *event.path][: len(event.path)]
            kept = [token for token, origin in zip(event.token_ids, event.origins, strict=True) if origin == "accepted"]
            assert [proposed.token_ids[node] for node in event.path][: len(kept)] == kept
    total = AcceptanceState().fold_all(trace).total()
    assert total.gained == 29 and total.num_accepted == sum(
        r.num_accepted for r in total.rounds
    )  # the first is the prefill's


class Odd(Drafter):
    """Proposes whatever it is told to."""

    draft = Draft([])

    def propose(self, requests: Any, num_drafts: Any) -> list[Draft]:
        return [self.draft if k > 1 else Draft([]) for k in num_drafts]


@pytest.mark.parametrize("parents", [[-1, 1], [-1], [0, -1]])
def test_a_tree_that_is_none_is_refused_and_the_engine_goes_on(tiny: TinyPair, parents: list[int]) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": Odd, "num_speculative_tokens": 4})
    llm.engine.drafter.draft = Draft([1, 2], parents=parents)
    with pytest.raises(DraftError, match="draft tree"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    llm.engine.drafter.draft = Draft([1, 2], parents=[-1, -1])
    assert tokens(llm) == tokens(LLM(str(tiny.target)))


def test_more_guesses_than_asked_for_are_refused(tiny: TinyPair) -> None:
    class Eager(Drafter):
        def propose(self, requests: Any, num_drafts: Any) -> list[Draft]:
            return [Draft([1] * (k + 1)) for k in num_drafts]

    llm = LLM(str(tiny.target), speculative_config={"method": Eager, "num_speculative_tokens": 4})
    with pytest.raises(DraftError, match="Eager proposed 5 drafts where at most 4"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(("drafts", "words"), [([Draft([10**7])], "drafted token 10000000"), ([], "0 drafts for 1")])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_what_cannot_be_a_draft_is_refused_before_the_forward(
    tiny: TinyPair, drafts: list[Draft], words: str, eager: bool
) -> None:
    class Wrong(Drafter):
        def propose(self, requests: Any, num_drafts: Any) -> list[Draft]:
            return drafts

    llm = LLM(str(tiny.target), enforce_eager=eager, speculative_config={"method": Wrong, "adaptive": False})
    with pytest.raises(DraftError, match=words):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


def test_a_model_with_a_sliding_window_has_no_trees(tiny: TinyPair, tmp_path: Path) -> None:
    target = target_of(tmp_path, 1, sliding_window=6)
    with pytest.raises(UnsupportedError, match=r"'draft_tree' drafts trees, .* sliding window \(here 6 tokens\)"):
        LLM(target, speculative_config={"method": "draft_tree", "model": target})
    with pytest.raises(UnsupportedError, match=r"the draft model .* sliding window \(here 6 tokens\)"):
        LLM(target_of(tmp_path / "whole", 1), speculative_config={"method": "draft_tree", "model": target})
    llm = LLM(target, speculative_config={"method": Odd, "num_speculative_tokens": 4})
    llm.engine.drafter.draft = Draft([1, 2], parents=[-1, -1])
    with pytest.raises(UnsupportedError, match=r"Odd drafted a tree, .* sliding window"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


def test_layouts_that_keep_no_tree_say_so(tiny: TinyPair) -> None:
    with pytest.raises(UnsupportedError, match="'draft_tree' drafts trees, which cache layout 'contiguous'"):
        LLM(str(tiny.target), kv_cache_config={"layout": "contiguous"}, speculative_config=tree(tiny.draft))
    llm = LLM(
        str(tiny.target), kv_cache_config={"layout": "contiguous"},
        speculative_config={"method": Odd, "num_speculative_tokens": 4},
    )  # fmt: skip
    llm.engine.drafter.draft = Draft([1, 2], parents=[-1, -1])
    with pytest.raises(UnsupportedError, match="Odd drafted a tree, which ContiguousKVCache cannot verify"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


def test_a_tree_grows_level_by_level_and_stops_at_its_budget() -> None:
    grown = DraftTree(Request("a", "", [1], 1, SamplingParams(), 8, 0), TreeShape.from_branching((2, 2)).cut(5))
    assert grown.can_grow and grown.num_wanted(-1) == 2
    grown.grow([[10, 11, 12]], [[]])
    assert (grown.token_ids, grown.parents, grown.last_level) == ([10, 11], [-1, -1], [0, 1])
    grown.grow([[20, 21], [22, 23]], [[], []])
    assert (grown.token_ids, grown.parents) == ([10, 11, 20, 21, 22], [-1, -1, 0, 0, 1])
    assert grown.last_level == [2, 3, 4] and not grown.can_grow
    assert grown.path_to(3) == [10, 21] and grown.draft.probs is None


def test_a_tree_grows_into_a_shape_of_any_order_and_without_children_that_are_missing() -> None:
    """The shape's second node is a grandchild; the tree is built level by level all the same."""
    shape = TreeShape((-1, 0, -1, 1, 2, 0))
    grown = DraftTree(Request("a", "", [1], 1, SamplingParams(), 8, 0), shape)
    grown.grow([[10, 11]], [[]])
    assert [grown.num_wanted(node) for node in grown.last_level] == [2, 1]
    grown.grow([[20], [21]], [[], []])  # the draft model has no second child
    assert (grown.token_ids, grown.parents) == ([10, 11, 20, 21], [-1, -1, 0, 1])
    assert [grown.num_wanted(node) for node in grown.last_level] == [1, 0]
    grown.grow([[30], []], [[], []])
    assert (grown.token_ids, grown.parents, grown.can_grow) == ([10, 11, 20, 21, 30], [-1, -1, 0, 1, 2], False)


@pytest.mark.parametrize("shape", [{"tree_branching": (2, 2)}, {"tree_shape": "measured", "tree_nodes": 6}], ids=str)
def test_more_drafts_than_nodes_are_refused(tiny: TinyPair, shape: dict[str, Any]) -> None:
    options = {"method": "draft_tree", "model": str(tiny.draft), "num_speculative_tokens": 6, **shape}
    assert LLM(str(tiny.target), speculative_config=options).engine.drafter.max_drafts == 6
    with pytest.raises(ConfigError, match="num_speculative_tokens=7 is more than this DraftTreeDrafter can propose"):
        LLM(str(tiny.target), speculative_config={**options, "num_speculative_tokens": 7})
