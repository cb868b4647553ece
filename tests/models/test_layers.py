"""The parts of a decoder layer against their formulas in double precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from minillm.models.layers import RMSNorm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("shape", [(1, 7), (5, 384), (2, 3, 64)])
def test_a_norm_equals_the_textbook(shape: tuple[int, ...], scale: float) -> None:
    """At scale 1e-4 epsilon is a thousand times the mean square, at 1e3 nothing beside it."""
    torch.manual_seed(0)
    norm, x = RMSNorm(shape[-1], 1e-5), scale * torch.randn(shape)
    torch.nn.init.normal_(norm.weight)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    with torch.inference_mode():
        y = norm(x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)  # gradients are recorded


def test_a_norm_leaves_its_input_alone_and_rounds_half_precision_once() -> None:
    norm, x = RMSNorm(8, 1e-5), torch.randn(3, 8)
    torch.nn.init.normal_(norm.weight)
    before = x.clone()
    with torch.inference_mode():
        norm(x)
        assert torch.equal(x, before)
        norm, half = norm.bfloat16(), x.bfloat16()
        exact = F.rms_norm(half.float(), (8,), norm.weight.float(), 1e-5)
        assert torch.equal(norm(half), exact.bfloat16())
