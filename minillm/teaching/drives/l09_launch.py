"""How lesson 09 launches a learner's kernel: every tensor is surrounded by poison."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from minillm.teaching.drives.kernel_source import source_of, stub_message
from minillm.teaching.drives.lazy_kernel import LazyKernel, error_in_words, resolve
from minillm.teaching.drives.triton_kernels import KernelError, interpreting, kernel_type
from minillm.teaching.drives.undefined_lanes import check_undefined, with_undefined_lanes
from minillm.teaching.drives.wall import check_between_walls
from minillm.teaching.exercise import Function
from minillm.teaching.fence import Fences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
    """Launch a learner's kernel on `args`, which are on the GPU if there is one.

    Raises `NotImplementedError` for a stub, and `KernelError` if it is not a kernel or raises an error.
    """
    kernel = resolve(kernel)
    plain = getattr(kernel, "fn", kernel)
    name = getattr(plain, "__name__", "this")
    if (stub := stub_message(source_of(kernel))) is not None:
        raise NotImplementedError(stub)
    if not hasattr(kernel, "fn"):
        raise KernelError(f"{name} is not a kernel: put @triton.jit on the line above its def")
    if type(kernel) is not kernel_type():
        raise KernelError("TRITON_INTERPRET=1 was not set when this kernel was defined; run the notebook from the top")
    failure = ""
    with interpreting(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about NaN
        try:
            kernel[grid](*args, **constants)
        except Exception as error:
            failure = error_in_words(error, name)
    if failure:
        raise KernelError(failure)


def run_fenced(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Mapping[str, tuple[Tensor, float | None]],
    results: Mapping[str, tuple[int, ...]],
    numbers: Sequence[Any] = (),
    against_wall: bool = False,
    **constants: int,
) -> dict[str, Tensor]:
    """Launch on copies that are surrounded by poison; return the results by name.

    `inputs`: tensors, each with the poison around it (None: NaN). `results`: shapes of the float32 results, which are
    the next arguments and hold NaN until they are written. With `against_wall` the kernel runs twice more, on tensors
    that end where their memory ends, and on tensors that begin where it begins. Raises `OutOfBoundsError` if the kernel
    wrote outside a result or accessed a wall, and `KernelError` if the result depends on a masked lane that was loaded
    without `other`.
    """
    fences = Fences(DEVICE)
    given = [fences.input(name, x.contiguous(), poison=poison) for name, (x, poison) in inputs.items()]
    made = [fences.output(name, shape, torch.float32) for name, shape in results.items()]
    launch(kernel, grid, *given, *made, *numbers, **constants)
    fences.check()
    for load, variant in with_undefined_lanes(resolve(kernel)):
        again = Fences(DEVICE)
        same = [again.input(name, x.contiguous(), poison=poison) for name, (x, poison) in inputs.items()]
        others = [again.output(name, shape, torch.float32) for name, shape in results.items()]
        launch(variant, grid, *same, *others, *numbers, **constants)
        check_undefined(load, zip(made, others, strict=True))
    if against_wall:
        check_between_walls(
            [*inputs, *results],
            lambda wall: [wall(x) for x in (*given, *made)],
            lambda copies: launch(kernel, grid, *copies, *numbers, **constants),
        )
    return {name: x.cpu().clone() for name, x in zip(results, made, strict=True)}


def remembering(run_case: Function) -> Function:
    """`run_case` with a memo: a `LazyKernel` runs once per case, because interpreting it takes 10 ms each time."""
    answers: dict[tuple[object, ...], Any] = {}

    @wraps(run_case)
    def run(kernel: Function, *inputs: Any) -> Any:
        if not isinstance(kernel, LazyKernel):
            return run_case(kernel, *inputs)
        key = id(kernel), *(repr(x.tolist() if isinstance(x, Tensor) else x) for x in inputs)
        if key not in answers:
            answers[key] = run_case(kernel, *inputs)
        return deepcopy(answers[key])

    return run
