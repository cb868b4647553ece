"""RMSNorm, RoPE and the SwiGLU gate against PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import UnsupportedError
from minillm.ops import rms_norm as norm_reference
from minillm.ops import rope as rope_reference
from minillm.ops import silu_gate as gate_reference
from minillm.ops.triton import rms_norm as norm
from minillm.ops.triton import rope as rotation
from minillm.ops.triton import silu_gate as gate
from tests.ops.triton.close import FP32, HALF, assert_close, examples

FEW = examples(8)
WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: FP32, torch.float16: HALF, torch.bfloat16: HALF}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(WHERE, dtype)


@FEW
@given(rows=st.integers(0, 4), size=st.integers(1, 130), seed=st.integers(0, 99))
def test_rms_norm_equals_the_reference(rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = randn(rows, size), randn(size)
    assert_close(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_residual_is_added_before_the_norm_and_returned(dtype: torch.dtype) -> None:
    """Equal bit for bit, except for bfloat16 in the interpreter, which truncates where a GPU rounds."""
    torch.manual_seed(0)
    x, residual, weight = randn(3, 2, 96, dtype=dtype), randn(3, 2, 96, dtype=dtype), randn(96, dtype=dtype)
    kept = x.clone()
    out, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    if dtype != torch.bfloat16 or WHERE.type == "cuda":
        assert torch.equal(total, expected_total)
    assert_close(total, expected_total, LIMITS[dtype])
    assert torch.equal(x, kept)
    assert out.dtype == dtype
    assert_close(out, expected, LIMITS[dtype])


def test_tiny_rows_are_saved_by_eps_and_nan_stays_in_its_row() -> None:
    x = torch.stack((torch.zeros(40), torch.full((40,), 1e-20), torch.randn(40), torch.randn(40))).to(WHERE)
    x[2, 5] = torch.nan
    out = norm.rms_norm(x, torch.ones(40, device=WHERE), 1e-6)
    assert_close(out[[0, 1, 3]], norm_reference.rms_norm(x[[0, 1, 3]], torch.ones(40, device=WHERE), 1e-6))
    assert out[2].isnan().all()


@pytest.mark.parametrize("shape", [(4, 8), (1,), (1, 8)], ids=str)
def test_a_weight_that_is_not_one_row_is_refused(shape: tuple[int, ...]) -> None:
    """The reference takes any that broadcasts, such as one row for each head."""
    x, weight = randn(3, 4, 8), randn(*shape)
    assert norm_reference.rms_norm(x, weight, 1e-5).shape == x.shape
    for call in (lambda: norm.rms_norm(x, weight, 1e-5), lambda: norm.add_rms_norm(x, x, weight, 1e-5)):
        with pytest.raises(UnsupportedError, match=r"takes a weight of \[8\], not \[") as problem:
            call()
        assert str(list(shape)) in str(problem.value)


@FEW
@given(
    tokens=st.integers(0, 3),
    heads=st.integers(1, 20),
    dim=st.sampled_from((2, 16, 24, 64, 96, 128)),
    seed=st.integers(0, 99),
)
def test_rope_equals_the_reference_on_a_slice_of_a_projection(tokens: int, heads: int, dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = randn(tokens, heads + 2, dim)[:, 1 : heads + 1]
    cos, sin = randn(tokens, 1, dim), randn(tokens, 1, dim)
    out = rotation.rope(x, cos, sin)
    assert out.is_contiguous()
    assert_close(out, rope_reference.rope(x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rope_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, cos, sin = (randn(2, n, 64, dtype=dtype) for n in (4, 1, 1))
    out = rotation.rope(x, cos, sin)
    assert out.dtype == dtype
    assert_close(out, rope_reference.rope(x.float(), cos.float(), sin.float()), HALF)


@FEW
@given(rows=st.integers(0, 3), size=st.sampled_from((1, 7, 64, 1025)), seed=st.integers(0, 99))
def test_gate_equals_the_reference(rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = randn(rows, 2 * size + 3)[:, : 2 * size] * 10
    assert_close(gate.silu_gate(x), gate_reference.silu_gate(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gate_in_16_bits_and_at_the_ends(dtype: torch.dtype) -> None:
    x = torch.tensor([[-200.0, -10.0, 0.0, 200.0, 1.0, 2.0, 3.0, 4.0]]).to(WHERE, dtype)
    out = gate.silu_gate(x)
    assert out.dtype == dtype
    assert_close(out, gate_reference.silu_gate(x.float()), HALF)
