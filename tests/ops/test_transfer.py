"""What crosses arrives, in one copy and one read; and the mode that forbids other crossings sees them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from minillm.ops.transfer import copy_to_device, copy_to_host
from tests.no_waiting import NoWaiting, Waits

CPU = torch.device("cpu")


def test_columns_arrive_as_they_were_in_one_copy() -> None:
    columns = {
        "tokens": np.array([3, -1, 2**62]),
        "uniforms": np.array([0.1, 1 - 2.0**-53]),
        "nobody": np.array([], np.int64),
        "counts": np.array([7]),
    }
    with NoWaiting() as crossed:
        sent = copy_to_device(columns, CPU)
    assert crossed == {"send": 1}
    assert [sent[name].tolist() for name in columns] == [column.tolist() for column in columns.values()]
    assert all(column.storage_offset() * 8 % 16 == 0 for column in sent.values())
    assert [sent[name].dtype for name in columns] == [torch.int64, torch.float64, torch.int64, torch.int64]


def test_nothing_to_send_sends_nothing() -> None:
    with NoWaiting() as crossed:
        assert copy_to_device({}, CPU) == {}
    assert not crossed


def test_results_of_all_kinds_are_read_at_once() -> None:
    results = torch.tensor([5, 2**40]), torch.tensor([True, False, True]), torch.tensor([], dtype=torch.int32)
    with NoWaiting() as crossed:
        assert copy_to_host(*results) == [[5, 2**40], [1, 0, 1], []]
    assert crossed == {"read": 1}


def set_by_mask(x: torch.Tensor) -> None:
    x[x > 0] = 1.0


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "all": lambda x: all(x > 0),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "numpy": lambda x: x.numpy(),
    "np.asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to device": lambda x: x.to(x.device),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "set by mask": set_by_mask,
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "list index": lambda x: x[[0, 1]],
    "tensor": lambda x: torch.tensor([1.0]) + x,
    "as_tensor": lambda x: torch.as_tensor([1.0]) + x,
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "from_numpy": lambda x: torch.from_numpy(np.ones(3)),
    "range": lambda x: list(range(x[2].long())),
    "slice": lambda x: x[: x[0].long()],
    "f-string": lambda x: f"{x[0]:.1f}",
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_seen(name: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(Waits), NoWaiting():
        WAITS[name](x)


def test_what_does_not_wait_may_be_done() -> None:
    x, index = torch.rand(4, 9), torch.tensor([3, 0])
    with NoWaiting() as crossed:
        y = torch.where(x > 0.5, x, x.double().float())[index]
        y[:, 0] = 0.0
        y.scatter_(1, y.argmax(-1, keepdim=True), torch.zeros(2, 1)).cumsum(1).sort(stable=True)
        torch.searchsorted(y, y[:, :1].contiguous(), right=True).clamp_max(3)
        assert len(y.split([1, 1])) == y.shape[0] == 2
    assert not crossed
