"""The sliding window: what a full cache with an explicit mask gives, however tokens come and go."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.cache import sequence_rows as rows_module
from minillm.cache import window as window_module
from minillm.cache.window import WindowKVCache
from minillm.errors import MinillmError, UnsupportedError
from minillm.models.loading import load_model
from minillm.tokenizer import Tokenizer
from tests.cache.runs import ENGINES, PROMPTS, draft_of, generated, greedy_tokens, paged
from tests.cache.steps import CONTEXT, CPU, Play, last_tokens, nan_in_new_memory, small_config, tensor_bytes
from tests.conftest import TinyPair
from tests.models.naive_attention import NaiveAttention

TOKEN_BYTES = 2 * 2 * 2 * 8 * 8
"""One token of `small_config` in fp64: keys and values · layers · KV heads · head size · bytes."""


def make(window: int, spare: int, **config: Any) -> tuple[Any, WindowKVCache]:
    shape = small_config(**config)
    return shape, WindowKVCache(shape, 4, CONTEXT, torch.float64, CPU, window=window, spare=spare)


@pytest.mark.parametrize("product", ["alone", "padded together"])
@pytest.mark.parametrize("window, spare", [(1, 0), (5, 0), (9, 2), (16, 16), (30, 4), (CONTEXT, 3)])
def test_random_steps_equal_the_textbook(
    window: int, spare: int, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks from 1 to 40, roll-backs of up to `spare`, places that change hands with and without being freed."""
    monkeypatch.setattr(rows_module, "PADDED_DEVICES", ("cpu",) if product == "padded together" else ())
    monkeypatch.setattr(window_module, "SLICE", 16)
    for seed in range(2):
        config, cache = make(window, spare)
        play = Play(config, cache, last_tokens(window), seed, max_back=spare).steps(25, places=3)
        assert (play.num_rolled_back > 3) == (spare > 0)


def test_a_prefill_of_several_slices() -> None:
    config, cache = make(20, 4)
    play = Play(config, cache, last_tokens(20), 3, max_back=4)
    for chunks in ([150], [7, 140, 3], [129, 1, 1, 17]):
        ends = [sum(chunks[:i]) for i in range(len(chunks) + 1)]
        for past, end in pairwise(ends):
            play.step([(0, past, end - past)])


def test_where_the_model_has_a_window_too_the_tighter_counts() -> None:
    for window in (6, 30):
        config, cache = make(window, 3, sliding_window=12, sliding_layers=(False, True))
        Play(config, cache, last_tokens(window), 0, max_back=3).steps(25, places=2)


def test_every_roll_back_within_spare_is_exact_and_the_next_one_is_refused() -> None:
    for spare in (0, 1, 4):
        for back in range(spare + 1):
            config, cache = make(10, spare)
            play = Play(config, cache, last_tokens(10), back, max_back=spare)
            play.step([(0, 0, 40)])
            play.step([(0, 40 - back, 1 + spare)])
    config, cache = make(10, 4)
    play = Play(config, cache, last_tokens(10), 0, max_back=4)
    play.step([(0, 0, 40)])
    with pytest.raises(MinillmError, match=r"from 40 tokens to 34, by 6 tokens.*spare=4"):
        play.step([(0, 34, 1)])


def test_roll_backs_add_up() -> None:
    """Back by 4 and on by one, twice: the second time the ring would have to reach 7 tokens back."""
    config, cache = make(10, 4)
    play = Play(config, cache, last_tokens(10), 0, max_back=4)
    play.step([(0, 0, 40)])
    play.step([(0, 36, 1)])
    with pytest.raises(MinillmError, match=r"from 40 tokens to 33"):
        play.step([(0, 33, 1)])


def test_a_text_that_has_not_filled_its_ring_can_go_back_anywhere() -> None:
    config, cache = make(30, 2)
    play = Play(config, cache, last_tokens(30), 0, max_back=2)
    for past, count in [(0, 32), (3, 1), (4, 20), (1, 31)]:
        play.step([(0, past, count)])


def test_a_new_owner_sees_nothing_of_the_former_one() -> None:
    config, cache = make(12, 4)
    play = Play(config, cache, last_tokens(12), 1, max_back=0)
    play.step([(0, 0, 60)])
    cache.rings[0].rows.fill_(math.nan)
    play.step([(0, 0, 3)])
    play.step([(0, 3, 1)])


def test_rows_never_written_are_never_felt() -> None:
    with nan_in_new_memory():
        config, cache = make(12, 4)
        Play(config, cache, last_tokens(12), 2, max_back=4).steps(10, places=2)


def test_memory_does_not_grow_with_the_text_and_nothing_stays() -> None:
    config, cache = make(12, 4)
    limit = WindowKVCache.bytes_per_block(config, CONTEXT, torch.float64, window=12, spare=4)
    assert limit == 16 * TOKEN_BYTES
    assert cache.num_bytes == tensor_bytes(cache) == 0
    play = Play(config, cache, last_tokens(12), 0, max_back=0)
    for past in range(0, 100, 10):
        play.step([(2, past, 10)])
        assert cache.num_bytes == tensor_bytes(cache) == limit
    play.step([(0, 0, 1)])
    assert cache.num_bytes == tensor_bytes(cache) == 2 * limit
    cache.free([0, 1, 2, 3])
    assert cache.num_bytes == tensor_bytes(cache) == 0


def test_a_ring_is_never_longer_than_the_context() -> None:
    config, cache = make(10 * CONTEXT, 7)
    Play(config, cache, last_tokens(10**9), 0, max_back=0).step([(0, 0, CONTEXT)])
    claimed = WindowKVCache.bytes_per_block(config, CONTEXT, torch.float64, window=10 * CONTEXT, spare=7)
    assert cache.num_bytes == claimed == CONTEXT * TOKEN_BYTES


@pytest.mark.parametrize(
    "layout",
    [{"layout": "window", "window": 14}, {"layout": "sinks", "sinks": 3, "window": 12}],
    ids=lambda layout: layout["layout"],
)
@pytest.mark.parametrize("engine", ENGINES, ids=["chunks of seven", "two places", "preempted"])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_the_same_tokens_however_they_are_run(
    tiny: TinyPair, engine: dict[str, Any], drafted: bool, layout: dict[str, Any]
) -> None:
    """The same layout, one step per token and all prompts at once, is the measure: drafts and chunks lose nothing."""
    layout = {**layout, "spare": 3}
    speculative = draft_of(tiny) if drafted else None
    expected = generated(str(tiny.target), layout)
    assert expected != paged(str(tiny.target))
    assert generated(str(tiny.target), layout, speculative_config=speculative, **engine) == expected


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_a_text_within_the_window_is_that_of_the_paged_layout(tiny: TinyPair, drafted: bool) -> None:
    """The longest text is a prompt of 56 characters and 30 tokens."""
    speculative = draft_of(tiny) if drafted else None
    layout = {"layout": "window", "window": 86}
    assert generated(str(tiny.target), layout, speculative_config=speculative) == paged(str(tiny.target))


def test_the_tokens_are_those_of_a_model_with_this_window(tiny: TinyPair) -> None:
    """Run naively: one growing list of keys per layer, every mask written out, one token at a time."""
    model = load_model(tiny.target, torch.float32, CPU)
    tokenizer = Tokenizer.from_folder(tiny.target)
    expected = []
    for prompt in PROMPTS:
        attention = NaiveAttention(replace(model.config, sliding_window=14))
        expected.append(greedy_tokens(model, attention, tokenizer.encode(prompt)))
    assert generated(str(tiny.target), {"layout": "window", "window": 14}) == expected


def test_minicoder_drafts_without_loss() -> None:
    draft = {"method": "draft_model", "model": "minicoder-draft", "num_speculative_tokens": 4}
    layout = {"layout": "window", "window": 16, "spare": 4}
    assert generated("minicoder", layout, speculative_config=draft) == generated("minicoder", layout)


def test_more_drafts_than_can_be_taken_back_are_refused(tiny: TinyPair) -> None:
    draft = {**draft_of(tiny), "num_speculative_tokens": 4}
    with pytest.raises(UnsupportedError, match=r"num_speculative_tokens=4.*can roll back 3 tokens"):
        LLM(str(tiny.target), kv_cache_config={"layout": "window", "spare": 3}, speculative_config=draft)


def test_several_completions_of_a_prompt_differ_and_end_cleanly(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), kv_cache_config={"layout": "window", "window": 8})
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    [output] = llm.generate(PROMPTS[2], params, use_tqdm=False)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert llm.engine.runner.cache.num_bytes == 0
