"""Lesson 05: the references agree with the engine's schemes and keep the promises that the lesson makes of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.quantization.base import LayerStatistics
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.w8a8 import EXACT_COLUMNS, integer_product
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l05_weights import (
    GRID,
    awq_scale,
    quantise_groups,
    quantise_rows,
    round_in_groups_of_4,
    split_outliers,
    w8a8_linear,
)
from minillm.teaching.registry import find
from minillm.teaching.variants.l01_to_l05 import MAKERS
from minillm.teaching.variants.random_numbers import Draw

SEEDS = st.integers(0, 10_000)


def restore_groups(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The matrix that codes, scales and zero points stand for."""
    grouped = codes.unflatten(1, (scale.shape[1], -1)).float()
    return ((grouped - zero[..., None]) * scale.float()[..., None]).flatten(1)


def matrix(seed: int, rows: int = 6, columns: int = 16) -> Tensor:
    """Random, its rows of very different sizes, a row of zeros among them."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random) * torch.logspace(-3, 2, rows)[:, None]
    weight[seed % rows] = 0
    return weight


@settings(max_examples=40)
@given(seed=SEEDS)
def test_no_weight_is_off_by_more_than_half_a_step(seed: int):
    weight = matrix(seed)
    codes, scale = quantise_rows(weight)
    assert codes.abs().max() <= 127
    assert (scale > 0).all()
    assert ((codes * scale[:, None] - weight).abs() <= scale[:, None] / 2 * (1 + 1e-5)).all()


@settings(max_examples=40)
@given(seed=SEEDS)
def test_rows_are_those_of_the_engine(seed: int):
    weight = matrix(seed)
    codes, scale = quantise_rows(weight)
    engine = Int8().quantize(weight)
    assert torch.equal(codes, engine["qweight"])
    assert torch.equal(codes * scale[:, None], Int8().dequantize(engine, weight.shape[1]))


@settings(max_examples=40)
@given(seed=SEEDS)
def test_the_product_is_that_of_whole_numbers_and_of_each_token_alone(seed: int):
    x, (codes, scale) = matrix(seed, columns=40), quantise_rows(matrix(seed + 1, rows=3, columns=40))
    y = w8a8_linear(x, codes, scale)
    x_codes, x_scale = quantise_rows(x)
    assert torch.equal(y, integer_product(x_codes, codes) * x_scale[:, None] * scale)
    assert torch.equal(y, torch.cat([w8a8_linear(token[None], codes, scale) for token in x]))


def test_float32_adds_whole_numbers_exactly_up_to_the_columns_that_the_lesson_says():
    assert EXACT_COLUMNS == 1040
    largest = torch.full((1, 1040), 127.0)
    assert int((largest @ largest.T).item()) == 1040 * 127**2 <= 2**24


@settings(max_examples=40)
@given(seed=SEEDS, group_size=st.sampled_from([2, 4, 8, 16]))
def test_groups_keep_zero_and_are_off_by_half_a_step_and_the_rounding_of_the_scale(seed: int, group_size: int):
    weight = matrix(seed)
    weight[:, seed % 16] = 0
    codes, scale, zero = quantise_groups(weight, group_size)
    restored = restore_groups(codes, scale, zero)
    step = scale.float().repeat_interleave(group_size, dim=1)
    assert codes.max() <= 15
    assert (restored[weight == 0] == 0).all()
    # The ends of a range are out of reach where float16 rounds the scale down: by 15 steps of at most 2^-11 each,
    # and 2^-25 where it is subnormal. A zero point rounded the wrong way costs another half step at one end.
    assert ((restored - weight).abs() <= step * (1 + 15 * 2.0**-11) + 15 * 2.0**-25).all()
    inside = (codes > 0) & (codes < 15)
    assert ((restored - weight).abs() <= step / 2 * (1 + 1e-4))[inside].all()


def test_groups_are_those_of_the_engine_but_for_the_rounding_of_the_scale():
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    codes, scale, zero = quantise_groups(weight, 128)
    engine = Int4(group_size=128)
    tensors = engine.quantize(weight)
    assert ((tensors["scales"].float() / scale.float() - 1).abs() <= 2.0**-9).all()
    apart = (engine.dequantize(tensors, 256) - restore_groups(codes, scale, zero)).abs()
    assert (apart > scale.float().repeat_interleave(128, dim=1) / 20).float().mean() < 0.02


@settings(max_examples=30)
@given(seed=SEEDS)
def test_awq_is_never_worse_than_plain_rounding_on_its_sample(seed: int):
    random = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(5, 8, generator=random), torch.randn(9, 8, generator=random) * torch.logspace(-1, 1, 8)

    def error(s: Tensor) -> float:
        return ((x / s) @ round_in_groups_of_4(weight * s).T - x @ weight.T).square().sum().item()

    a, s = awq_scale(weight, x, round_in_groups_of_4, GRID)
    assert a in GRID
    torch.testing.assert_close(s, x.abs().mean(0).pow(a))
    assert error(s) <= error(torch.ones(8))


def test_the_cases_of_awq_have_one_clear_answer():
    for case in find("l05.awq_scale").all_cases():
        weight, x, rounded, grid = case.args
        scales = [x.abs().mean(0).pow(a).clamp_min(1e-4) for a in grid]
        errors = sorted(((x / s) @ rounded(weight * s).T - x @ weight.T).square().sum().item() for s in scales)
        assert len(errors) == 1 or errors[1] > 1.03 * errors[0], case.label


@settings(max_examples=40)
@given(seed=SEEDS, share=st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
def test_dense_and_sparse_make_up_the_matrix_and_the_sparse_part_is_the_largest(seed: int, share: float):
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))
    dense, sparse = split_outliers(weight, share)
    assert torch.equal(dense + sparse, weight)
    assert int(sparse.count_nonzero()) == int(share * weight.numel())
    assert not (dense.bool() & sparse.bool()).any()
    if sparse.any() and dense.any():
        assert sparse[sparse != 0].abs().min() >= dense.abs().max()


def test_taking_the_outliers_out_makes_the_steps_of_the_rest_finer():
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    weight[3, 5] = -40.0
    before, after = quantise_groups(weight, 128)[1], quantise_groups(split_outliers(weight, 0.005)[0], 128)[1]
    assert after[3, 0] < before[3, 0] / 5
    assert (after <= before).all()


@pytest.mark.parametrize("largest", [127, 128])
def test_a_row_of_zeros_has_the_scale_that_one_can_divide_by(largest: int):
    codes, scale = quantise_rows(torch.zeros(2, largest))
    assert codes.any().item() is False
    assert scale.tolist() == [1.0, 1.0]


def test_statistics_are_not_needed_by_the_schemes_that_the_lesson_calls_calibration_free():
    for scheme in (Int8(), Int4()):
        assert scheme.needs == ""
        assert scheme.quantize(torch.ones(2, 8), LayerStatistics())


def _dequantised(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_codes, x_scale = quantise_rows(x)
    return (x_codes * x_scale[:, None]) @ (codes * scale[:, None]).T


def test_a_product_of_dequantised_matrices_passes():
    assert check_function("l05.w8a8_linear", _dequantised).passed


@pytest.mark.parametrize("number", [312, 460, 755])
def test_no_drawn_case_has_a_sum_that_nearly_cancels(number: int):
    exercise = find("l05.w8a8_linear")
    case = MAKERS[exercise.name](Draw(b"secret", "student", exercise.name, number))
    assert exercise.compare(exercise.reference(*case.args), _dequantised(*case.args)) is None


def test_the_report_of_a_wrong_direction_names_it():
    def keeps_dim(weight: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = quantise_rows(weight)
        return codes, scale[:, None]

    report = str(check_function("l05.quantise_rows", keeps_dim))
    assert "keepdim" in report
    assert len(report) < 1200


def _codes_not_limited(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, zero = quantise_groups(weight, group_size)
    codes = (weight.unflatten(1, (-1, group_size)) / scale.float()[..., None]).round() + zero[..., None]
    return codes.flatten(1).to(torch.uint8), scale, zero


def _zero_point_not_limited(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = weight.unflatten(1, (-1, group_size))
    _, scale, _ = quantise_groups(weight, group_size)
    zero = (-grouped.amin(2).clamp_max(0) / scale.float()).round()
    codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def _zero_point_rounded_down(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = weight.unflatten(1, (-1, group_size))
    _, scale, _ = quantise_groups(weight, group_size)
    zero = (-grouped.amin(2).clamp_max(0) / scale.float()).floor().clamp(0, 15)
    codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def _scale_of_tiny_tokens_limited(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_scale = (x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
    return ((x / x_scale).round() @ codes.float().T) * x_scale * scale


def _all_that_tie(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    count = int(share * weight.numel())
    limit = weight.abs().flatten().sort(descending=True).values[count - 1] if count else float("inf")
    kept = weight.abs() >= limit
    return weight * ~kept, weight * kept


def _loses_small_scales(answer: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    codes, scale, *zero = answer
    return codes, scale.masked_fill(scale < 1e-5, 0), *zero


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("quantise_rows", lambda *given: _loses_small_scales(quantise_rows(*given)), ""),
        ("quantise_groups", lambda *given: _loses_small_scales(quantise_groups(*given)), ""),
        ("quantise_groups", _codes_not_limited, "does not clamp the codes"),
        ("quantise_groups", _zero_point_not_limited, "does not clamp the zero point"),
        ("quantise_groups", _zero_point_rounded_down, "does not round the zero point to nearest"),
        ("w8a8_linear", _scale_of_tiny_tokens_limited, "limits the scales of tokens from below"),
        ("split_outliers", _all_that_tie, "splits off all weights that are as large as the last outlier"),
    ],
)
def test_answers_that_once_passed_are_caught_and_named(name: str, answer, cause: str):
    result = check_function(f"l05.{name}", answer)
    assert not result.passed
    assert cause in result.counterexample.cause


def _first_of_those_that_tie(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    kept = torch.zeros(weight.numel(), dtype=torch.bool)
    kept[weight.abs().flatten().argsort(descending=True, stable=True)[: int(share * weight.numel())]] = True
    return weight * ~kept.view_as(weight), weight * kept.view_as(weight)


def _last_of_those_that_tie(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    dense, sparse = _first_of_those_that_tie(weight.flip(0, 1), share)
    return dense.flip(0, 1), sparse.flip(0, 1)


def test_of_equal_weights_any_may_be_the_outlier():
    ties = torch.tensor([[0.5, -0.5], [0.5, 0.1]])
    assert not torch.equal(_first_of_those_that_tie(ties, 0.5)[1], _last_of_those_that_tie(ties, 0.5)[1])
    assert check_function("l05.split_outliers", _first_of_those_that_tie).passed
    assert check_function("l05.split_outliers", _last_of_those_that_tie).passed
