"""What the cases of lesson 16 do with a function: call it, and watch the products that it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt, prod
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from minillm.teaching.drives.only_torch import refuse_numpy

Function = Callable[..., Any]
PRODUCTS = {"matmul", "__matmul__", "linalg_matmul", "mm", "bmm", "mv", "dot", "linalg_vecdot", "inner", "linear"}
ADDED_PRODUCTS = {"addmm", "addmv", "addbmm", "baddbmm"}
"""They have a name with `_` too, which adds to the first operand in place."""
OTHER_AXES = "0123456789"
"""In an einsum, letters for the axes that `...` stands for."""


class Products(TorchFunctionMode):
    """The matrix products that PyTorch computes: the most results of one, the most inputs of one result, and the
    multiplications of all.

    A sum of element-wise products is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results = self.inputs = self.multiplications = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_numpy(func)
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in PRODUCTS:
            first = args[0] if args else kwargs.get("input", kwargs.get("x"))
            self._count(found, first.shape[kwargs.get("dim", -1)])
        elif name == "__rmatmul__":  # a method of the second operand
            self._count(found, args[1].shape[-1])
        elif name == "linalg_multi_dot":
            factors = args[0] if args else kwargs["tensors"]
            self._count(found, max(factor.shape[-1] for factor in factors[:-1]))
        elif name.removesuffix("_") in ADDED_PRODUCTS:
            named = next((kwargs[key] for key in ("mat1", "mat", "batch1") if key in kwargs), None)
            self._count(found, (args[1] if named is None else named).shape[-1])
        elif name == "tensordot":  # both operands have the inputs: together they have results · inputs² numbers
            self._count(found, isqrt(args[0].numel() * args[1].numel() // max(1, found.numel())))
        elif name == "einsum" and isinstance(args[0], str):
            self._count(found, _summed(args[0], args[1:]))
        return found

    def _count(self, found: Tensor, inputs: int) -> None:
        self.results, self.inputs = max(self.results, found.numel()), max(self.inputs, inputs)
        self.multiplications += found.numel() * inputs


def _summed(equation: str, operands: Sequence[Any]) -> int:
    """How many products are added for one result of an einsum; 0 for a single operand, which has no products."""
    names, arrow, out = equation.replace(" ", "").partition("->")
    if "," not in names:
        return 0
    if not arrow:  # then the result has the axes of `...`, and the letters that occur once
        out = "..." + "".join(letter for letter in names if names.count(letter) == 1)
    tensors = operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    sizes: dict[str, int] = {}
    for word, x in zip(names.split(","), tensors, strict=True):
        others = x.dim() - len(word.replace("...", ""))
        letters = word.replace("...", OTHER_AXES[len(OTHER_AXES) - others :])
        sizes.update(zip(letters, x.shape, strict=True))
    return prod(size for letter, size in sizes.items() if letter not in out.replace("...", OTHER_AXES))


def own_outputs(function: Function, x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> dict[str, object]:
    """The outputs of a rank, and whether all products together are no larger than theirs, with one input more for the
    bias."""
    with Products() as products:
        found = function(x, weight, bias, rank, size)
    room = len(x) * (len(weight) // size) * (weight.shape[1] + 1)
    return {"returned": found, "own outputs only": products.multiplications <= room}


def sums_of_parts(function: Function, parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> dict[str, object]:
    """The outputs, and whether each product added up the inputs of one rank only."""
    with Products() as products:
        found = function(parts, weight, bias)
    return {"returned": found, "a product for each rank": products.inputs <= parts[0].shape[1]}
