"""How lesson 08 launches a learner's kernel, and what it reports about the launch.

Every tensor lies in a larger buffer filled with poison: NaN, or 99 for codes. A result holds poison too until it is
written. So a kernel that reads past the end of a tensor gets NaN, and one that writes past it changes the poison. A
read whose lanes are never stored has no such effect. It is found in the source (`unmasked_loads`) or by a protected
page beside the tensor (`wall`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minillm.errors import LessonError
from minillm.teaching.drives.kernel_source import source_of, stub_message, unmasked_loads
from minillm.teaching.drives.lazy_kernel import error_in_words, resolve
from minillm.teaching.drives.triton_kernels import KernelError, interpreting, kernel_type
from minillm.teaching.drives.undefined_lanes import check_undefined, with_undefined_lanes
from minillm.teaching.drives.wall import Wall, check_between_walls

GUARD = 512
"""Poisoned elements before and after every tensor: more than any wrong kernel of the lesson is off by."""
POISON_CODE = 99
UNWRITTEN = {torch.float32: 0x7FC0BEEF, torch.float16: 0x7E55}
"""NaN with unusual bits, which distinguishes an unwritten element from a NaN that the kernel computed."""
BITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class Fence:
    """A tensor surrounded by poison. `tensor` has `shape`; rows begin `stride` elements apart (None: contiguous)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, stride: int | None = None) -> None:
        rows = shape[0] if len(shape) == 2 else 1
        stride = shape[-1] if stride is None else stride
        device = "cuda" if torch.cuda.is_available() else "cpu"
        poison = float("nan") if dtype.is_floating_point else POISON_CODE
        self.buffer = torch.full((rows * stride + 2 * GUARD,), poison, dtype=dtype, device=device)
        self.tensor = self.buffer.as_strided(shape, (stride, 1)[-len(shape) :], GUARD)
        self.bits = self.buffer.view(BITS[dtype.itemsize])
        self.before = self.bits.clone()

    @classmethod
    def around(cls, x: Tensor, stride: int | None = None) -> Fence:
        """A fenced copy of `x`."""
        fence = cls(tuple(x.shape), x.dtype, stride)
        fence.tensor.copy_(x)
        fence.before = fence.bits.clone()
        return fence

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, stride: int | None = None) -> Fence:
        """A fenced float tensor for a result; its elements are NaN until they are written."""
        fence = cls(shape, dtype, stride)
        fence.before = fence.bits.fill_(UNWRITTEN[dtype]).clone()
        return fence

    def unwritten(self) -> Fence:
        """Another result of this shape, not written yet."""
        stride = self.tensor.stride(0) if self.tensor.dim() == 2 else None
        return Fence.empty(tuple(self.tensor.shape), self.tensor.dtype, stride)

    def walled(self, wall: Wall) -> Tensor:
        """A copy of the tensor with the same strides, which `wall` puts beside a protected page."""
        size = 1 + sum((n - 1) * step for n, step in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return wall(self.buffer[GUARD : GUARD + size]).as_strided(self.tensor.shape, self.tensor.stride())

    def is_written(self) -> Tensor:
        """Which elements of a result a launch has written: booleans of its shape."""
        return self.tensor.contiguous().view(self.bits.dtype) != UNWRITTEN[self.tensor.dtype]

    def num_changed(self, outside: bool) -> int:
        """The number of elements that have changed: of the whole buffer, or only `outside` the tensor."""
        changed = self.bits != self.before
        if outside:
            changed.as_strided(self.tensor.shape, self.tensor.stride(), GUARD).fill_(False)
        return int(changed.sum())


def launch(
    function: Any,
    grid: tuple[int, ...],
    inputs: Sequence[Fence],
    out: Fence,
    numbers: Sequence[Any],
    share: int,
    full: bool,
    against_wall: bool = False,
    **sizes: int,
) -> dict[str, object]:
    """Launch the kernel `function`; return its result and what it did outside of it.

    The kernel gets the tensors of `inputs`, the tensor of `out`, `numbers`, and `sizes` as its `tl.constexpr`. The last
    axis of `grid` divides that axis of `out` into parts of `share` elements, one per program. If it can
    (`can_lack_a_program`), the kernel runs once more without the last program of that axis, whose part must then stay
    unwritten. `full`: all lanes have an element to work on, so the kernel needs no masks. With `against_wall` it runs
    twice more, on tensors that end where their memory ends, and on tensors that begin where it begins.

    Raises:
        NotImplementedError: the kernel is a stub.
        KernelError: the kernel raised an error, or its result depends on a masked lane that was loaded without `other`.
        OutOfBoundsError: the kernel accessed memory behind a tensor or in front of one.
        LessonError: `function` is not a kernel, or has other parameters.
    """
    kernel = resolve(function)
    if not hasattr(kernel, "fn"):
        function(
            *(fence.tensor for fence in inputs), out.tensor, *numbers, **sizes
        )  # a stub without @triton.jit raises here
        raise LessonError("this is a Python function, not a kernel: is @triton.jit above it?")
    _check_parameters(kernel, len(inputs) + 1 + len(numbers), tuple(sizes))
    tree = source_of(kernel)
    if (stub := stub_message(tree)) is not None:
        raise NotImplementedError(stub)
    with interpreting():
        if type(kernel) is not kernel_type():  # which raises if Triton cannot run
            raise LessonError("this is no kernel: put @triton.jit alone above it, and run the notebook from the top")
        try:
            kernel[grid](*(fence.tensor for fence in inputs), out.tensor, *numbers, **sizes)
        except Exception as problem:
            raise KernelError(error_in_words(problem, kernel.fn.__name__)) from problem
        for load, variant in with_undefined_lanes(kernel):
            again = out.unwritten()
            variant[grid](*(fence.tensor for fence in inputs), again.tensor, *numbers, **sizes)
            check_undefined(load, [(out.tensor, again.tensor)])
        part, without_last = out.unwritten(), (*grid[:-1], grid[-1] - 1)
        if can_lack_a_program(kernel):
            with num_programs_of(grid):
                kernel[without_last](*(fence.tensor for fence in inputs), part.tensor, *numbers, **sizes)
        of_last = part.is_written().split(share, dim=len(grid) - 1)[-1]
        found = {
            "out": out.tensor.cpu(),
            "numbers of out never written": int((~out.is_written()).sum()),
            "numbers written outside of out": out.num_changed(outside=True),
            "numbers of the last program written by others": int(of_last.sum()),
            "input numbers overwritten": sum(fence.num_changed(outside=False) for fence in inputs),
            "blocks loaded without a mask": [] if full else unmasked_loads(tree),
        }
        if against_wall and not found["blocks loaded without a mask"]:
            check_between_walls(
                [name.removesuffix("_ptr") for name in inspect.signature(kernel.fn).parameters][: len(inputs) + 1],
                lambda wall: [fence.walled(wall) for fence in (*inputs, out)],
                lambda copies: kernel[grid](*copies, *numbers, **sizes),
            )
    return found


def can_lack_a_program(kernel: Any) -> bool:
    """Whether the kernel divides its work as in the whole grid if fewer programs run: a compiled one that asks for
    `tl.num_programs` does not, and only the interpreter can tell it another number (`num_programs_of`)."""
    return is_interpreted(kernel) or "num_programs" not in kernel.fn.__code__.co_names


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton interprets the kernel; else it compiles it, for a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)


@contextmanager
def num_programs_of(grid: tuple[int, ...]) -> Iterator[None]:
    """Let `tl.num_programs` tell the sizes of this grid, also where fewer programs run."""
    from triton.runtime.interpreter import interpreter_builder

    size, set_grid_dim = (*grid, 1, 1)[:3], interpreter_builder.set_grid_dim
    interpreter_builder.set_grid_dim = lambda *launched: set_grid_dim(*size)
    try:
        yield
    finally:
        del interpreter_builder.set_grid_dim  # the method of the class is left


def _check_parameters(kernel: Any, count: int, sizes: tuple[str, ...]) -> None:
    """Raise `LessonError` unless the kernel takes `count` tensors and numbers, then `sizes` by name."""
    names = tuple(inspect.signature(kernel.fn).parameters)
    if len(names) != count + len(sizes) or names[count:] != sizes:
        raise LessonError(
            f"your kernel takes ({', '.join(names)}), but it is launched with {count} tensors and numbers, then "
            f"{' and '.join(f'{size}=' for size in sizes)}; keep the parameters of the exercise"
        )
