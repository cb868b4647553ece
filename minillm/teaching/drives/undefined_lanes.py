"""Masked lanes of a load without `other`: what they hold is undefined, so no result may depend on it.

Triton's interpreter fills such lanes with 0, which hides the mistake. So each kernel runs once more for each of these
loads, with an `other` that a right kernel does not notice: NaN, or 1 for integers. Then both results must be the same.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from minillm.teaching.drives.kernel_source import loads_without_other, source_of
from minillm.teaching.drives.triton_kernels import KernelError, interpreting, kernel_of_text
from minillm.teaching.fence import BITS


def with_undefined_lanes(kernel: Any) -> Iterator[tuple[str, Any]]:
    """For each load with a mask and no `other`, of the Triton kernel or of one that it calls: the load, and the kernel
    with other masked lanes there."""
    whole = source_of(kernel)
    if whole is None or kernel.fn.__closure__:
        return
    for number, load in enumerate(loads_without_other(whole)):
        tree = copy.deepcopy(whole)
        changed = loads_without_other(tree)[number]
        fill = ast.Call(ast.Name("undefined_lane", ast.Load()), [changed.args[0]], [])
        changed.args, rest = changed.args[:2], [word for word in changed.keywords if word.arg != "other"]
        changed.keywords = [*rest, ast.keyword("other", fill)]
        with interpreting():
            helper = import_module("minillm.teaching.drives.triton_probe").undefined_lane
        space = {**kernel.fn.__globals__, "undefined_lane": helper}
        yield ast.unparse(load), kernel_of_text(ast.unparse(ast.fix_missing_locations(tree)), tree.name, space)
    for name, called in _called(kernel, whole).items():
        for load, variant in with_undefined_lanes(called):
            yield load, kernel_of_text(ast.unparse(whole), whole.name, {**kernel.fn.__globals__, name: variant})


def _called(kernel: Any, tree: ast.FunctionDef) -> dict[str, Any]:
    """The other kernels that the kernel uses, by name."""
    space = kernel.fn.__globals__
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {name: space[name] for name in used if type(space.get(name)) is type(kernel) and space[name] is not kernel}


def check_undefined(load: str, results: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Raise `KernelError` unless the results of a kernel are the same whatever the masked lanes of `load` hold."""
    for one, other in results:
        kind = BITS[one.dtype.itemsize]
        if not torch.equal(one.contiguous().view(kind), other.contiguous().view(kind)):
            raise KernelError(
                f"the result depends on masked lanes of `{load}`; without other= they are undefined (Triton's "
                "interpreter happens to load 0 there, a GPU may not)"
            )
