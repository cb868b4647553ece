"""Arrays in poison: what strays beyond them is seen, what stays inside is not blamed."""

from __future__ import annotations

import pytest
import torch

from minillm.errors import LessonError
from minillm.teaching.fence import CANARY, GUARD, Fences, OutOfBoundsError


def beyond(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The number `index` places from the first of `tensor`, wherever that is: what unchecked code would touch."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + index)


def test_a_function_that_stays_inside_is_not_blamed():
    fences = Fences()
    x = fences.input("x", torch.arange(6.0).view(2, 3))
    out = fences.output("out", (2, 3), torch.float32)
    out.copy_(x)
    fences.check()
    assert torch.equal(out, torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(("at", "says"), [(6, "1 after its last"), (-2, "2 before its first")])
def test_writing_outside_of_an_output_names_the_array_and_the_place(at: int, says: str):
    fences = Fences()
    out = fences.output("out", (2, 3), torch.float32)
    beyond(out, at).fill_(0.0)
    with pytest.raises(OutOfBoundsError, match=f"wrote 1 number outside of out, the first {says}"):
        fences.check()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64]
)
def test_what_surrounds_an_array_is_poison_of_every_type(dtype: torch.dtype):
    fences = Fences()
    x, out = fences.input("x", torch.ones(4, dtype=dtype)), fences.output("out", (4,), dtype)
    for index in (-GUARD, -1, 4, 3 + GUARD):
        assert beyond(x, index).item() != 1
        if dtype in CANARY:
            assert beyond(x, index).isnan().all() and beyond(out, index).isnan().all()
    if dtype in CANARY:
        assert out.isnan().all()


def test_a_computed_nan_outside_is_told_from_the_poison():
    fences = Fences()
    out = fences.output("out", (3,), torch.float32)
    beyond(out, 3).fill_(float("nan"))
    assert "outside of out" in fences.problem()


def test_rows_with_gaps_are_guarded_between_them():
    fences = Fences()
    x, out = fences.input("x", torch.ones(2, 3), stride=5), fences.output("out", (2, 3), torch.float32, stride=7)
    assert (x.stride(), out.stride()) == ((5, 1), (7, 1))
    assert beyond(x, 3).isnan().all()
    beyond(out, 4).fill_(1.0)
    assert "between two of its rows" in fences.problem()


def test_overwriting_an_input_is_a_mistake():
    fences = Fences()
    fences.input("x", torch.zeros(3))[1] = 7.0
    with pytest.raises(OutOfBoundsError, match="overwrote 1 number of its input x"):
        fences.check()


def test_ids_beyond_a_table_lead_into_the_poison_behind_the_pool():
    fences = Fences()
    pool = fences.input("keys", torch.ones(3, 4))
    table = fences.input("table", torch.tensor([2, 0]), poison=3)
    past = int(beyond(table, 2))
    assert beyond(pool, past * 4).isnan().all()


def test_an_empty_array_and_a_scalar_are_fenced_too():
    fences = Fences()
    assert fences.input("x", torch.zeros(0, 4)).shape == (0, 4)
    fences.output("out", (), torch.float32).fill_(1.0)
    fences.check()


def test_a_stride_that_does_not_fit_is_refused():
    with pytest.raises(LessonError, match="stride=2"):
        Fences().input("x", torch.zeros(2, 3), stride=2)
