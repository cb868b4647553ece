"""How lesson 08 launches a learner's kernel, and what it reports about the launch.

Every tensor lies in a larger buffer filled with poison: NaN, or 99 for codes. A result holds poison too until it is
written. So a kernel that reads past the end of a tensor gets NaN, and one that writes past it changes the poison. A
read whose lanes are never stored has no such effect. It is found in the source (`unmasked_loads`) or by a protected
page behind the tensor (`_wall`).
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.errors import LessonError
from minillm.ops.dispatch import has_triton
from minillm.teaching.drives.wall import check_against_walls, has_walls, walled

GUARD = 512
"""Poisoned elements before and after every tensor: more than any wrong kernel of the lesson is off by."""
POISON_CODE = 99
UNWRITTEN = {torch.float32: 0x7FC0BEEF, torch.float16: 0x7E55}
"""NaN with unusual bits, which distinguishes an unwritten element from a NaN that the kernel computed."""
BITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
Launch = Callable[..., Any]


class KernelError(LessonError):
    """A kernel cannot be launched, or raised an error; the message quotes the interpreter or the compiler, and names
    the line if it is known."""


class LazyKernel:
    """A kernel of `_l08_kernels`, imported at its first use, because that imports Triton.

    It is launched like a kernel: `kernel[grid](…)`. `changes`: replacements `(old, new)` in its source, which make it a
    planted mistake.
    """

    def __init__(self, name: str, *changes: tuple[str, str]) -> None:
        self.__name__ = name
        self.changes = changes

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        return resolve(self)[grid]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise `LessonError`: a kernel is launched with a grid."""
        raise LessonError(f"a kernel is launched with a grid: {self.__name__}[(programs,)](…)")

    @property
    def fn(self) -> Any:
        """The Python function under `@triton.jit`."""
        return resolve(self).fn

    @cached_property
    def kernel(self) -> Any:
        """The Triton kernel. Raises `LessonError` if `changes` name text that is not in its source."""
        right = getattr(_kernels(), self.__name__)
        return changed_kernel(right, self.changes, vars(_kernels())) if self.changes else right

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)


def changed_kernel(right: Any, changes: Sequence[tuple[str, str]], space: Mapping[str, Any]) -> Any:
    """Return the kernel `right` with the replacements `changes` in its source; `space`: the globals of its module.

    Raises `LessonError` if an old text is not in the source, so that a planted mistake cannot drift from the kernel.
    """
    source = textwrap.dedent(inspect.getsource(right.fn))
    name = right.fn.__name__
    for old, new in changes:
        if old not in source:
            raise LessonError(f"{old!r} is not in {name}; change its planted mistakes as well")
        source = source.replace(old, new)
    file = f"<{name} with a mistake, {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Triton reads the source
    own = dict(space)
    with interpreting():
        exec(compile(source, file, "exec"), own)
    return own[name]


@contextmanager
def interpreting() -> Iterator[None]:
    """Without a GPU, set `TRITON_INTERPRET=1`: for the import of Triton, and while kernels run.

    The interpreter computes with NumPy, whose warnings about infinities are switched off: a GPU does not warn either.
    """
    before = os.environ.get("TRITON_INTERPRET")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


@lru_cache(maxsize=1)
def kernel_type() -> type:
    """The type that `@triton.jit` makes here. Raises `LessonError` if Triton is missing, or was imported too early."""
    if not has_triton():
        raise LessonError("Triton is not installed; it exists for Linux and WSL (pip install triton) and on Colab")
    with interpreting():
        probe = import_module("minillm.teaching.drives.triton_probe").probe
        library = import_module("triton.language")
    if type(probe) is not type(library.sum):  # `tl.sum` is a kernel too, made when Triton was imported
        raise LessonError(
            "Triton was imported before TRITON_INTERPRET=1 was set, so it can neither compile nor interpret; restart "
            "the notebook's kernel and run it from its first cell"
        )
    return type(probe)


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """The module of the reference kernels, which only the references and the planted mistakes need."""
    kernel_type()
    with interpreting():
        return import_module("minillm.teaching.exercises._l08_kernels")


def resolve(function: Any) -> Any:
    """The Triton kernel of `function`: that of a `LazyKernel`, or `function` itself."""
    return function.kernel if isinstance(function, LazyKernel) else function


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

    def walled(self) -> Tensor:
        """A copy of the tensor with the same strides, whose last element is the last of its memory."""
        size = 1 + sum((n - 1) * step for n, step in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return walled(self.buffer[GUARD : GUARD + size]).as_strided(self.tensor.shape, self.tensor.stride())

    def num_unwritten(self) -> int:
        """The number of elements of a result that the launch did not write."""
        return int((self.tensor.contiguous().view(self.bits.dtype) == UNWRITTEN.get(self.tensor.dtype, 0)).sum())

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
    full: bool,
    against_wall: bool = False,
    **sizes: int,
) -> dict[str, object]:
    """Launch the kernel `function`; return its result and what it did outside of it.

    The kernel gets the tensors of `inputs`, the tensor of `out`, `numbers`, and `sizes` as its `tl.constexpr`. `full`:
    all lanes have an element to work on, so the kernel needs no masks. With `against_wall` it runs a second time, on
    tensors that end where their memory ends.

    Raises:
        NotImplementedError: the kernel is a stub.
        KernelError: the kernel raised an error.
        OutOfBoundsError: the kernel accessed memory behind a tensor.
        LessonError: `function` is not a kernel, or has other parameters.
    """
    kernel = resolve(function)
    if not hasattr(kernel, "fn"):
        function(
            *(fence.tensor for fence in inputs), out.tensor, *numbers, **sizes
        )  # a stub without @triton.jit raises here
        raise LessonError("this is a Python function, not a kernel: is @triton.jit above it?")
    _check_parameters(kernel, len(inputs) + 1 + len(numbers), tuple(sizes))
    tree = _source(kernel)
    if (stub := _stub(tree)) is not None:
        raise NotImplementedError(stub)
    with interpreting():
        kernel_type()  # raises if Triton cannot run
        try:
            kernel[grid](*(fence.tensor for fence in inputs), out.tensor, *numbers, **sizes)
        except Exception as problem:
            raise KernelError(_in_words(kernel, problem)) from problem
        found = {
            "out": out.tensor.cpu(),
            "numbers of out never written": out.num_unwritten(),
            "numbers written beyond out": out.num_changed(outside=True),
            "input numbers overwritten": sum(fence.num_changed(outside=False) for fence in inputs),
            "blocks loaded without a mask": [] if full else unmasked_loads(tree),
        }
        if against_wall and has_walls() and not found["blocks loaded without a mask"]:
            copies = [fence.walled() for fence in (*inputs, out)]
            check_against_walls(lambda: kernel[grid](*copies, *numbers, **sizes))
    return found


def _check_parameters(kernel: Any, count: int, sizes: tuple[str, ...]) -> None:
    """Raise `LessonError` unless the kernel takes `count` tensors and numbers, then `sizes` by name."""
    names = tuple(inspect.signature(kernel.fn).parameters)
    if len(names) != count + len(sizes) or names[count:] != sizes:
        raise LessonError(
            f"your kernel takes ({', '.join(names)}), but it is launched with {count} tensors and numbers, then "
            f"{' and '.join(f'{size}=' for size in sizes)}; keep the parameters of the exercise"
        )


def _in_words(kernel: Any, problem: Exception) -> str:
    """The error of a kernel in one line, with the line of the kernel that raised it."""
    cause = problem.__cause__ or problem
    lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    own = kernel.fn.__code__.co_filename
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == own and frame.line]
    where = f" (in the line `{frames[-1].line}`)" if frames and frames[-1].name == kernel.fn.__name__ else ""
    return f"{type(cause).__name__}: {lines[-1].strip()}{where}"


def _source(kernel: Any) -> ast.FunctionDef | None:
    """The syntax tree of the kernel; None if its source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (OSError, SyntaxError, TypeError):
        return None
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


def _stub(tree: ast.FunctionDef | None) -> str | None:
    """The message of a stub, which only raises `NotImplementedError`; None for any other kernel."""
    body = [node for node in tree.body if not _is_text(node)] if tree else []
    if not body or not isinstance(body[0], ast.Raise):
        return None
    said = [node.value for node in ast.walk(body[0]) if isinstance(node, ast.Constant)]
    return str(said[0]) if said else "write it here"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def unmasked_loads(tree: ast.FunctionDef | None) -> list[str]:
    """The source of each call of `tl.load` that loads a block without a mask.

    A block is an expression made from `tl.arange`. If `%`, `tl.minimum`, `tl.where` or `tl.clamp` keeps its offsets
    inside the tensor, it needs no mask. Only the source is examined; the kernel does not run.
    """
    found, kinds = [], {}
    for node in _in_order(tree.body if tree else []):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                before = kinds.get(target.id, "number") if isinstance(node, ast.AugAssign) else "number"
                kinds[target.id] = _kind(node.value, kinds) if before == "number" else before
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            masked = len(call.args) > 1 or any(word.arg == "mask" for word in call.keywords)
            if _name(call.func) == "load" and call.args and not masked and _kind(call.args[0], kinds) == "block":
                found.append(ast.unparse(call))
    return found


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements in order, including those inside loops and branches."""
    for node in body:
        inner = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
        if inner:
            yield from _in_order(inner)
        else:
            yield node


def _kind(node: ast.expr, kinds: Mapping[str, str]) -> str:
    """The kind of an expression: `block`, `kept inside` (a block that cannot leave the tensor) or `number`."""
    if isinstance(node, ast.Call) and _name(node.func) in ("load", "sum", "max", "min"):
        return "number"
    parts = [kinds.get(node.id, "number")] if isinstance(node, ast.Name) else []
    if isinstance(node, ast.Call) and _name(node.func) == "arange":
        parts.append("block")
    parts += [_kind(child, kinds) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    bounded = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    bounded |= isinstance(node, ast.Call) and _name(node.func) in ("minimum", "where", "clamp")
    if "block" in parts and not bounded and "kept inside" not in parts:
        return "block"
    return "kept inside" if "block" in parts or "kept inside" in parts else "number"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
