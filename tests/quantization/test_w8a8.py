"""W8A8: the whole-number product is exact wherever it runs, and each token has its own scale."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from minillm.quantization import w8a8
from minillm.quantization.base import QuantizedLinear
from minillm.quantization.schemes import make_scheme
from minillm.quantization.w8a8 import float_product, int_mm_is_exact, int_mm_pays, integer_product, padded_product

SHAPES = [(1, 384, 640), (5, 384, 96), (17, 768, 33), (3, 37, 11), (1, 1, 1), (2, 5000, 9)]


def operands(rows: int, columns: int, out: int, largest: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    x, weight = (torch.randint(-127, 128, (n, columns), dtype=torch.int8, generator=generator) for n in (rows, out))
    if largest:  # every product at its largest, so that any sum that can overflow does
        return torch.full_like(x, 127), torch.full_like(weight, 127) * (1 - 2 * (torch.arange(out) % 2))[:, None].to(
            torch.int8
        )
    return x, weight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("product", [integer_product, float_product, padded_product])
def test_the_product_of_whole_numbers_is_exact(product: object, shape: tuple[int, int, int], largest: bool) -> None:
    if product is padded_product and not int_mm_is_exact():
        pytest.skip("torch._int_mm cuts off on this processor; padding is for GPUs")
    x, weight = operands(*shape, largest)
    found = product(x, weight)
    assert found.dtype == torch.int32 and found.shape == (shape[0], shape[2])
    assert torch.equal(found.long(), x.long() @ weight.long().T)


def saturating(x: Tensor, weight_t: Tensor) -> Tensor:
    """`torch._int_mm` as a processor without VNNI has it: x shifted to be unsigned, pairs summed in 16 bits."""
    products = (x.int() + 128)[:, :, None] * weight_t.int()[None]
    pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(1) - 128 * weight_t.int().sum(0)).int()


@pytest.fixture
def another_processor() -> Iterator[None]:
    """What is known of this one is forgotten, before and after the test."""
    for known in (int_mm_is_exact, int_mm_pays):
        known.cache_clear()
    yield
    for known in (int_mm_is_exact, int_mm_pays):
        known.cache_clear()


@pytest.mark.usefixtures("another_processor")
def test_a_processor_that_cuts_sums_off_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operands(4, 64, 8, largest=True)
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not torch.equal(torch._int_mm(x, weight.T).long(), x.long() @ weight.long().T)
    assert not int_mm_is_exact()
    assert torch.equal(integer_product(x, weight).long(), x.long() @ weight.long().T)


@pytest.mark.usefixtures("another_processor")
@pytest.mark.parametrize("slow", ["integers", "floats"])
def test_integers_are_multiplied_as_such_only_where_that_is_faster(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    def product(x: Tensor, weight: Tensor, kind: str) -> Tensor:
        used.append(kind)
        time.sleep(0.02 * (kind == slow))
        return float_product(x, weight)

    used: list[str] = []
    monkeypatch.setattr(torch, "_int_mm", lambda x, weight_t: product(x, weight_t.T, "integers"))
    monkeypatch.setattr(w8a8, "float_product", lambda x, weight: product(x, weight, "floats"))
    assert int_mm_pays() is (slow == "floats")
    integer_product(*operands(4, 64, 8, largest=True))
    assert used[-1] != slow


@pytest.mark.usefixtures("another_processor")
def test_a_default_device_of_the_process_changes_nothing() -> None:
    x, weight = operands(4, 64, 8, largest=True)
    with torch.device("meta"):  # as a GPU: what is made there without a device cannot be read here
        found = integer_product(x, weight)
    assert torch.equal(found.long(), x.long() @ weight.long().T)


@pytest.mark.skipif(sys.platform != "linux", reason="the library can be told its instruction set on Linux")
def test_the_product_is_exact_without_vnni() -> None:
    code = (
        "import torch; from minillm.quantization.w8a8 import integer_product\n"
        "x = torch.full((3, 384), 127, dtype=torch.int8); w = torch.full((64, 384), -127, dtype=torch.int8)\n"
        "assert (integer_product(x, w) == -384 * 127 * 127).all()"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_sums_stay_inside_what_fp32_counts() -> None:
    assert w8a8.EXACT_COLUMNS * 127**2 <= 2**24 < (w8a8.EXACT_COLUMNS + 1) * 127**2


def layer(bias: bool = True) -> tuple[QuantizedLinear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 40, generator=generator)
    scheme = make_scheme("w8a8")
    made = QuantizedLinear(scheme, 40, 12, torch.randn(12, generator=generator) if bias else None)
    made.fill(scheme.quantize(weight))
    return made, weight


def test_the_layer_is_its_definition_in_fp64() -> None:
    made, _ = layer()
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    steps = x.abs().amax(1, keepdim=True) / 127
    codes = (x / steps).round().double()
    expected = codes @ made.qweight.double().T * steps.double() * made.scales.double() + made.bias.double()
    assert torch.allclose(made(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Bitwise: a scale over the whole batch would make the small rows coarse."""
    made, _ = layer()
    x = (
        torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
        * torch.tensor([1e-3, 1, 10, 1e4, 1, 1e-6])[:, None]
    )
    assert torch.equal(made(x), torch.cat([made(row[None]) for row in x]))


def test_a_token_of_zeros_gives_the_bias() -> None:
    made, _ = layer()
    assert torch.equal(made(torch.zeros(2, 40)), made.bias.expand(2, -1))


def test_a_token_that_is_no_number_is_no_number_after(bad: float = float("nan")) -> None:
    made, _ = layer()
    x = torch.ones(3, 40)
    x[1, 7], x[2, 7] = bad, float("inf")
    found = torch.isfinite(made(x)).all(dim=1)
    assert found.tolist() == [True, False, False]


def test_the_error_is_bounded_by_both_half_steps() -> None:
    """|ŷ − y| ≤ Σ (|x|·sw/2 + |w|·sx/2 + sx·sw/4)."""
    made, weight = layer(bias=False)
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    sx, sw = x.abs().amax(1, keepdim=True) / 127, made.scales
    bound = x.abs().sum(1, keepdim=True) * sw / 2 + weight.abs().sum(1) * sx / 2 + 40 * sx * sw / 4
    assert ((made(x) - x @ weight.T).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_come_out_in_their_own_dtype(dtype: torch.dtype) -> None:
    made, weight = layer(bias=False)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert made(x).dtype == dtype
    assert (made(x).float() - x.float() @ weight.T).abs().max() < 0.3
