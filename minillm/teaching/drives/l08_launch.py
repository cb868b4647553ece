"""How lesson 08 launches a learner's kernel, and what it reports about the launch.

Every tensor is surrounded by poison (`fence`). A read past its end whose lanes are never stored has no effect on the
result. It is found in the source (`unmasked_loads`) or by a protected page beside the tensor (`wall`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from minillm.errors import LessonError
from minillm.teaching.drives.kernel_source import source_of, unmasked_loads
from minillm.teaching.drives.lazy_kernel import accepted, run_once
from minillm.teaching.drives.triton_kernels import DEVICE
from minillm.teaching.drives.undefined_lanes import check_undefined, with_undefined_lanes
from minillm.teaching.drives.wall import Wall, check_between_walls
from minillm.teaching.fence import BITS, CANARY, Fences


def launch(
    function: Any,
    grid: tuple[int, ...],
    fences: Fences,
    numbers: Sequence[Any],
    share: int,
    full: bool,
    against_wall: bool = False,
    **sizes: int,
) -> dict[str, object]:
    """Launch the kernel `function`; return its result and what it did outside of it.

    The kernel gets the tensors of `fences`, of which the last is `out`, then `numbers`, and `sizes` as its
    `tl.constexpr`. The last axis of `grid` divides that axis of `out` into parts of `share` elements, one per program.
    If it can (`can_lack_a_program`), the kernel runs once more without the last program of that axis, whose part must
    then stay unwritten. `full`: all lanes have an element to work on, so the kernel needs no masks. With `against_wall`
    it runs twice more, on tensors that end where their memory ends, and on tensors that begin where it begins.

    Raises:
        NotImplementedError: the kernel is a stub.
        KernelError: `function` is not a kernel; or the kernel raised an error, or its result depends on a masked lane
            that was loaded without `other`.
        OutOfBoundsError: the kernel accessed memory behind a tensor or in front of one.
        LessonError: the kernel has other parameters, or Triton cannot run.
    """
    kernel = accepted(function)
    tensors = [fence.tensor for fence in fences.fences]
    *given, out = tensors
    _check_parameters(kernel, len(tensors) + len(numbers), tuple(sizes))
    run_once(kernel, grid, (*tensors, *numbers), sizes)
    for load, variant in with_undefined_lanes(kernel):
        again = _unwritten(out)
        run_once(variant, grid, (*given, again, *numbers), sizes)
        check_undefined(load, [(out, again)])
    part, without_last = _unwritten(out), (*grid[:-1], grid[-1] - 1)
    if can_lack_a_program(kernel):
        with num_programs_of(grid):
            run_once(kernel, without_last, (*given, part, *numbers), sizes)
    of_last = _is_written(part).split(share, dim=len(grid) - 1)[-1]
    found = {
        "out": out.cpu(),
        "numbers of out never written": int((~_is_written(out)).sum()),
        "numbers written outside of out": len(fences.fences[-1].changed(outside=True)),
        "numbers of the last program written by others": int(of_last.sum()),
        "input numbers overwritten": sum(len(fence.changed(outside=False)) for fence in fences.fences[:-1]),
        "blocks loaded without a mask": [] if full else unmasked_loads(source_of(kernel)),
    }
    if against_wall and not found["blocks loaded without a mask"]:
        check_between_walls(
            [name.removesuffix("_ptr") for name in inspect.signature(kernel.fn).parameters][: len(tensors)],
            lambda wall: [_walled(x, wall) for x in tensors],
            lambda copies: run_once(kernel, grid, (*copies, *numbers), sizes),
        )
    return found


def _unwritten(out: Tensor) -> Tensor:
    """Another result like `out`, not written yet."""
    return Fences(DEVICE).output("out", out.shape, out.dtype, out.stride(0) if out.dim() == 2 else None)


def _is_written(out: Tensor) -> Tensor:
    """Which elements of a float result a launch has written: booleans of its shape."""
    return out.contiguous().view(BITS[out.dtype.itemsize]) != CANARY[out.dtype]


def _walled(x: Tensor, wall: Wall) -> Tensor:
    """A copy of the tensor with the same strides, which `wall` puts beside a protected page."""
    size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return wall(x.as_strided((size,), (1,))).as_strided(x.shape, x.stride())


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
