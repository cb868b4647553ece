"""Lesson 12: the references agree with the engine, with brute force, and with the figures that the lesson quotes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm import LLM
from minillm.batch import Segment
from minillm.cache.paged_two_level import PagedTwoLevelKVCache
from minillm.errors import LessonError
from minillm.models.config import ModelConfig
from minillm.speculative.self_sparse import most_attended, sink_and_newest
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l12_long_context import (
    break_even_context,
    sink_view,
    snapkv_blocks,
    step_seconds,
    two_levels,
)
from minillm.teaching.variants.l10_to_l15 import MAKERS
from minillm.teaching.variants.random_numbers import Draw
from minillm.teaching.workshop import l12_broken as broken
from minillm.teaching.workshop import l12_costs as costs
from minillm.teaching.workshop import l12_levels as levels
from minillm.teaching.workshop import l12_views as views
from minillm.teaching.workshop.l12_costs import H100, LLAMA_8B, Machine, Shape
from tests.cache.steps import small_config
from tests.conftest import TinyPair

PROMPTS = [[1 + i % 7 for i in range(29)], [3 + i * i % 11 for i in range(23)]]
SMALL = Shape(parameters=100.0, weight_bytes=200.0, kv_bytes=4.0, attention_flops=8.0)


def test_the_break_even_context_of_the_lesson():
    """About 2.1 thousand tokens for Llama-3.1-8B on an H100 with four drafts."""
    assert break_even_context(5, LLAMA_8B, H100) == pytest.approx(2080, abs=1)


@settings(max_examples=40)
@given(rows=st.integers(1, 9), flops=st.floats(100, 1e5), bandwidth=st.floats(1, 1e3))
def test_break_even_is_where_a_huge_batch_changes_sides(rows: int, flops: float, bandwidth: float):
    machine, huge = Machine(flops, bandwidth), 10**9
    context = break_even_context(rows, SMALL, machine)

    def waits_for_memory(tokens: float) -> bool:
        read = (SMALL.weight_bytes + huge * tokens * SMALL.kv_bytes) / bandwidth
        return step_seconds(huge, rows, tokens, SMALL, machine) == pytest.approx(read)

    if math.isinf(context):
        assert not waits_for_memory(1e9)
    else:
        assert waits_for_memory(context * 1.01) and not waits_for_memory(context * 0.99)


@settings(max_examples=40)
@given(batch=st.integers(1, 64), rows=st.integers(1, 9), context=st.integers(0, 10_000))
def test_a_step_never_gets_shorter_with_more_work(batch: int, rows: int, context: int):
    one = step_seconds(batch, rows, context, LLAMA_8B, H100)
    for more in ((batch + 1, rows, context), (batch, rows + 1, context), (batch, rows, context + 1)):
        assert step_seconds(*more, LLAMA_8B, H100) >= one


def test_beyond_the_break_even_context_drafts_gain_more_with_more_requests():
    gains = [costs.speed_up(step_seconds, 3.4, 3, batch, 8192, 257, LLAMA_8B, H100) for batch in (1, 8, 32)]
    assert gains == sorted(gains) and gains[0] < 1.1 and gains[-1] > 1.5


def test_the_speed_up_is_the_formula_of_magicdec():
    seconds = {1: 2.0, 4: 3.0}

    def fixed(batch: int, rows: int, context: float, shape: Shape, machine: Machine) -> float:
        return seconds[rows] * (0.25 if context == 257 else 1.0)

    assert costs.speed_up(fixed, 3.0, 3, 8, 4096, 257, LLAMA_8B, H100) == pytest.approx(3.0 * 2.0 / (3 * 0.5 + 3.0))
    assert costs.speed_up(fixed, 3.0, 3, 8, 100, 257, LLAMA_8B, H100) == pytest.approx(3.0 * 2.0 / (3 * 2.0 + 3.0))


def test_what_fits_beside_the_weights():
    most = costs.most_context(32, LLAMA_8B, H100)
    weights = 16.06e9  # with the input embedding, which is stored and hardly read
    assert weights + 32 * most * LLAMA_8B.kv_bytes <= 80e9
    assert weights + 32 * (most + 1) * LLAMA_8B.kv_bytes > 80e9
    assert LLAMA_8B.weight_bytes + LLAMA_8B.embedding_bytes == weights


def test_kinds_of_drafts_read_what_the_lesson_says():
    read = {kind.name.partition("(")[2].rstrip(")"): kind.read(32, 15_000) for kind in costs.DRAFT_KINDS}
    plain = LLAMA_8B.weight_bytes + 32 * 15_000 * LLAMA_8B.kv_bytes
    plain_step = costs.DRAFT_KINDS[0]
    assert plain_step.read(32, 15_000) == plain
    assert read["MagicDec"] == LLAMA_8B.weight_bytes + 32 * 257 * LLAMA_8B.kv_bytes
    assert read["QuantSpec"] == pytest.approx(plain * 4.25 / 16)
    assert read["LongSpec"] < read["SPIRe"] < read["MagicDec"] < read["QuantSpec"] < plain
    layers = 1 - costs.UNEMBEDDING_SHARE
    assert pytest.approx(layers / 32) == costs.LAYER_SHARE and 0.06 < costs.UNEMBEDDING_SHARE < 0.08
    config = ModelConfig(128_256, 4096, 14_336, 32, 32, 8, 128, 8192)
    assert Shape.of(config, 2).weight_bytes == pytest.approx(LLAMA_8B.weight_bytes, rel=1e-3)


def test_the_shape_of_a_model_counts_what_a_step_reads(tiny: TinyPair):
    llm = LLM(str(tiny.target), enforce_eager=True, num_kv_blocks=8)
    model = llm.engine.runner.model
    config = model.config
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    shape = costs.Shape.of(config, 2)
    assert shape.parameters == matrices - embeddings + config.vocab_size * config.hidden_size
    assert shape.weight_bytes == 2 * shape.parameters
    assert shape.kv_bytes == 2 * config.num_layers * config.kv_size * 2


@settings(max_examples=60)
@given(newest=st.integers(0, 12), most=st.integers(1, 12), size=st.integers(1, 5), offset=st.integers(0, 4))
def test_views_are_those_of_the_engine(newest: int, most: int, size: int, offset: int):
    table = [100 + 7 * i % 97 for i in range(newest + 2)]
    num_tokens = newest * size + offset % size + 1
    mine, start, left_out = sink_view(table, num_tokens, size, most)
    kept = sink_and_newest(newest, most)
    assert mine == [*(table[i] for i in kept), *table[newest:]]
    assert start + left_out == num_tokens - 1 and start // size == len(kept)


@settings(max_examples=40)
@given(data=st.data(), size=st.integers(1, 4), count=st.integers(1, 10), most=st.integers(1, 10))
def test_chosen_blocks_are_those_of_the_engine(data: st.DataObject, size: int, count: int, most: int):
    """For a text that has not outgrown its prompt; behind it the engine prefers newer blocks, the exercise older."""
    n = count * size + data.draw(st.integers(0, size - 1))
    weights = data.draw(st.lists(st.integers(0, 99), min_size=2 * n, max_size=2 * n))
    attention = torch.tensor(weights).view(2, n) / 128
    padded = torch.nn.functional.pad(attention.sum(0), (0, -n % size)).view(-1, size).sum(1)
    ranking = padded.argsort(descending=True, stable=True).tolist()
    assert snapkv_blocks(attention, size, count, most) == most_attended(ranking, count, most)


def test_codes_are_those_of_the_engine():
    config = small_config()
    x = torch.randn(7, config.num_kv_heads, config.head_dim, generator=torch.Generator().manual_seed(3)) * 3
    arguments: Any = (config, 4, 4, torch.float32, torch.device("cpu"))
    mine, theirs = levels.layout_with(two_levels)(*arguments), PagedTwoLevelKVCache(*arguments)
    for a, b in zip(mine.encode(x), theirs.encode(x), strict=True):
        assert torch.equal(a, b)
    wrong = levels.layout_with(lambda x, scale, zero: tuple(c * 0 for c in two_levels(x, scale, zero)))(*arguments)
    assert not torch.equal(wrong.encode(x)[0], theirs.encode(x)[0])


def test_both_levels_are_within_a_sixteenth_of_a_step_and_the_upper_within_a_half():
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(0)) * 15
    upper, lower = two_levels(x, torch.ones(64, 1), torch.zeros(64, 1))
    assert (x - upper).abs().max() <= 0.5 and (x - upper - lower / 16).abs().max() <= 1 / 16 + 1e-6


def _without_the_last(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = two_levels(x, scale, zero)
    lower[..., -1] = 0
    return upper, lower


def _limited_as_int8(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Right for every x from zero to zero + 15 scale: only a rest of more than 8 steps does not fit into an int8."""
    steps = (x - zero) / scale
    upper = steps.round().clamp(0, 15)
    return upper.to(torch.int8), ((steps - upper) * 16).round().to(torch.int8).clamp(-8, 7)


def test_hidden_numbers_are_in_the_promised_range_and_an_answer_right_in_it_passes():
    draws = [Draw(b"secret", "student", "l12.two_levels", number) for number in range(6)]
    for x, scale, zero in (MAKERS["l12.two_levels"](draw).args for draw in draws):
        steps = (x - zero) / scale
        assert steps.min() > -0.5 and steps.max() < 15.5
        assert all(map(torch.equal, _limited_as_int8(x, scale, zero), two_levels(x, scale, zero)))


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        (
            "step_seconds",
            lambda *a: step_seconds(*a[:3], replace(a[3], weight_bytes=0.0), a[4]),
            "leaves out the weights",
        ),
        ("step_seconds", lambda *a: 2 * step_seconds(*a), "is too long"),
        (
            "break_even_context",
            lambda rows, shape, machine: shape.weight_bytes / shape.kv_bytes,
            "as large as the weights",
        ),
        ("break_even_context", lambda *a: break_even_context(*a) / 3, "both take the same time"),
        ("sink_view", lambda *a: (*sink_view(*a)[:2], 0), "says that nothing was left out"),
        ("sink_view", lambda table, n, size, most: (table, n, 0), "give position"),
        ("snapkv_blocks", lambda a, size, count, most: list(range(min(count, most))), "belongs to the window"),
        ("snapkv_blocks", lambda a, size, count, most: [0] * most, "in the list twice"),
        ("two_levels", lambda x, s, z: (two_levels(x, s, z)[0], two_levels(x, s, z)[1] + 8), "as 0 … 15"),
        ("two_levels", lambda x, s, z: tuple(c * 3 for c in two_levels(x, s, z)), "four bits hold"),
        ("two_levels", _without_the_last, "the tensor of lower codes is wrong only at the end"),
        ("two_levels", lambda x, s, z: two_levels(x, s * s, z), "codes are wrong: write down (x - zero) / scale"),
    ],
)
def test_likely_wrong_answers_are_named(name: str, answer, cause: str):
    result = check_function(f"l12.{name}", answer)
    assert not result.passed and cause in str(result), str(result)


# ------------------------------------------------------------------------------------------------------- the workshop


def engine(tiny: TinyPair, method: Any = views.ViewDrafter, **options: Any) -> LLM:
    given = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **options}
    return LLM(str(tiny.target), num_kv_blocks=64, block_size=4, enforce_eager=True, speculative_config=given)


def sinks(most: int) -> views.View:
    return lambda block_table, num_tokens, attention: sink_view(block_table, num_tokens, 4, most)


def test_the_whole_cache_accepts_everything_and_no_view_changes_the_text(tiny: TinyPair):
    llm = engine(tiny)
    whole = views.draft_with(llm, PROMPTS, views.whole, 3, 12)
    few = views.draft_with(llm, PROMPTS, sinks(1), 3, 12)
    accepted, judged = few.counts
    assert few.alpha == accepted / judged and 0 <= accepted <= judged
    assert whole.alpha == 1 and whole.rates == [1.0, 1.0]
    assert few.alpha < 1 and few.run.outputs == whole.run.outputs
    assert min(few.rates) <= few.alpha <= max(few.rates)
    assert len(few.first_draft) == 3


@pytest.mark.parametrize("layout", ["sinks", "snapkv"])
def test_drafts_are_those_of_self_sparse(tiny: TinyPair, layout: str):
    most = 3
    view = sinks(most) if layout == "sinks" else views.chosen(snapkv_blocks, 4, most)
    mine = views.draft_with(engine(tiny), PROMPTS, view, 3, 10)
    theirs = views.draft_with(
        engine(tiny, "self_sparse", sparse_layout=layout, budget=4 * (most + 1)), PROMPTS, None, 3, 10
    )
    assert mine.run.outputs == theirs.run.outputs
    if layout == "sinks":  # behind the prompt, snapkv differs in what it takes if too few blocks are ranked
        assert mine.rates == theirs.rates


def test_attention_is_observed_once_and_sums_to_one_per_query_head_and_layer(tiny: TinyPair):
    llm = engine(tiny)
    views.draft_with(llm, PROMPTS[:1], views.whole, 3, 4)
    attention = llm.engine.drafter.attention[tuple(PROMPTS[0])]
    config = llm.engine.runner.model.config
    assert attention.shape == (min(32, len(PROMPTS[0])), len(PROMPTS[0]))
    assert attention.sum(1).tolist() == pytest.approx([config.num_layers * config.num_heads] * len(attention), rel=1e-4)
    assert attention[0, 1 + len(PROMPTS[0]) - len(attention) :].abs().max() == 0, "a query sees nothing behind itself"
    views.draft_with(llm, PROMPTS[:1], views.whole, 3, 4)  # now from the prefix cache, with fewer queries
    assert llm.engine.drafter.attention[tuple(PROMPTS[0])] is attention


def test_the_blocks_that_were_read_are_recorded_as_indices(tiny: TinyPair):
    llm = engine(tiny)
    views.draft_with(llm, PROMPTS[:1], sinks(2), 3, 4)
    newest = len(PROMPTS[0]) // 4
    assert llm.engine.drafter.read[0][:3] == [0, newest - 1, newest]


def test_mistakes_in_drafting_keep_the_text_and_one_in_verifying_does_not(tiny: TinyPair):
    llm = engine(tiny)
    runner, drafter = llm.engine.runner, llm.engine.drafter
    found = {}
    for name, mistake in broken.MISTAKES.items():
        with mistake(llm, sinks(1), 3) as view:
            found[name] = views.draft_with(llm, PROMPTS, view, 3, 9)
        assert "run" not in vars(runner) and "draft_argmax" not in vars(drafter), f"{name} is undone"
        llm.reset_prefix_cache()
    right = found.pop("right").run.outputs
    sparse = found.pop("verifies over the view")
    assert all(accepted.run.outputs == right for accepted in found.values())
    assert sparse.run.outputs != right and sparse.alpha == 1


def test_in_a_window_of_one_token_each_draft_takes_the_slot_of_the_one_before(tiny: TinyPair):
    llm = engine(tiny)
    drafter, asked = llm.engine.drafter, []
    with broken.short_window(llm, views.whole, 3):
        drafter.runner.draft = lambda segments, count: asked.extend(segments) or [[9]] * len(segments)
        assert drafter.draft_argmax([Segment([7], 12, [1, 2, 3, 4])], [3]) == [[9, 9, 9]]
    assert [segment.start for segment in asked] == [12] * 3
    assert [segment.start + segment.num_skipped for segment in asked] == [12, 13, 14], "the positions are right"
    assert [segment.token_ids for segment in asked] == [[7], [9], [9]]


def test_a_stale_view_goes_on_behind_the_rejected_drafts():
    asked: list[int] = []

    def remember(block_table: list[int], num_tokens: int, attention: torch.Tensor | None) -> tuple[list[int], int, int]:
        asked.append(num_tokens)
        return block_table, num_tokens - 1, 0

    stale = broken.StaleView(remember, 3, 4)
    for table, num_tokens in (([1, 2, 3, 4], 10), ([1, 2, 3, 4], 11), ([1, 2, 3, 4, 5], 15), ([9, 8, 7, 6], 10)):
        stale(table, num_tokens, None)
    assert asked == [10, 13, 15, 10], "two rejected drafts, none, and another request"


def test_log_probs_and_their_divergence(tiny: TinyPair):
    llm = LLM(str(tiny.target), num_kv_blocks=16, block_size=4, enforce_eager=True)
    rows = levels.log_probs(llm, PROMPTS[0])
    assert rows.shape == (29, llm.engine.runner.model.config.vocab_size)
    assert rows.exp().sum(-1).tolist() == pytest.approx([1.0] * 29, rel=1e-4)
    assert levels.mean_kl(rows, rows) == 0
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert levels.mean_kl(p, q) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2))


def test_times_of_the_three_forwards_leave_a_working_engine(tiny: TinyPair):
    llm = engine(tiny)
    before = views.draft_with(llm, PROMPTS, sinks(1), 3, 6).run.outputs
    taken = views.step_times(llm, PROMPTS[0], sinks(1), 3)
    assert min(taken.plain, taken.draft, taken.verify) > 0
    assert views.draft_with(llm, PROMPTS, sinks(1), 3, 6).run.outputs == before


def test_prompts_and_the_far_definition_come_from_held_out_files():
    llm = LLM("minicoder", num_kv_blocks=8, enforce_eager=True)
    prompts = views.long_prompts(llm, 2, 50)
    assert [len(ids) for ids in prompts] == [50, 50] and prompts[0] != prompts[1]
    with pytest.raises(LessonError, match="there are no 99 files"):
        views.long_prompts(llm, 99, 50)
    far, tokenizer = views.far_definition(llm), llm.engine.tokenizer
    text = tokenizer.decode(far.token_ids)
    assert text.endswith("check_zeb") and text.count(far.definition) == 1
    size = llm.engine.runner.block_size
    of_blocks = far.token_ids[far.blocks.start * size : far.blocks.stop * size]
    assert far.definition in tokenizer.decode(of_blocks) and far.blocks.stop * size < len(far.token_ids) - 5 * size
