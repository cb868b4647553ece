"""Arrays that end where their memory ends: every access beyond the end is seen, none inside is blamed."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch

from minillm.teaching.drives.wall import check_between_walls, has_walls, stopped_by, walled
from minillm.teaching.fence import OutOfBoundsError

pytestmark = pytest.mark.skipif(not has_walls(), reason="no memory protection here, or the kernels run on a GPU")


def touch(x: torch.Tensor, byte: int) -> int:
    """What compiled code would read: the byte so far from the beginning of `x`."""
    return ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_uint8))[byte]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64])
def test_a_walled_copy_holds_the_same_numbers_and_ends_at_the_wall(dtype: torch.dtype):
    x = torch.arange(6).view(2, 3).to(dtype)
    copy = walled(x)
    assert torch.equal(copy, x) and copy.dtype is dtype
    assert stopped_by(lambda: touch(copy, x.nbytes - 1)) == ""
    assert stopped_by(lambda: touch(copy, x.nbytes)) == "SIGSEGV"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_walled_copy_may_begin_at_the_wall(dtype: torch.dtype):
    x = torch.arange(6).view(2, 3).to(dtype)
    copy = walled(x, in_front=True)
    assert torch.equal(copy, x)
    assert stopped_by(lambda: touch(copy, 0)) == "" and stopped_by(lambda: touch(copy, x.nbytes)) == ""
    assert stopped_by(lambda: touch(copy, -1)) == "SIGSEGV"


@pytest.mark.parametrize(("byte", "where"), [(20, "beyond the end"), (-1, "before the beginning")])
@pytest.mark.parametrize(("touched", "name"), [(0, "q"), (1, "table")])
def test_the_end_of_the_array_that_was_left_is_named(byte: int, where: str, touched: int, name: str):
    x = torch.zeros(5)

    def check(at: int) -> None:
        check_between_walls(("q", "table"), lambda wall: [wall(x), wall(x)], lambda copies: touch(copies[touched], at))

    with pytest.raises(OutOfBoundsError, match=f"{where} of {name}, though its results are right"):
        check(byte)
    check(19)


def test_writing_inside_is_no_error():
    check_between_walls(("x",), lambda wall: [wall(torch.zeros(5))], lambda copies: copies[0].add_(1))


def test_what_the_run_changes_or_raises_is_lost():
    seen: list[int] = []
    assert stopped_by(lambda: seen.append(1)) == "" and seen == []
    assert stopped_by(lambda: 1 // 0) == ""


def test_a_run_that_does_not_end_is_stopped():
    assert stopped_by(lambda: time.sleep(60), patience_s=0.2) == "SIGKILL"


def test_no_child_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    fork, children = os.fork, []
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])
    stopped_by(lambda: None)
    [child] = children
    with pytest.raises(ChildProcessError):  # not of any child: other tests of this process have theirs
        os.waitpid(child, os.WNOHANG)


def test_an_empty_array_has_a_wall_too():
    assert walled(torch.zeros(0, 4)).shape == (0, 4)
