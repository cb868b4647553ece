"""Quantised keys and values: the error bounds hold for every input, and wrong arithmetic breaks them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minillm.errors import ConfigError, UnsupportedError
from minillm.ops import kv_quant as op

ROUND_OFF = 1 + 1e-5
"""What float32 itself adds to a bound, relative to it."""


def awkward_rows() -> list[tuple[str, Tensor]]:
    """Rows of 64 numbers: every size, offsets far from zero, constants, zeros, one outlier, ties."""
    torch.manual_seed(0)
    x = torch.randn(200, 64)
    spike = x * 0.01
    spike[:, 7] = 30.0
    ramp = torch.arange(64.0).repeat(4, 1)
    return [
        ("normal", x),
        ("tiny", x * 1e-7),
        ("hardly there", x * 1e-30),
        ("below float32", torch.full((2, 64), 1e-40)),
        ("large", x * 1e4),
        ("far from zero", x * 0.1 - 50),
        ("far above zero", x * 0.1 + 50),
        ("an outlier", spike),
        ("constant", torch.tensor([[3.3], [-0.07], [0.0], [6e-8]]).expand(4, 64)),
        ("even steps", ramp),
        ("ties", (ramp + 0.5) / 63 * 15),
        ("one sign", x.abs() + 1e-3),
    ]


ROWS = awkward_rows()
ROW_IDS = [name for name, _ in ROWS]
Stored = tuple[Tensor, Tensor]
"""What is read back, and the scale it was stored with, broadcast to the same shape."""


def symmetric(levels: int) -> Callable[[Tensor], Stored]:
    def store(x: Tensor) -> Stored:
        codes, scale = op.quantize_symmetric(x, levels)
        assert codes.dtype == torch.int8 and codes.abs().max() <= levels
        assert scale.dtype == torch.bfloat16 and (scale > 0).all()
        return op.dequantize_symmetric(codes, scale), scale.float().unsqueeze(-1).expand_as(x)

    return store


def affine(x: Tensor) -> Stored:
    codes, scale, zero = op.quantize_affine(x, -1)
    assert codes.dtype == torch.uint8 and codes.max() <= 15
    assert scale.dtype == zero.dtype == torch.float16 and (scale > 0).all()
    packed = op.pack_int4(codes)
    return op.dequantize_affine(op.unpack_int4(packed), scale, zero), scale.float().expand_as(x)


SCHEMES = {"int8": symmetric(127), "int4 symmetric": symmetric(7), "int4 affine": affine}


def check_value_bound(store: Callable[[Tensor], Stored], x: Tensor) -> None:
    """|x - x̂| ≤ s / 2 for the scale s that is stored (TECHNIQUES: section 1.10), for every number."""
    back, scale = store(x)
    assert torch.isfinite(back).all()
    error = (back.double() - x.double()).abs()
    # The sum zero + code · s is rounded once more, to float32.
    assert (error <= scale.double() / 2 * ROUND_OFF + back.double().abs() * 2**-24).all()


def check_scale_is_of_its_row(store: Callable[[Tensor], Stored], steps: int) -> None:
    """`steps` · s is at most 2 · amax of the row itself, plus roundings: a loud neighbour costs a quiet row nothing."""
    x = torch.randn(8, 64) * torch.logspace(-3, 3, 8).unsqueeze(1)
    _, scale = store(x)
    assert (scale <= 2 * x.abs().amax(-1, keepdim=True) / steps * (1 + 2**-7) + 2**-23).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "x"), ROWS, ids=ROW_IDS)
def test_no_number_is_off_by_more_than_half_a_step(scheme: str, name: str, x: Tensor) -> None:
    check_value_bound(SCHEMES[scheme], x)


@pytest.mark.parametrize(("scheme", "steps"), [("int8", 254), ("int4 symmetric", 14), ("int4 affine", 15)])
def test_a_scale_fits_its_row(scheme: str, steps: int) -> None:
    torch.manual_seed(1)
    check_scale_is_of_its_row(SCHEMES[scheme], steps)


@pytest.mark.parametrize(("name", "x"), ROWS, ids=ROW_IDS)
def test_an_affine_step_is_the_range_over_fifteen_and_two_roundings(name: str, x: Tensor) -> None:
    scale = op.quantize_affine(x, -1)[1].double().squeeze(-1)
    low, high = x.double().aminmax(dim=-1)
    assert (scale <= (high - low) / 15 + 2**-8 * (low.abs() + high.abs()) / 15 + 2**-23).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_of_zeros_comes_back_as_zeros(scheme: str) -> None:
    assert SCHEMES[scheme](torch.zeros(3, 64))[0].eq(0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_come_back_finite(scheme: str, bad: float) -> None:
    """So that the engine sees it in the logits and refuses them."""
    x = torch.randn(2, 64)
    x[1, 3] = bad
    if scheme == "int4 affine":
        back = op.dequantize_affine(*op.quantize_affine(x, -1))
    else:
        back = op.dequantize_symmetric(*op.quantize_symmetric(x, 127 if scheme == "int8" else 7))
    assert torch.isfinite(back[0]).all() and not torch.isfinite(back[1]).all()


def test_packing_is_a_bijection_between_pairs_of_codes_and_bytes() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    pairs = op.unpack_int4(every_byte.unsqueeze(-1))
    assert len({tuple(pair) for pair in pairs.tolist()}) == 256 and pairs.max() == 15
    assert torch.equal(op.pack_int4(pairs).squeeze(-1), every_byte)
    codes = torch.randint(16, (5, 3, 64), dtype=torch.uint8)
    assert torch.equal(op.unpack_int4(op.pack_int4(codes)), codes)
    assert op.pack_int4(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21], "the even code lies low"


def test_rounding_down_to_float16_never_rounds_up_and_never_far() -> None:
    torch.manual_seed(0)
    x = torch.cat(
        (torch.randn(20000) * torch.logspace(-9, 3.5, 20000), torch.tensor([0.0, 1.0, -1.0, 2048.5, -2048.5]))
    )
    below = op._half_below(x).double()
    assert (below <= x.double()).all()
    assert (x.double() - below <= x.double().abs() * 2**-9 + 2**-23).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_and_probabilities_are_off_by_no_more_than_the_bound(scheme: str) -> None:
    """|q·k̂ - q·k| / √d ≤ ‖q‖₁ · s / (2 √d) = ε, and then every probability by a factor within e^{±2ε}."""
    torch.manual_seed(2)
    q, k = torch.randn(16, 64, dtype=torch.float64), torch.randn(300, 64)
    back, scale = SCHEMES[scheme](k)
    exact, got = (q @ keys.double().T / 8 for keys in (k, back))
    bound = q.abs().sum(-1, keepdim=True) * scale.double().amax(-1) / 2 / 8
    assert ((got - exact).abs() <= bound * ROUND_OFF).all()
    epsilon = bound.amax(-1, keepdim=True)
    ratio = got.softmax(-1) / exact.softmax(-1)
    assert (ratio <= (2 * epsilon).exp()).all() and (ratio >= (-2 * epsilon).exp()).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weighted_mean_of_values_is_off_by_no_more_than_the_largest_half_step(scheme: str) -> None:
    torch.manual_seed(3)
    v = torch.randn(300, 64)
    weights = torch.randn(16, 300, dtype=torch.float64).softmax(-1)
    back, scale = SCHEMES[scheme](v)
    error = (weights @ back.double() - weights @ v.double()).abs()
    assert (error <= scale.double().amax() / 2 * ROUND_OFF).all()


# --- wrong arithmetic, which the checks above must catch ------------------------------------------------------------


def scale_of_the_whole_tensor(x: Tensor) -> Stored:
    scale = (x.abs().amax() / 127).expand(*x.shape[:-1], 1)
    return (x / scale).round() * scale, scale.expand_as(x)


def scale_rounded_after_the_codes(x: Tensor) -> Stored:
    exact = x.abs().amax(-1, keepdim=True) / 127
    stored = exact.bfloat16().float()
    return (x / exact).round() * stored, stored.expand_as(x)


def forgotten_zero_point(x: Tensor) -> Stored:
    codes, scale, _ = op.quantize_affine(x, -1)
    return codes * scale.float(), scale.float().expand_as(x)


def swapped_nibbles(x: Tensor) -> Stored:
    codes, scale, zero = op.quantize_affine(x, -1)
    packed = op.pack_int4(codes)
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)
    return op.dequantize_affine(codes, scale, zero), scale.float().expand_as(x)


def truncated_codes(x: Tensor) -> Stored:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).trunc() * scale, scale.expand_as(x)


def zero_point_rounded_to_nearest(x: Tensor) -> Stored:
    low, high = x.aminmax(dim=-1, keepdim=True)
    zero, scale = low.half().float(), ((high - low) / 15).half().float()
    return ((x - zero) / scale).round().clamp(0, 15) * scale + zero, scale.expand_as(x)


@pytest.mark.parametrize(
    "wrong",
    [
        scale_rounded_after_the_codes,
        forgotten_zero_point,
        swapped_nibbles,
        truncated_codes,
        zero_point_rounded_to_nearest,
    ],
)
def test_the_value_bound_catches(wrong: Callable[[Tensor], Stored]) -> None:
    caught = 0
    for _, x in ROWS:
        try:
            check_value_bound(wrong, x)
        except AssertionError:
            caught += 1
    assert caught


def test_the_check_of_scales_catches_one_scale_for_a_whole_tensor() -> None:
    with pytest.raises(AssertionError):
        check_scale_is_of_its_row(scale_of_the_whole_tensor, 254)


# --- groups along a head ---------------------------------------------------------------------------------------------


def test_a_group_is_never_longer_than_a_head() -> None:
    assert op.head_group(64, 32) == 32 and op.head_group(16, 32) == 16 and op.head_group(80, 16) == 16


def test_heads_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="head size 33 must be even"):
        op.head_group(33, 32)
    with pytest.raises(ConfigError, match="group_size=24 does not divide the head size 64"):
        op.head_group(64, 24)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ConfigError, match="group_size="):
            op.head_group(64, bad)
