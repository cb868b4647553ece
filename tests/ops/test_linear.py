"""The few-row product against `F.linear` in double precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from minillm.ops.linear import FEW_ROWS, Linear, linear


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
