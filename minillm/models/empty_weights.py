"""Builds modules with uninitialised parameters, in the dtype that the loaded weights will have."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MAPPED_BYTES = 2**16
"""Tensors of at least this size get their own memory mapping; for smaller ones, rounding up to whole pages wastes too
much."""


class UninitialisedParameters(TorchFunctionMode):
    """A context in which modules allocate their parameters but do not initialise them.

    Building on the `meta` device first would do the same, but costs a second for torch's own imports.
    """

    def __init__(
        self, device: torch.device | str, dtype: torch.dtype | None = None, matrices: torch.dtype | None = None
    ) -> None:
        """`matrices`: the dtype of two-dimensional parameters; `dtype`: of all others. None: as the module requests."""
        super().__init__()
        self.device, self.dtype, self.matrices = torch.device(device), dtype, matrices

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        if func not in (torch.empty, torch.ones):
            return func(*args, **kwargs)
        shape = torch.Size(args[0] if isinstance(args[0], Sequence) else args)
        dtype = (self.matrices if len(shape) == 2 else self.dtype) or kwargs.get("dtype") or torch.get_default_dtype()
        if func is torch.empty and self.device.type == "cpu":
            return mapped_empty(shape, dtype)
        return func(shape, **{**kwargs, "dtype": dtype, "device": self.device})


def mapped_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor whose memory returns to the system as soon as the tensor is freed.

    An executor packs the matrices one by one and frees each. Memory from the ordinary allocator would still count as in
    use: glibc does not return memory that is freed in the middle of its heap.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < MAPPED_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, num_bytes, **private), dtype=dtype).view(tuple(shape))
