"""Rounding, by rows and in groups: no weight is off by more than half a step, and zeros break nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.errors import CheckpointError, ConfigError, UnsupportedError
from minillm.ops.quantized_linear import quantize_rows
from minillm.quantization.groups import dequantize_groups, fp16_round_up, in_groups, quantize_groups
from minillm.quantization.schemes import SCHEMES, make_scheme

ROUNDING = 1 + 2e-5
"""What fp32 may add to half a step: w / s is near 127 and rounds in its 24th bit."""


def weights(kind: str, rows: int = 24, columns: int = 75) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * 0.02
    return {
        "normal": x,
        "outlier": torch.where(torch.arange(columns) == 3, 1000 * x, x),
        "one sign": x.abs() + 0.5,
        "other sign": -x.abs() - 0.5,
        "zeros": torch.zeros(rows, columns),
        "zero rows": x * (torch.arange(rows) % 2)[:, None],
        "tiny": x * 1e-40,
        "small": x * 1e-6,
        "huge": x * 1e6,
        "halves": torch.arange(rows * columns).view(rows, columns) % 31 / 2 - 7.5,
    }[kind]


KINDS = ["normal", "outlier", "one sign", "other sign", "zeros", "zero rows", "tiny", "small", "huge", "halves"]


@pytest.mark.parametrize("kind", KINDS)
def test_int8_is_off_by_half_a_step_at_most(kind: str) -> None:
    weight = weights(kind)
    codes, scales = quantize_rows(weight)
    assert codes.dtype == torch.int8 and codes.abs().max() <= 127
    assert torch.isfinite(scales).all() and (scales > 0).all()
    error = (codes.double() * scales.double()[:, None] - weight.double()).abs()
    assert (error <= scales.double()[:, None] / 2 * ROUNDING).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group_size", [8, 32, 128])
def test_groups_are_off_by_half_a_step_at_most(kind: str, bits: int, group_size: int) -> None:
    weight = weights(kind)
    codes, scales, zeros = quantize_groups(weight, bits, group_size)
    assert codes.shape == weight.shape and codes.max() < 2**bits and zeros.max() < 2**bits
    assert scales.shape == zeros.shape == (24, -(-75 // group_size)) and scales.dtype == torch.float16
    error = in_groups(dequantize_groups(codes, scales, zeros, group_size) - weight, group_size).abs()
    assert (error <= scales.float()[..., None] / 2 * ROUNDING).all()


def test_each_group_has_its_own_scale() -> None:
    weight = torch.cat((torch.full((1, 8), 0.01), torch.full((1, 8), 100.0)), dim=1)
    codes, scales, zeros = quantize_groups(weight, 4, 8)
    assert torch.allclose(dequantize_groups(codes, scales, zeros, 8), weight, rtol=2e-3)


def test_zero_stays_zero_in_every_group() -> None:
    weight = weights("one sign")
    weight[:, ::5] = 0
    assert (dequantize_groups(*quantize_groups(weight, 4, 32), 32)[:, ::5] == 0).all()


def test_a_scale_in_fp16_is_never_below_what_it_stands_for() -> None:
    scales = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 3e-3
    half = fp16_round_up(scales).float()
    assert (half >= scales).all() and (half <= torch.clamp(scales * (1 + 2**-9), min=2**-14)).all()


def test_a_narrowed_range_has_finer_steps_and_cuts_off() -> None:
    weight = weights("normal")
    whole, narrow = quantize_groups(weight, 4, 32), quantize_groups(weight, 4, 32, 0.5)
    assert (narrow.scales < whole.scales).all()
    assert dequantize_groups(*narrow, 32).abs().max() < dequantize_groups(*whole, 32).abs().max()


@pytest.mark.parametrize("method", ["int8", "w8a8", "int4"])
def test_what_a_layer_keeps_stands_for_the_rounded_weight(method: str) -> None:
    weight, scheme = weights("normal"), make_scheme(method)
    tensors = scheme.quantize(weight)
    specs = scheme.tensors(*weight.shape)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        n: (s.shape, s.dtype) for n, s in specs.items()
    }
    biggest_step = weight.abs().max() / (127 if scheme.bits == 8 else 7.5)
    assert (scheme.dequantize(tensors, 75) - weight).abs().max() < biggest_step


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["int8", "w8a8", "int4"])
def test_a_weight_that_is_no_number_is_refused(method: str, bad: float) -> None:
    weight = weights("normal")
    weight[3, 5] = bad
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        make_scheme(method).quantize(weight)


def test_a_range_over_fp16_is_refused_in_groups() -> None:
    with pytest.raises(CheckpointError, match="fp16 scale"):
        make_scheme("int4").quantize(torch.full((1, 8), 1e7))


@pytest.mark.parametrize(
    ("method", "options", "error", "words"),
    [
        ("int5", {}, UnsupportedError, "'int5' is not available; there are: int8, w8a8, int4, awq, squeezellm"),
        (None, {}, UnsupportedError, "None is not available"),
        (["int8"], {}, UnsupportedError, "not available"),
        ("int8", {"bits": 4}, ConfigError, "bits=4: scheme 'int8' stores weights in 8 bits"),
        ("int8", {"group_size": 64}, ConfigError, "group_size=64: scheme 'int8' has no such option; it has: bits"),
        ("int4", {"bits": 3}, ConfigError, "bits=3"),
        ("awq", {"bits": 2}, ConfigError, "'awq' stores weights in 3 or 4 bits"),
        ("int4", {"group_size": 0}, ConfigError, "group_size=0 must be a multiple of 8"),
        ("int4", {"group_size": -1}, ConfigError, "group_size=-1"),
        ("awq", {"group_size": 12}, ConfigError, "group_size=12"),
        ("squeezellm", {"outliers": 0.5}, ConfigError, r"outliers=0.5 .* \[0, 0.1\]"),
        ("squeezellm", {"group_size": 64}, ConfigError, "no such option"),
    ],
)
def test_options_that_make_no_sense_name_themselves(
    method: str, options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_scheme(method, **options)


@pytest.mark.parametrize("method", [name for name, scheme in SCHEMES.items() if scheme.needs])
def test_a_scheme_that_needs_calibration_says_so(method: str) -> None:
    with pytest.raises(ConfigError, match="needs calibration"):
        make_scheme(method).quantize(weights("normal"))


def test_bits_are_an_integer() -> None:
    """4.0 equals 4, and makes shapes that are no integers."""
    with pytest.raises(ConfigError, match=r"bits=4\.0"):
        make_scheme("int4", bits=4.0)


def test_a_group_wider_than_the_matrix_is_as_wide_as_the_matrix() -> None:
    """And no wider: statistics of a group take its width squared."""
    weight = torch.randn(3, 24)
    assert in_groups(weight, 2**17).shape == (3, 1, 24)
    wide, own = quantize_groups(weight, 4, 2**17), quantize_groups(weight, 4, 24)
    assert all(torch.equal(a, b) for a, b in zip(wide, own, strict=True))
    assert torch.equal(dequantize_groups(*wide, 2**17), dequantize_groups(*own, 24))
