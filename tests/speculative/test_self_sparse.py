"""The target drafts from a part of its own cache: whatever it reads and writes there, the tokens are the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Batch, Segment
from minillm.cache.paged import PagedKVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative import self_sparse
from minillm.speculative.self_sparse import (
    SelfSparseDrafter,
    SelfSparseOptions,
    most_attended,
    sink_and_newest,
)
from minillm.trace import BlocksShared, DraftProposed, RequestPreempted, TokensCommitted
from tests.cache.steps import small_config
from tests.conftest import TinyPair
from tests.speculative.self_drafting import (
    GREEDY,
    PROMPTS,
    an_interrupt_after_drafting_leaves_nothing_behind,
    cache_is_that_of_a_plain_run,
    follows_the_target_unless_drafts_are_drawn_cooler,
    stops_completions_aborts_and_later_requests_are_plain,
    survives_preemption_prefix_sharing_and_chunks,
    tokens,
)

LAYOUTS = ["sinks", "snapkv"]


def sparse(layout: str = "sinks", budget: int = 8, **options: Any) -> dict[str, Any]:
    return {"method": "self_sparse", "sparse_layout": layout, "budget": budget, **options}


# --------------------------------------------------------------------------------------------- through the engine


@pytest.mark.parametrize("eager", [True, False], ids=["pytorch", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_greedy_tokens_are_the_plain_ones(tiny: TinyPair, block_size: int, layout: str, eager: bool) -> None:
    target = str(tiny.target) if eager else "minicoder"
    options: dict[str, Any] = {"block_size": block_size, "enforce_eager": eager}
    llm = LLM(target, speculative_config=sparse(layout, 2 * block_size), **options)
    assert (llm.engine.runner.executor is None) == eager
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(target, **options))
    judged = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert 0 < sum(e.num_accepted for e in judged) < sum(e.num_drafts for e in judged)  # so there was much to undo


@pytest.mark.parametrize("eager", [True, False], ids=["pytorch", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_budget_for_the_whole_context_accepts_every_draft(tiny: TinyPair, layout: str, eager: bool) -> None:
    """Catches a position or slot that is one off, a block that is forgotten, and keys left behind by another round:
    then the draft would see other keys than the target, and some draft would be rejected."""
    target = str(tiny.target) if eager else "minicoder"
    plain = LLM(target, enforce_eager=eager, block_size=4)
    longest = max(len(plain.engine.tokenizer.encode(p)) for p in PROMPTS) + GREEDY.max_tokens
    llm = LLM(target, enforce_eager=eager, block_size=4, speculative_config=sparse(layout, longest))
    with llm.trace() as trace:
        assert tokens(llm) == tokens(plain)
    rounds = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert rounds and all(e.num_accepted == e.num_drafts for e in rounds)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_preemption_prefix_sharing_and_chunks(tiny: TinyPair, layout: str, sampled: bool) -> None:
    survives_preemption_prefix_sharing_and_chunks(tiny, sparse(layout), sampled)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_caches_are_views_too(layout: str, kv_cache_dtype: str) -> None:
    """Compiled, where a token is the same to the last bit in any company."""
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "block_size": 16}
    llm = LLM("minicoder", speculative_config=sparse(layout, 20), **options)
    assert llm.engine.runner.executor is not None
    assert tokens(llm) == tokens(LLM("minicoder", **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stops_completions_aborts_and_requests_that_come_later(tiny: TinyPair, layout: str) -> None:
    stops_completions_aborts_and_later_requests_are_plain(tiny, sparse(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_holds_what_a_plain_run_would_have_put_there(tiny: TinyPair, layout: str) -> None:
    cache_is_that_of_a_plain_run(tiny, sparse(layout))


def test_there_is_no_second_cache(tiny: TinyPair) -> None:
    llm, plain = LLM(str(tiny.target), speculative_config=sparse(budget=40)), LLM(str(tiny.target))
    assert llm.engine.drafter.runner is llm.engine.runner
    assert llm.engine.runner.cache.num_bytes == plain.engine.runner.cache.num_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_text_follows_the_target(tiny: TinyPair, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A χ² test; a correct engine fails with probability 1e-6 over the engine's seed."""
    config = sparse(layout, budget=5, num_speculative_tokens=2)
    follows_the_target_unless_drafts_are_drawn_cooler(tiny, config, monkeypatch, block_size=1)


def test_a_request_may_share_a_block_in_the_step_that_drafts_into_it(tiny: TinyPair) -> None:
    """The last token of the first request fills a block: its hash is known before the drafts overwrite its slot, and
    the second request reads it in the same forward in which the verification stores it."""
    plain = LLM(str(tiny.target), block_size=4, enable_prefix_caching=False)
    llm = LLM(str(tiny.target), block_size=4, speculative_config=sparse())
    [first] = llm.submit([PROMPTS[2]], GREEDY)
    while first.num_tokens % 4 or not first.is_decoding:
        llm.engine.step()
    longer = [*first.token_ids, 7, 8]
    [second] = llm.submit([{"prompt_token_ids": longer}], GREEDY)
    with llm.trace() as trace:
        llm.engine.step()
    [shared] = trace.of(BlocksShared)
    assert len(shared.block_ids) * 4 == len(longer) - 2 and trace.of(DraftProposed)
    while llm.engine.has_requests:
        llm.engine.step()
    right = plain.generate([PROMPTS[2], {"prompt_token_ids": longer}], GREEDY, use_tqdm=False)
    assert [one.output_token_ids for one in (first, second)] == [o.outputs[0].token_ids for o in right]


def test_an_interrupt_between_drafting_and_verifying_leaves_nothing_behind(tiny: TinyPair) -> None:
    an_interrupt_after_drafting_leaves_nothing_behind(tiny, sparse())


class TrustsDrafts(PagedKVCache):
    """A planted mistake: what a draft step stored counts as computed, so the verification does not store it again."""

    drafting = False
    drafted: set[int] = set()  # noqa: RUF012

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        slots = batch.slot_mapping.tolist()
        if self.drafting:
            self.drafted = self.drafted | set(slots)
            return super().attend(layer, q, k, v, batch)
        kept = [i for i, slot in enumerate(slots) if slot in self.drafted]
        k, v = k.clone(), v.clone()
        k[kept], v[kept] = self.keys[layer, batch.slot_mapping[kept]], self.values[layer, batch.slot_mapping[kept]]
        if layer == len(self.keys) - 1:
            self.drafted = set()
        return super().attend(layer, q, k, v, batch)


def test_drafts_that_count_as_computed_are_seen(tiny: TinyPair) -> None:
    llm = LLM(
        str(tiny.target), block_size=4, kv_cache_config={"layout": TrustsDrafts}, speculative_config=sparse()
    )  # fmt: skip
    cache, real = llm.engine.runner.cache, llm.engine.drafter.propose

    def propose(*args: Any) -> Any:
        cache.drafting = True
        drafts = real(*args)
        cache.drafting = False
        return drafts

    right = tokens(LLM(str(tiny.target), block_size=4))
    llm.engine.drafter.propose = propose
    assert tokens(llm) != right
    with pytest.raises(AssertionError):
        cache_is_that_of_a_plain_run(tiny, sparse(), llm)


# ---------------------------------------------------------------------------------------------- what a draft reads


def drafter(layout: str = "sinks", budget: int = 12, block_size: int = 4) -> SelfSparseDrafter:
    runner = ModelRunner.__new__(ModelRunner)
    runner.block_size = block_size
    return SelfSparseDrafter(runner, SelfSparseOptions(layout, budget))


def a_request(num_tokens: int, block_size: int = 4) -> Request:
    one = Request("a", "", list(range(num_tokens)), 1, SamplingParams(), 99, 0)
    one.block_table = [(7 * i + 3) % 211 for i in range((num_tokens + 2) // block_size + 1)]
    return one


def view_is_right(segment: Segment, request: Request, size: int, most: int) -> None:
    """The last token has its own slot and its own position; whole blocks of the request come before it, in order."""
    last, table = request.num_tokens - 1, request.block_table
    assert segment.token_ids == request.token_ids[-1:] and segment.num_logits == 1
    assert segment.start + segment.num_skipped == last
    slot = segment.block_table[segment.start // size] * size + segment.start % size
    assert slot == table[last // size] * size + last % size
    first = segment.start // size  # of the blocks from the last token's on
    assert segment.block_table[first:] == table[last // size :]
    old = [table.index(block) for block in segment.block_table[:first]]
    assert old == sorted(set(old)) and len(old) == min(last // size, most - 1)
    if old:
        assert old[-1] == last // size - 1 or len(old) == 1  # the newest block before it


@given(st.integers(1, 200), st.sampled_from([1, 3, 4, 16]), st.integers(1, 40), st.sampled_from(LAYOUTS))
def test_a_view_has_the_newest_blocks_and_true_positions(tokens: int, size: int, over: int, layout: str) -> None:
    one, request = drafter(layout, size + over, size), a_request(tokens, size)
    one._ranking[request] = [i * 5 % 17 for i in range(17) if (tokens - 1) // size > 17]
    view_is_right(one.first_segment(request), request, size, -(-(size + over) // size))


PLANTED: dict[str, Callable[[Segment], Segment]] = {
    "positions are those of the view": lambda s: replace(s, num_skipped=0),
    "positions are one late": lambda s: replace(s, num_skipped=s.num_skipped + 1),
    "the window ends one block early": lambda s: replace(
        s, block_table=[s.block_table[0], 1, *s.block_table[2:-1]], start=s.start
    ),
    "the newest block is left out": lambda s: replace(
        s, block_table=[*s.block_table[:1], *s.block_table[2:]], start=s.start - 4, num_skipped=s.num_skipped + 4
    ),
    "the request's whole table": lambda s: replace(s, block_table=a_request(50).block_table),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_wrong_view_is_seen(mistake: str) -> None:
    request = a_request(50)
    right = drafter().first_segment(request)
    view_is_right(right, request, 4, 3)
    with pytest.raises((AssertionError, ValueError)):
        view_is_right(PLANTED[mistake](right), request, 4, 3)


def test_sinks_and_window() -> None:
    assert sink_and_newest(5, 5) == [0, 1, 2, 3, 4]
    assert sink_and_newest(9, 5) == [0, 5, 6, 7, 8]
    assert sink_and_newest(9, 1) == [0]
    assert sink_and_newest(0, 3) == []


def test_the_most_attended_blocks_and_window() -> None:
    assert most_attended([0, 7, 4, 19, 2], 20, 6) == [0, 4, 7, 17, 18, 19]
    assert most_attended([0, 7], 20, 6) == [0, 7, 16, 17, 18, 19]  # two are ranked: the newest take the rest
    assert most_attended([], 20, 3) == [17, 18, 19]
    assert most_attended([3, 1], 4, 4) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------- snapkv


@pytest.mark.parametrize("needle", [3, 9])
def test_the_block_with_the_needle_is_chosen(needle: int) -> None:
    """One key of one block, in one layer and KV head, answers to the last query of the prompt."""
    torch.manual_seed(1)
    config = small_config(head_dim=16)
    cache = PagedKVCache(config, 40, 4, torch.float32, torch.device("cpu"))
    cache.keys.normal_()
    runner = ModelRunner.__new__(ModelRunner)
    runner.cache, runner.block_size = cache, 4
    runner.model = type("Model", (), {"config": config})()
    request = Request("a", "", list(range(62)), 62, SamplingParams(), 99, 0)
    request.block_table = [(11 * i + 5) % 40 for i in range(16)]
    queries = torch.randn(config.num_layers, 5, config.num_heads, 16) / 4
    cache.keys[1, request.block_table[needle] * 4 + 2, 1] = 40 * queries[1, -1, 3]
    one = SelfSparseDrafter(runner, SelfSparseOptions("snapkv", 12))
    one.observe(request, queries)
    request.token_ids += [0] * 20
    assert needle in one.chosen_blocks(request, 20)
    one.request_dropped(request)
    assert needle not in one.chosen_blocks(request, 20)
    assert needle not in SelfSparseDrafter(runner, SelfSparseOptions("sinks", 12)).chosen_blocks(request, 20)


def test_the_drafter_is_shown_the_queries_of_the_prompts_end(tiny: TinyPair) -> None:
    """In chunks, beside others, and after a preemption too: those of the last tokens before the first draft."""
    options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 22, "max_num_batched_tokens": 12, "max_num_seqs": 4}
    llm = LLM(str(tiny.target), speculative_config=sparse("snapkv"), **options)
    fresh, shown = LLM(str(tiny.target), block_size=256, num_kv_blocks=1).engine.runner, []

    def observe(request: Request, queries: Tensor) -> None:
        count = request.num_tokens
        _, _, right = fresh.run_observed([Segment(request.token_ids, 0, [0])], range(count - queries.shape[1], count))
        assert torch.allclose(queries, right, atol=1e-4)
        shown.append(request.num_tokens - request.num_prompt_tokens)

    llm.engine.drafter.observe = observe
    with llm.trace() as trace:
        tokens(llm)
    assert shown.count(0) == len(PROMPTS) and trace.of(RequestPreempted) and max(shown) > 0


# ------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget=0.*at least 1"),
        ({"budget": 16}, "budget=16 must be above block_size=16.*raise budget or lower block_size"),
        ({"sparse_layout": "window"}, "sparse_layout='window' must be 'sinks' or 'snapkv'"),
        ({"draft_sample_method": "random"}, "draft_sample_method='random'"),
        ({"model": "minicoder-draft"}, "model='minicoder-draft'.*'self_sparse'"),
    ],
    ids=str,
)
def test_bad_options_name_themselves(tiny: TinyPair, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny.target), speculative_config={"method": "self_sparse", **options})


def test_layouts_without_blocks_are_refused(tiny: TinyPair) -> None:
    with pytest.raises(UnsupportedError, match=r"'self_sparse' reads the blocks.*'window' stores each request"):
        LLM(str(tiny.target), kv_cache_config={"layout": "window"}, speculative_config=sparse())


def test_a_cache_that_hides_its_keys_is_refused_by_snapkv(tiny: TinyPair) -> None:
    class Own(PagedKVCache):
        def attend(self, *args: Any) -> Tensor:
            return super().attend(*args)

    options: dict[str, Any] = {"kv_cache_config": {"layout": Own}, "block_size": 4}
    with pytest.raises(UnsupportedError, match="reads the target's keys, and cache layout 'Own' stores them"):
        LLM(str(tiny.target), speculative_config=sparse("snapkv"), **options)
    assert tokens(LLM(str(tiny.target), speculative_config=sparse(), **options)) == tokens(
        LLM(str(tiny.target), block_size=4)
    )


def test_default_drafts_and_budget_are_magicdecs() -> None:
    assert SelfSparseDrafter.default_num_drafts(SelfSparseOptions()) == 3
    assert drafter(budget=257, block_size=1).chosen_blocks(a_request(1000, 1), 999) == [0, *range(744, 999)]


def test_a_text_that_can_be_repeated_does_not_depend_on_what_was_observed(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the queries of a prompt's end say depends on how the prompt was cut, and on what was cached."""
    real, asked = self_sparse.most_attended, []
    monkeypatch.setattr(self_sparse, "most_attended", lambda *args: asked.append(args) or real(*args))
    options = {"method": "self_sparse", "sparse_layout": "snapkv", "budget": 16, "num_speculative_tokens": 2}
    llm = LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=options)
    prompt = {"prompt_token_ids": [1 + i % 290 for i in range(60)]}
    seeded = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate(prompt, seeded, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    assert first == second and not asked
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert asked
