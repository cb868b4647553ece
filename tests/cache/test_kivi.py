"""KIVI's layout: what a query sees depends on its position alone, and that is what the definition says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.cache.kivi import KiviKVCache, KiviShape
from minillm.cache.paged import PagedKVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.ops.kv_quant import dequantize_affine, quantize_affine
from tests.cache import paged_checks as check
from tests.cache.engines import engine, fill_with_rubbish, mean_kl_to_float32
from tests.cache.steps import CONTEXT, CPU, Play, Reference, rotated, small_config, tensor_bytes, textbook

KIVI: dict[str, Any] = {"kv_cache_config": {"layout": "kivi", "group_size": 32, "residual": 64}}
SMALL: dict[str, Any] = {"kv_cache_config": {"layout": "kivi", "group_size": 16, "residual": 24, "rollback": 4}}
SHAPES = [(4, 8, 4), (4, 9, 3), (8, 8, 0), (16, 40, 5), (1, 1, 0), (5, 7, 2), (32, 300, 8)]
"""group_size, residual, rollback."""

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def as_int4(x: Tensor, dim: int, group: int) -> Tensor:
    """`x` `[tokens, kv heads, head_dim]` quantised and read back, in groups of `group` along `dim`."""
    x = x.movedim(dim, -1)
    groups = x.unflatten(-1, (-1, group))
    return dequantize_affine(*quantize_affine(groups, -1), x.dtype).flatten(-2).movedim(-1, dim)


def definition(group_size: int, residual: int, rollback: int) -> Reference:
    """The last of n tokens sees groups of tokens as INT4 so that at most `residual - rollback` are left whole.

    Keys are quantised as they are stored: rotated.
    """

    def attention(config: ModelConfig, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        positions, coded = torch.arange(len(keys)), 0
        while len(keys) - coded > residual - rollback:
            coded += group_size
        stored = rotated(config, layer, keys, positions)
        seen_k = torch.cat((as_int4(stored[:coded], 0, group_size), stored[coded:]))
        seen_v = torch.cat((as_int4(values[:coded], 2, min(group_size, config.head_dim)), values[coded:]))
        first = max(0, len(keys) - (config.window(layer) or len(keys)))
        # Already rotated, so the textbook is asked for a layer without rotation.
        still = ModelConfig(**{**vars(config), "rope_layers": (False,) * config.num_layers})
        turned = rotated(config, layer, q.unsqueeze(0), positions[-1:])[0]
        return textbook(still, layer, turned, seen_k[first:], seen_v[first:], positions[first:])

    return attention


def make(shape: tuple[int, int, int], places: int = 3, **config: Any) -> tuple[ModelConfig, KiviKVCache]:
    model = small_config(**config)
    group_size, residual, rollback = shape
    if group_size == 5:  # values are grouped along the head, so its size must be a multiple
        model = ModelConfig(**{**vars(model), "head_dim": 10})
    options = {"group_size": group_size, "residual": residual, "rollback": rollback}
    cache = KiviKVCache(model, places, CONTEXT, torch.float64, CPU, **options)
    pools = [cache.keys.codes, cache.keys.scale, cache.keys.zero, cache.recent_keys]
    pools += [cache.values.codes, cache.values.scale, cache.values.zero, cache.recent_values]
    fill_with_rubbish(pools)
    return model, cache


# --- what a query sees -----------------------------------------------------------------------------------------------


@each_shape
def test_random_steps_are_the_definition(shape: tuple[int, int, int]) -> None:
    """Chunks of all sizes, ragged batches, tokens taken back, places that change hands."""
    config, cache = make(shape)
    play = Play(config, cache, definition(*shape), 0, max_back=cache.max_rollback).steps(30, places=3)
    assert play.num_rolled_back or not cache.max_rollback


@pytest.mark.parametrize("changes", [{"num_kv_heads": 4}, {"num_kv_heads": 1}, {"sliding_window": 11}], ids=str)
def test_other_heads_and_a_sliding_window(changes: dict[str, Any]) -> None:
    config, cache = make((4, 8, 4), **changes)
    Play(config, cache, definition(4, 8, 4), 5, max_back=4).steps(40, places=3)


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 100])
def test_how_a_prompt_is_chunked_changes_nothing(chunk: int) -> None:
    """100 tokens of the same request: outputs of every chunking are those of one token at a time."""

    def run(chunk: int) -> Tensor:
        torch.manual_seed(0)
        config, cache = make((8, 20, 4), num_layers=1)
        q = torch.randn(100, config.num_heads, config.head_dim, dtype=torch.float64)
        k, v = torch.randn(2, 100, config.num_kv_heads, config.head_dim, dtype=torch.float64)
        out = []
        for start in range(0, 100, chunk):
            own = slice(start, min(start + chunk, 100))
            out.append(cache.attend(0, q[own], k[own], v[own], check.one_place(2, start, own.stop - start)))
        return torch.cat(out)

    torch.testing.assert_close(run(chunk), run(1), rtol=1e-12, atol=1e-12)


@each_shape
def test_at_most_the_residual_is_whole_and_ones_own_token_always_is(shape: tuple[int, int, int]) -> None:
    group_size, residual, rollback = shape
    rows = KiviShape.of(CONTEXT, *shape)
    for count in range(1, CONTEXT + 1):
        coded = rows.num_quantized(count)
        assert coded % group_size == 0 and coded < count
        assert count - coded <= residual - rollback
        assert coded == 0 or count - coded > residual - rollback - group_size


# --- bytes and options -----------------------------------------------------------------------------------------------


@each_shape
def test_bytes_are_those_of_all_tensors(shape: tuple[int, int, int]) -> None:
    config, cache = make(shape)
    options = dict(zip(("group_size", "residual", "rollback"), shape, strict=True))
    assert cache.num_bytes == tensor_bytes(cache)
    assert cache.num_bytes == 3 * KiviKVCache.bytes_per_block(config, CONTEXT, torch.float64, **options)


def test_bytes_are_five_bits_a_number_and_the_recent_tokens() -> None:
    """At a context of 1024, groups of 32 and 64 recent tokens: 968 tokens can go, in 31 groups."""
    config = small_config(head_dim=64)
    got = KiviKVCache.bytes_per_block(config, 1024, torch.float16)
    numbers = 2 * config.num_layers * config.num_kv_heads * 64
    assert got == numbers * (31 * 32 * 5 / 8 + 64 * 2)
    assert got / PagedKVCache.bytes_per_block(config, 1024, torch.float16) == 0.365234375


def test_options_that_make_no_sense_are_refused() -> None:
    def build(**options: Any) -> LLM:
        return LLM("minicoder", kv_cache_config={"layout": "kivi", **options})

    with pytest.raises(ConfigError, match="residual=32 is below group_size \\+ rollback = 40"):
        build(group_size=32, residual=32)
    with pytest.raises(ConfigError, match="group_size=24 does not divide the head size 64"):
        build(group_size=24)
    for name, value in (("group_size", 0), ("residual", "64"), ("rollback", -1)):
        with pytest.raises(ConfigError, match=f"{name}={value!r}"):
            build(**{name: value})
    with pytest.raises(UnsupportedError, match="head size 15"):
        KiviKVCache(small_config(head_dim=15), 1, CONTEXT, torch.float32, CPU)


def test_what_the_layout_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="can roll back 8 tokens"):
        LLM("minicoder", speculative_config={**check.DRAFT, "num_speculative_tokens": 9}, **KIVI)
    with pytest.raises(UnsupportedError, match="enable_prefix_caching"):
        LLM("minicoder", enable_prefix_caching=True, **KIVI)


# --- through the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return check.together(SMALL)


@pytest.mark.parametrize("run", [check.one_by_one, check.in_small_chunks, check.drafted])
def test_the_same_tokens_however_it_runs(
    expected: list[list[int]], run: Callable[[dict[str, Any]], list[list[int]]]
) -> None:
    assert run(SMALL) == expected


def test_preempted_is_not_preempted(expected: list[list[int]]) -> None:
    assert check.preempted(SMALL) == expected


def test_a_step_that_broke_off_half_way_is_as_if_it_had_never_begun() -> None:
    """By then some layers have overwritten recent tokens that the others still need; in prefill and while decoding.

    Log-probabilities are compared, for the most likely token may survive what its probability does not.
    """

    def run(breaks: tuple[int, ...]) -> list[float]:
        llm = engine(SMALL, max_num_batched_tokens=40, max_num_seqs=3)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        requests = llm.submit(list(check.prompts(check.COUNT)), params)
        cache, calls, broken = llm.engine.runner.cache, 0, 0
        attend = cache.attend

        def breaking(layer: int, *rest: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls in breaks:
                raise KeyboardInterrupt
            return attend(layer, *rest)

        cache.attend = breaking  # type: ignore[method-assign]
        while not all(request.finished for request in requests):
            try:
                llm.engine.step()
            except KeyboardInterrupt:
                broken += 1
        assert broken == len(breaks)
        chosen = [zip(request.logprobs, request.output_token_ids, strict=True) for request in requests]
        return [row[token].logprob for rows in chosen for row, token in rows]

    assert run((8 * 1 + 5, 8 * 3 + 4, 8 * 12 + 7)) == pytest.approx(run(()), abs=1e-5)


def test_no_place_is_left_taken() -> None:
    llm = engine(SMALL, num_kv_blocks=2)
    check.tokens(llm, check.prompts(3), 4)
    assert llm.engine.pool.num_used == 0 and llm.engine.runner.block_size == llm.max_model_len


def test_the_loss_is_bounded_and_below_that_of_paged_int4() -> None:
    """Mean KL to float32 over 2 held-out texts, every later chunk reading codes."""
    assert mean_kl_to_float32(KIVI) < mean_kl_to_float32({"kv_cache_dtype": "int4"}) < 0.03
