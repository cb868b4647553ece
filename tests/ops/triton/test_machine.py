"""What the launchers know about the machine."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from minillm.errors import UnsupportedError
from minillm.ops.triton import machine
from minillm.ops.triton.machine import contiguous_last_dims, dot_type, power_of_two, uses_tensor_cores


@pytest.mark.parametrize(
    ("capability", "bfloat16", "is_fast"), [((7, 5), tl.float32, False), ((8, 0), tl.bfloat16, True)]
)
def test_bfloat16_multiplies_as_itself_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], bfloat16: tl.dtype, is_fast: bool
) -> None:
    monkeypatch.setattr(machine, "capability", lambda: capability)
    assert dot_type(torch.bfloat16) == bfloat16
    assert (dot_type(torch.float16), dot_type(torch.float32)) == (tl.float16, tl.float32)
    assert uses_tensor_cores(torch.float16) == is_fast
    assert not uses_tensor_cores(torch.float32)
    with pytest.raises(UnsupportedError, match=r"not torch\.float64"):
        dot_type(torch.float64)


def test_sides_of_tiles() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert power_of_two(5, at_least=16) == 16


def test_only_what_is_scattered_is_copied() -> None:
    x = torch.zeros(4, 6, 8)
    for view, dims in ((x, 3), (x[:, 1:3], 2), (x[::2], 2), (x[..., :4], 1), (x[:, :1, :4], 2)):
        assert contiguous_last_dims(view, dims) is view
    for view, dims in ((x[:, 1:3], 3), (x[..., ::2], 1), (x.transpose(1, 2), 2), (x[..., :4], 2)):
        copy = contiguous_last_dims(view, dims)
        assert copy is not view
        assert copy.is_contiguous()
