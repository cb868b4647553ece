"""Building a module without filling it: memory for weights that a file will bring, in the dtype they are to have."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MAPPED_BYTES = 2**16
"""Tensors from this size on get pages of their own; below, rounding up to whole pages would waste too much."""


class Unfilled(TorchFunctionMode):
    """Modules built under it get parameters that are allocated and not filled with random numbers.

    Building without storage first (on the `meta` device) does the same, but costs a second of torch's own imports.
    """

    def __init__(
        self, device: torch.device | str, dtype: torch.dtype | None = None, matrices: torch.dtype | None = None
    ) -> None:
        """`dtype`: of all parameters, but for those with two dimensions, which have `matrices`; None: as they ask."""
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
            return own_pages(shape, dtype)
        return func(shape, **{**kwargs, "dtype": dtype, "device": self.device})


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An unfilled tensor on the CPU whose memory goes back to the system as soon as the tensor goes.

    An executor takes matrices over one by one. Memory that only went back to the allocator would count as in use for
    as long as something behind it is: glibc keeps what is freed in the middle of its heap.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < MAPPED_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, num_bytes, **private), dtype=dtype).view(tuple(shape))
