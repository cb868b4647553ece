"""Arrays surrounded by poison values, for functions without bounds checks: Triton kernels and numba functions.

Every tensor is in the middle of a larger buffer. An input is surrounded by NaN, or for integers by a number that is
plainly wrong. An output is surrounded by NaNs with unusual bits, and holds them itself until it is written. A function
that reads outside of an input computes with the poison; one that writes outside of an output overwrites it:

    fences = Fences(device)
    q, table = fences.input("q", q), fences.input("block_tables", tables, poison=num_blocks)
    out = fences.output("out", q.shape, q.dtype)
    kernel[grid](q, table, out)
    fences.check()  # raises OutOfBoundsError: "wrote 4 numbers outside of out, the first 2 after its last"
    return out.cpu()

NumPy and numba take `tensor.numpy()`, which shares the memory. For block ids and slots, set `poison` to the first id
beyond the pool: a read through it then gets the poison behind the pool, which is NaN, and does not crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.errors import LessonError

GUARD = 4096
"""Poisoned numbers before and after every tensor: more than a wrong index is off by in the small arrays of a check."""
POISON = {torch.int8: 99, torch.uint8: 199, torch.int16: 9_999}
"""The poison around an input of integers; other integers: `LARGE`. Floats: NaN."""
LARGE = 1 << 20
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
CANARY = {
    torch.float64: 0x7FF8_BEEF_0000_BEEF,
    torch.float32: 0x7FC0_BEEF,
    torch.float16: 0x7E55,
    torch.bfloat16: 0x7FD5,
}
"""NaNs with unusual bits, to distinguish an unwritten output from one that holds a computed NaN."""


class OutOfBoundsError(LessonError):
    """A function read or wrote outside of an array, or wrote into an input."""


@dataclass(frozen=True)
class Fence:
    """One tensor in the middle of `buffer`; `before`: the bits of the buffer when the function was called."""

    name: str
    tensor: Tensor
    buffer: Tensor
    before: Tensor
    writable: bool

    def changed(self, outside: bool) -> Tensor:
        """Indices `[n]` into `buffer` whose bits have changed: everywhere, or only `outside` the tensor."""
        changed = _bits(self.buffer) != self.before
        if outside:
            _inside(changed, self.tensor).fill_(False)
        return changed.nonzero()[:, 0]

    def problem(self) -> str:
        """The forbidden write in words; "" if there is none."""
        outside = self.changed(outside=True).tolist()
        if outside:
            return f"wrote {_numbers(len(outside))} outside of {self.name}, the first {self._place(outside[0])}"
        overwritten = [] if self.writable else self.changed(outside=False).tolist()
        return f"overwrote {_numbers(len(overwritten))} of its input {self.name}" if overwritten else ""

    def _place(self, at: int) -> str:
        first = self.tensor.storage_offset()
        last = first + sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        if at < first:
            return f"{first - at} before its first"
        return f"{at - last} after its last" if at > last else "between two of its rows"


@dataclass
class Fences:
    """The fenced arrays of one call, all on `device`."""

    device: str | torch.device = "cpu"
    guard: int = GUARD
    fences: list[Fence] = field(default_factory=list)

    def input(self, name: str, x: Tensor, stride: int | None = None, poison: float | None = None) -> Tensor:
        """A fenced copy of `x`, of any shape; the rows of a matrix are `stride` numbers apart (None: contiguous)."""
        chosen = _poison(x.dtype) if poison is None else poison
        buffer, tensor = self._buffer(tuple(x.shape), x.dtype, stride)
        buffer.fill_(chosen)
        tensor.copy_(x)
        return self._keep(name, tensor, buffer, writable=False)

    def output(self, name: str, shape: Sequence[int], dtype: torch.dtype, stride: int | None = None) -> Tensor:
        """A fenced tensor for a result of this shape. Until they are written, floats are NaN and integers `POISON`."""
        buffer, tensor = self._buffer(tuple(shape), dtype, stride)
        if dtype in CANARY:
            _bits(buffer).fill_(CANARY[dtype])
        else:
            buffer.fill_(_poison(dtype))
        return self._keep(name, tensor, buffer, writable=True)

    def problem(self) -> str:
        """The first forbidden write in words; "" if there is none."""
        return next(filter(None, (fence.problem() for fence in self.fences)), "")

    def check(self) -> None:
        """Raises `OutOfBoundsError` if anything outside of an output was written."""
        if problem := self.problem():
            raise OutOfBoundsError(problem)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, stride: int | None) -> tuple[Tensor, Tensor]:
        if stride is not None and (len(shape) != 2 or stride < shape[1]):
            raise LessonError(f"stride={stride} needs a matrix of at most {stride} columns, not shape {list(shape)}")
        strides = (stride, 1) if stride is not None else torch.empty(shape, device="meta").stride()
        length = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        buffer = torch.empty(length + 2 * self.guard, dtype=dtype, device=self.device)
        return buffer, buffer.as_strided(shape, strides, self.guard)

    def _keep(self, name: str, tensor: Tensor, buffer: Tensor, writable: bool) -> Tensor:
        self.fences.append(Fence(name, tensor, buffer, _bits(buffer).clone(), writable))
        return tensor


def _poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else POISON.get(dtype, LARGE)


def _bits(buffer: Tensor) -> Tensor:
    return buffer.view(BITS[buffer.dtype.itemsize])


def _inside(buffer: Tensor, tensor: Tensor) -> Tensor:
    return buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _numbers(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"
