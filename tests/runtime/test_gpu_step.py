"""The GPU step against `Decoder.forward`: with the references everywhere, with the kernels in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minillm.batch import Segment
from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.models.decoder import Decoder
from minillm.models.quantize import decoder_linears, empty_like, quantize_model, quantize_unembedding
from minillm.quantization.awq import AWQ
from minillm.quantization.base import LayerStatistics, QuantizedLinear, Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.w8a8 import W8A8, int_mm_is_exact, padded_product
from minillm.runtime.gpu_step import Ops, Weights, forward, is_capturable, linear_op
from minillm.runtime.runner import ModelRunner
from tests.no_waiting import NoWaiting
from tests.ops.triton.conftest import interpreter  # noqa: F401  (and kernels are imported for the interpreter)
from tests.runtime.gpu_cases import SHAPES, SMALL, WHERE, random_model, relative, runner_of, steps

WAYS = ("reference", "triton")
WITH_BIASES = replace(SMALL, qkv_bias=True, o_bias=True, mlp_bias=True)


class Stepping:
    """Runs a runner's steps through `forward`, with the implementation given."""

    def __init__(self, runner: ModelRunner, way: str) -> None:
        self.runner = runner
        self.weights = Weights.of(runner.model, runner.cache, way)
        self.ops = Ops.of(WHERE, way)

    @torch.inference_mode()
    def run(self, segments: list[Segment]) -> torch.Tensor:
        batch = self.runner.batch(segments)
        hidden = forward(self.weights, self.ops, batch)
        ends = zip(segments, batch.query_start[1:], strict=True)
        rows = [row for s, end in ends for row in range(end - s.num_logits, end)]
        return self.weights.head(hidden[rows])


def check(model: Decoder, way: str, limit: float = 1e-5, layout: type[KVCache] = PagedKVCache, **options: int) -> None:
    """Assert that the logits of each step are within `limit` of plain PyTorch's, with the same argmax."""
    plain, kernels = runner_of(model, layout, **options), Stepping(runner_of(model, layout, **options), way)
    for step in steps():
        got, right = kernels.run(step), plain.run(step)
        assert relative(got, right) <= limit
        if limit <= 1e-5:
            assert got.argmax(-1).tolist() == right.argmax(-1).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_architecture_gives_the_logits_of_the_plain_way(shape: str, way: str) -> None:
    check(random_model(SHAPES[shape]), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("layout", "options"), [(PagedInt8KVCache, {}), (PagedInt4KVCache, {"group_size": 8}), (PagedInt4KVCache, {})]
)
def test_quantised_caches_give_the_logits_of_the_plain_way(layout: type[KVCache], options: dict, way: str) -> None:
    check(random_model(SMALL), way, layout=layout, **options)


def with_awq(model: Decoder, bits: int) -> Decoder:
    """Quantise the layers' weights with AWQ, calibrated on noise."""
    scheme = AWQ(bits=bits, group_size=16)
    for name, linear in list(decoder_linears(model)):
        inputs = torch.randn(20, linear.in_features, device=WHERE) * torch.rand(linear.in_features, device=WHERE)
        quantized = empty_like(linear, scheme)
        quantized.fill(scheme.quantize(linear.weight, LayerStatistics(inputs, inputs.abs().mean(0))))
        model.set_submodule(name, quantized)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", [Int8(), W8A8(), Int4(group_size=16), Int4(group_size=24)], ids=str)
def test_quantised_weights_give_the_logits_of_the_plain_way(scheme: Scheme, way: str) -> None:
    model = quantize_unembedding(quantize_model(random_model(WITH_BIASES), scheme), scheme)
    check(model, way)


@pytest.mark.parametrize("way", WAYS)
def test_awq_of_four_bits_has_a_product_of_its_own_and_of_three_bits_asks_its_module(way: str) -> None:
    four, three = (with_awq(random_model(SMALL), bits) for bits in (4, 3))
    check(four, way)
    check(three, way)
    assert is_capturable(four) and not is_capturable(three)
    assert isinstance(linear_op(three.layers[0].o_proj, WHERE, way), QuantizedLinear)
    assert not isinstance(linear_op(four.layers[0].o_proj, WHERE, way), QuantizedLinear)


def test_a_weight_without_a_kernel_here_is_multiplied_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = quantize_model(random_model(SMALL), W8A8()).layers[0].o_proj
    monkeypatch.setattr("minillm.ops.dispatch.triton_runs", lambda kind, oldest: oldest < (8, 0))
    assert linear_op(linear, WHERE) is linear
    monkeypatch.undo()
    assert linear_op(linear, WHERE, "reference") is not linear


def test_the_module_of_w8a8_does_not_wait_and_may_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU before sm_80 has no kernel for it."""
    if not int_mm_is_exact():
        pytest.skip("torch._int_mm cuts off on this processor, or does not run")
    monkeypatch.setattr("minillm.quantization.w8a8.integer_product", padded_product)  # what it is on a GPU
    model = quantize_model(random_model(SMALL), W8A8())
    linear = model.layers[0].o_proj
    x = torch.randn(3, linear.in_features, device=WHERE)
    with NoWaiting():
        linear(x)
    assert is_capturable(model)


def test_the_cache_is_left_as_the_plain_way_leaves_it() -> None:
    model = random_model(SMALL)
    plain, kernels = runner_of(model), Stepping(runner_of(model), "triton")
    for step in steps():
        plain.run(step)
        kernels.run(step)
    for name in ("keys", "values"):
        mine, right = getattr(kernels.runner.cache, name), getattr(plain.cache, name)
        assert torch.equal(mine.isnan(), right.isnan())
        assert relative(mine.nan_to_num(), right.nan_to_num()) <= 1e-5
