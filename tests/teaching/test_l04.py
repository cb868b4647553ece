"""Lesson 04: the references keep the bounds that the lesson states, and do what the engine's own arithmetic does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.ops import kv_quant
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l02_kv_cache import LLAMA_3_8B, QWEN_3_06B, shape
from minillm.teaching.exercises.l04_kv_quantisation import (
    EXERCISES,
    SMALL_HEADS,
    cache_bytes,
    pack_int4,
    quantise_per_channel,
    quantise_symmetric,
    score_error_bound,
    unpack_int4,
)
from minillm.teaching.workshop.l04_bounds import try_bounds

SIZES = st.floats(1e-6, 1e4)


def rows(seed: int, size: float, tokens: int = 6, heads: int = 2, dim: int = 8) -> Tensor:
    """Keys of very different sizes, one row of zeros among them."""
    torch.manual_seed(seed)
    x = size * torch.randn(tokens, heads, dim) * 10 ** torch.randn(tokens, heads, 1)
    x[0, 0] = 0
    return x


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), size=SIZES, levels=st.sampled_from([7, 127]))
def test_symmetric_codes_are_off_by_half_a_step_at_most(seed: int, size: float, levels: int):
    x = rows(seed, size)
    codes, scale = quantise_symmetric(x, levels)
    step = scale.float()[..., None]
    assert int(codes.abs().max()) <= levels
    assert ((x - codes * step).abs() <= 0.5 * step * (1 + 1e-5)).all()
    assert (codes[0, 0] == 0).all() and torch.isfinite(scale).all() and (scale > 0).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 9999), levels=st.sampled_from([7, 127]))
def test_symmetric_codes_are_the_engines(seed: int, levels: int):
    x = rows(seed, 1.0)[1:]  # the engine gives a row of zeros another scale, which nobody can tell
    for mine, theirs in zip(quantise_symmetric(x, levels), kv_quant.quantize_symmetric(x, levels), strict=True):
        assert torch.equal(mine, theirs)


def test_no_case_of_the_quantisers_lies_on_the_border_of_a_step():
    """Else a learner who divides in another order, or rounds halves upwards, would fail for a last bit."""
    for exercise in EXERCISES:
        for case in exercise.all_cases():
            if exercise.name == "l04.quantise_symmetric":
                x, levels = case.args
                _, scale = quantise_symmetric(x, levels)
                exact = x / scale.float()[..., None]
            elif exercise.name == "l04.quantise_per_channel":
                x, group = case.args
                _, scale, zero = quantise_per_channel(x, group)
                exact = (x.unflatten(0, (-1, group)) - zero.float()[:, None]) / scale.float()[:, None]
            else:
                continue
            assert ((exact - exact.floor() - 0.5).abs() > 5e-3).all(), (exercise.name, case.label)


@given(codes=st.lists(st.integers(-8, 7), min_size=2, max_size=16).filter(lambda found: len(found) % 2 == 0))
def test_packing_loses_nothing_and_halves_the_bytes(codes: list[int]):
    x = torch.tensor(codes, dtype=torch.int8)
    packed = pack_int4(x)
    assert packed.nbytes * 2 == x.nbytes
    assert torch.equal(unpack_int4(packed), x)


def test_all_256_bytes_unpack_and_pack_again():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_int4(unpack_int4(every)), every)
    assert sorted(set(unpack_int4(every).tolist())) == list(range(-8, 8))


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), offset=st.sampled_from([0.0, 3.0, 50.0]))
def test_channels_are_off_by_half_a_step_and_what_float16_rounds(seed: int, offset: float):
    torch.manual_seed(seed)
    x = offset + torch.randn(8, 2, 4)
    codes, scale, zero = quantise_per_channel(x, 4)
    grouped = x.unflatten(0, (-1, 4))
    back = codes.unflatten(0, (-1, 4)) * scale.float()[:, None] + zero.float()[:, None]
    rounding = 2.0**-10 * grouped.abs().amax(1, keepdim=True)  # of the zero point, and of 15 steps
    assert ((grouped - back).abs() <= 0.5 * scale.float()[:, None] + rounding).all()
    assert int(codes.max()) <= 15


def test_a_channel_that_is_large_for_every_token_costs_the_others_nothing():
    torch.manual_seed(0)
    x = torch.randn(32, 1, 16)
    x[:, :, 5] += 60
    codes, scale, zero = quantise_per_channel(x, 32)
    per_channel = (x - (codes * scale.float() + zero.float())).abs()
    codes, scale = quantise_symmetric(x, 7)
    per_token = (x - codes * scale.float()[..., None]).abs()
    others = [i for i in range(16) if i != 5]
    assert per_token[..., others].mean() > 5 * per_channel[..., others].mean()


@pytest.mark.parametrize("config", [LLAMA_3_8B, QWEN_3_06B, SMALL_HEADS], ids=["llama", "qwen", "narrow heads"])
def test_bytes_are_those_the_engine_allocates(config):
    half = torch.float16
    assert cache_bytes(config, 8, config.head_dim, 2) == PagedInt8KVCache.bytes_per_block(config, 1, half)
    assert cache_bytes(config, 4, 32, 4) == PagedInt4KVCache.bytes_per_block(config, 1, half)


@pytest.mark.parametrize(("bits", "dim", "times"), [(8, 128, 1.97), (4, 128, 3.88), (8, 32, 1.88), (8, 64, 1.94)])
def test_times_smaller_than_float16(bits: int, dim: int, times: float):
    config = shape(layers=2, hidden=2 * dim, heads=2, kv_heads=1, head_dim=dim)
    assert cache_bytes(config, 16, dim, 0) / cache_bytes(config, bits, dim, 2) == pytest.approx(times, abs=0.005)


@settings(max_examples=40)
@given(seed=st.integers(0, 9999), levels=st.sampled_from([7, 127]))
def test_no_score_moves_further_than_the_bound(seed: int, levels: int):
    torch.manual_seed(seed)
    q, k = torch.randn(5, 8, dtype=torch.float64), torch.randn(7, 1, 8)
    codes, scale = quantise_symmetric(k, levels)
    error = (codes * scale.float()[..., None]).double() - k.double()
    moved = (q @ error[:, 0].T).abs() / math.sqrt(8)
    assert (moved <= score_error_bound(q, scale[:, 0].double()) * (1 + 1e-5)).all()


def test_the_bound_is_reached_by_a_query_that_wants_it():
    scale = torch.tensor([0.5])
    q = torch.tensor([[3.0, -1.0, 2.0, 0.5]])
    error = 0.25 * q.sign()  # half a step in every channel, in the worst direction
    assert torch.isclose((q @ error.T) / 2, score_error_bound(q, scale)).all()


def _seven_is_negative(packed: Tensor) -> Tensor:
    codes = unpack_int4(packed)
    return torch.where(codes == 7, codes - 16, codes)


def _codes_up_to_sixteen(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, zero = quantise_per_channel(x, group_size)
    grouped = x.unflatten(0, (-1, group_size))
    codes = ((grouped - zero.float()[:, None]) / scale.float()[:, None]).round().clamp_min(0)
    return codes.flatten(0, 1).to(torch.uint8), scale, zero


def _loses_small_scales(answer: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    codes, scale, *zero = answer
    return codes, scale.masked_fill(scale < 1e-5, 0), *zero


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("unpack_int4", _seven_is_negative, "reads 7 as -9"),
        ("quantise_per_channel", _codes_up_to_sixteen, ""),
        ("quantise_symmetric", lambda *given: _loses_small_scales(quantise_symmetric(*given)), ""),
        ("quantise_per_channel", lambda *given: _loses_small_scales(quantise_per_channel(*given)), ""),
    ],
)
def test_answers_that_once_passed_are_caught(name: str, answer, cause: str):
    result = check_function(f"l04.{name}", answer)
    assert not result.passed
    assert cause in result.counterexample.cause


@pytest.mark.parametrize("least", [1e-12, 1e-8, 1e-6])
def test_a_limit_in_place_of_the_scale_one_is_named(least: float):
    def limited(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        scale = (x.abs().amax(-1).clamp_min(least) / levels).to(torch.bfloat16)
        return (x / scale.float()[..., None]).round().to(torch.int8), scale

    cause = check_function("l04.quantise_symmetric", limited).counterexample.cause
    assert cause.startswith("a row of zeros must get the scale 1, and gets ")


def test_a_fact_about_the_codes_says_nothing_of_a_scale_that_is_wrong_too():
    def small_scales(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        amax = x.abs().amax(-1)
        scale = torch.where(amax == 0, 1.0, amax.clamp_min(1e-8) / levels).to(torch.bfloat16)
        return (x / scale.float()[..., None]).round().to(torch.int8), scale

    def small_ranges(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        _, scale, zero = quantise_per_channel(x, group_size)
        scale = scale.clamp_min(1e-6)
        codes = (x.unflatten(0, (-1, group_size)) - zero.float()[:, None]) / scale.float()[:, None]
        return codes.round().clamp(0, 15).flatten(0, 1).to(torch.uint8), scale, zero

    shown = check_function("l04.quantise_symmetric", small_scales).counterexample
    assert shown.cause == "`codes` is 0 everywhere"
    assert "1e-20" in shown.inputs["x"]
    shown = check_function("l04.quantise_per_channel", small_ranges).counterexample
    assert "`codes` and `scale` are wrong; everything else is right" in shown.cause


def test_a_scale_that_alone_is_wrong_is_shown_and_named():
    def limits_the_stored(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        codes, scale = quantise_symmetric(x, levels)
        return codes, scale.clamp_min(1e-6)

    shown = check_function("l04.quantise_symmetric", limits_the_stored).counterexample
    assert shown.cause == "`scale` is wrong; everything else is right"
    assert "7.858e-23" in shown.expected and shown.expected != shown.got


def test_bytes_counted_wrong_are_told_by_their_factor():
    shown = check_function("l04.cache_bytes", lambda *given: 3 * cache_bytes(*given)).counterexample
    assert "3 times too large" in shown.cause


def test_a_scale_from_the_exact_minimum_is_named():
    def exact_minimum(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        groups = x.split(group_size)
        zero = torch.stack([group.min(0).values for group in groups]).half()
        scale = torch.stack([(group.max(0).values - group.min(0).values) / 15 for group in groups]).half()
        scale[scale == 0] = 1
        each_zero, each_scale = (part.float().repeat_interleave(group_size, 0) for part in (zero, scale))
        return ((x - each_zero) / each_scale).round().clamp(0, 15).to(torch.uint8), scale, zero

    result = check_function("l04.quantise_per_channel", exact_minimum)
    assert not result.passed
    assert "from the exact minimum" in result.counterexample.cause


def test_the_three_bounds_hold_for_the_reference_and_are_seen_to_break_for_a_coarser_one():
    torch.manual_seed(1)
    heard = {0: (torch.randn(12, 2, 8), torch.randn(12, 1, 8), torch.randn(12, 1, 8))}
    right = try_bounds(heard, 7, quantise_symmetric, score_error_bound)
    assert right.tested > 0 and right.beyond == 0 and 0 < right.mean_share < right.largest_share <= 1

    def truncates(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        _, scale = quantise_symmetric(x, levels)
        return (x / scale.float()[..., None]).to(torch.int8), scale

    assert try_bounds(heard, 7, truncates, score_error_bound).beyond > 0
