"""The few-row product and packed weights against `F.linear` in double precision."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F

from minillm.ops.linear import FEW_ROWS, PACKED_ROWS, Linear, PackedWeight, can_pack, linear

needs_packing = pytest.mark.skipif(not can_pack(), reason="weights are packed with oneDNN on x86 only")


@pytest.mark.parametrize("rows", [0, 1, 2, 5, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("shape", [(7, 5), (640, 384), (384, 768)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_textbook(rows: int, shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    b = torch.randn(shape[0]) if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    with torch.inference_mode():
        y = linear(x, weight, b)
    assert y.is_contiguous() and y.shape == (rows, shape[0])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_flow_as_through_nn_linear(rows: int) -> None:
    torch.manual_seed(0)
    ours, theirs = Linear(6, 4), torch.nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(rows, 6)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert torch.equal(ours.bias.grad, theirs.bias.grad)


def test_half_precision_goes_to_the_library() -> None:
    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    with torch.inference_mode():
        assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [0, 1, PACKED_ROWS - 1, PACKED_ROWS, FEW_ROWS + 1, 16, 70])
@pytest.mark.parametrize("shape", [(7, 5), (640, 384), (384, 768)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_equals_the_textbook(rows: int, shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(rows)
    layer, x = Linear(shape[1], shape[0], bias=bias).requires_grad_(False), torch.randn(rows, shape[1])
    expected = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    with torch.inference_mode():
        y = layer(x)
    assert y.is_contiguous() and y.shape == (rows, shape[0])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@needs_packing
def test_weights_are_packed_once_and_only_for_enough_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, real = [], PackedWeight.of
    monkeypatch.setattr(PackedWeight, "of", lambda weight: packed.append(1) or real(weight))
    layer, few, many = Linear(6, 4).requires_grad_(False), torch.randn(PACKED_ROWS - 1, 6), torch.randn(PACKED_ROWS, 6)
    layer(many)  # gradients are recorded
    with torch.inference_mode():
        layer(few)
        copy.deepcopy(layer).double()(many.double())
        assert not packed
        for _ in range(3):
            layer(many)
    assert len(packed) == 1


@needs_packing
def test_a_weight_that_changed_is_packed_again() -> None:
    layer, x = Linear(6, 4, bias=False), torch.randn(PACKED_ROWS, 6)
    layer.weight, other = (torch.nn.Parameter(torch.randn(4, 6), requires_grad=False) for _ in range(2))
    with torch.no_grad():
        layer(x)
        layer.weight = other  # as often changed as the one before: not at all
        first = layer(x)
        torch.testing.assert_close(first, F.linear(x, other))
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), 2 * first)
        layer.load_state_dict({"weight": torch.zeros(4, 6)})
        assert not layer(x).any()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_layer_in_use_can_be_copied_and_pickled(again) -> None:
    layer, x = Linear(6, 4).requires_grad_(False), torch.randn(PACKED_ROWS, 6)
    with torch.inference_mode():
        y = layer(x)
    twin = again(layer)
    with torch.inference_mode():
        assert torch.equal(twin(x), y)
    assert twin.weight is not layer.weight
    assert layer.state_dict().keys() == {"weight", "bias"}
