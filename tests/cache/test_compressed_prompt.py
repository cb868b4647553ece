"""Layouts that compress a complete prompt: positions alone decide what a query sees, whatever the engine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.cache.layouts import LAYOUTS
from minillm.cache.snapkv import SnapKVCache
from minillm.errors import MinillmError, UnsupportedError
from minillm.trace import DraftProposed, RequestPreempted
from tests.cache.engines import engine, tokens
from tests.cache.prompt_steps import random_text, step_of
from tests.cache.runs import ENGINES, PROMPTS, PreemptingScheduler, draft_of, generated, paged
from tests.cache.steps import CONTEXT, CPU, small_config, tensor_bytes
from tests.conftest import TinyPair

LOSSLESS: dict[str, dict[str, Any]] = {
    "think": {"key_share": 1.0, "window": 4},
    "snapkv": {"budget": 10_000},
    "squeezed": {"threshold": 0, "window": 4},
}
LOSSY: dict[str, dict[str, Any]] = {
    "think": {"key_share": 0.25, "window": 4},
    "snapkv": {"budget": 8, "window": 4, "kernel": 3},
    "squeezed": {"threshold": 1.5, "cluster_share": 0.4, "window": 4},
}
"""Options with which a layout keeps everything, and almost nothing."""
each_layout = pytest.mark.parametrize("name", LOSSY)


@each_layout
@pytest.mark.parametrize("options", ENGINES, ids=lambda options: next(iter(options)))
def test_plain_tokens_where_everything_is_kept(tiny: TinyPair, name: str, options: dict[str, Any]) -> None:
    """In chunks, in two places, with preemption; with drafts, some of which are rejected."""
    layout = {"layout": name, **LOSSLESS[name]}
    expected = paged(str(tiny.target))
    assert generated(str(tiny.target), layout, **options) == expected
    assert generated(str(tiny.target), layout, speculative_config=draft_of(tiny), **options) == expected


@each_layout
def test_the_same_tokens_however_a_prompt_was_computed(tiny: TinyPair, name: str) -> None:
    """In float64: together, alone, in chunks, preempted, drafted."""
    options, model = {"kv_cache_config": {"layout": name, **LOSSY[name]}}, str(tiny.target)
    expected = tokens(engine(options, model), PROMPTS, 20)
    assert expected != tokens(engine({}, model), PROMPTS, 20)  # something is compressed
    alone = engine(options, model)
    assert [tokens(alone, [prompt], 20)[0] for prompt in PROMPTS] == expected
    assert tokens(engine(options, model, max_num_batched_tokens=5, max_num_seqs=3), PROMPTS, 20) == expected
    # A preempted request computes its prompt and its output again, in chunks that cross the end of the prompt.
    llm = engine(options, model, scheduler_cls=PreemptingScheduler, max_num_batched_tokens=24, max_num_seqs=4)
    with llm.trace() as trace:
        assert tokens(llm, PROMPTS, 20) == expected
    assert trace.of(RequestPreempted)
    llm = engine(options, model, speculative_config=draft_of(tiny))
    with llm.trace() as trace:
        assert tokens(llm, PROMPTS, 20) == expected
    assert trace.of(DraftProposed)


@each_layout
def test_several_completions_of_a_prompt(tiny: TinyPair, name: str) -> None:
    """Blocks are not shared: each completion computes the prompt for itself."""
    layout, params = {"layout": name, **LOSSLESS[name]}, SamplingParams(n=3, seed=5, max_tokens=9)
    llms = LLM(str(tiny.target), kv_cache_config=layout), LLM(str(tiny.target), enforce_eager=True)
    got = [[c.token_ids for c in llm.generate(PROMPTS[2], params, use_tqdm=False)[0].outputs] for llm in llms]
    assert got[0] == got[1]


@each_layout
def test_an_interrupt_in_the_middle_of_compressing_loses_nothing(tiny: TinyPair, name: str) -> None:
    """Layer 0 has compressed the prompt in its second chunk, layer 1 has not: the request starts again."""
    options = {"kv_cache_config": {"layout": name, **LOSSY[name]}, "max_num_seqs": 1, "max_num_batched_tokens": 20}
    llm = engine(options, str(tiny.target))
    expected = tokens(llm, PROMPTS[2:3], 8)
    cache, real = llm.engine.runner.cache, llm.engine.runner.cache.attend

    def interrupted(layer: int, *args: Any) -> torch.Tensor:
        if layer == 1:
            cache.attend = real
            raise KeyboardInterrupt
        return real(layer, *args)

    [request] = llm.submit(PROMPTS[2], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    llm.engine.step()
    assert 20 == request.num_computed_tokens < request.num_prompt_tokens <= 40
    cache.attend = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    assert request.num_computed_tokens == 0 and not request.finished
    while not request.finished:
        llm.engine.step()
    assert request.output_token_ids == expected[0]


@pytest.mark.parametrize("name", sorted(LOSSY.keys() - {"squeezed"}))  # which stores everything
def test_bytes_are_real_and_fall_when_the_prompt_is_complete(name: str) -> None:
    config, layout = small_config(), LAYOUTS[name, "auto"]
    cache = layout(config, 2, CONTEXT, torch.float64, CPU, **LOSSY[name])
    fixed = tensor_bytes(cache)
    text, sizes = random_text(config, 101, 100), []
    for past, end in ((0, 99), (99, 100), (100, 101)):
        step = step_of([(0, past, end - past, 100)])
        for layer in range(2):
            cache.attend(layer, *(x[layer][past:end] for x in (text.q, text.k, text.v)), step)
        sizes.append(cache.num_bytes)
        assert tensor_bytes(cache) - fixed == sizes[-1]
    whole = 2 * 2 * 100 * config.kv_size * 8
    assert sizes[0] <= layout.bytes_per_block(config, CONTEXT, torch.float64, **LOSSY[name])
    assert sizes[0] > 0.98 * whole and sizes[1] < 0.75 * whole
    assert sizes[2] - sizes[1] == 2 * 2 * config.kv_size * 8  # a generated token is whole


@each_layout
def test_a_prompt_of_unknown_length_is_not_compressed(name: str) -> None:
    config = small_config()
    cache = LAYOUTS[name, "auto"](config, 1, CONTEXT, torch.float64, CPU, **LOSSY[name])
    text, step = random_text(config, 60, None), step_of([(0, 0, 60, None)])
    for layer in range(2):
        cache.attend(layer, text.q[layer], text.k[layer], text.v[layer], step)
    assert cache.num_bytes == 2 * 2 * 60 * config.kv_size * 8


def test_rolling_back_into_a_compressed_prompt_is_an_error() -> None:
    config = small_config()
    cache = SnapKVCache(config, 1, CONTEXT, torch.float64, CPU, **LOSSY["snapkv"])
    text = random_text(config, 40, 30)
    cache.attend(0, text.q[0], text.k[0], text.v[0], step_of([(0, 0, 40, 30)]))
    with pytest.raises(MinillmError, match=r"rolled back to 25 tokens, but its first 26 tokens are compressed"):
        cache.attend(0, text.q[0][:1], text.k[0][:1], text.v[0][:1], step_of([(0, 25, 1, 30)]))


@each_layout
def test_a_model_with_sliding_windows_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"layer 0 of this model has a sliding window of 9 tokens; use layout"):
        LAYOUTS[name, "auto"].bytes_per_block(small_config(sliding_window=9), CONTEXT, torch.float32, **LOSSY[name])
