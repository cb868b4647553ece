"""A stand-in for CUDA graphs where there is no GPU: records what a function does to tensors, and does it again.

As `torch.cuda.graph`, it keeps the launches and not the Python between them. Every ATen operation and every kernel is
recorded with the very tensors it had; a replay repeats them into the same memory and calls no Python function. So what
the host decided, counted or read while it recorded is frozen, and shows as a wrong result in the next step.

What a capture refuses is refused: looking at a tensor's numbers (`item`, `tolist`, `nonzero`, an index of booleans, …),
and bringing new ones from the host (`torch.tensor([...])`). And memory that was only allocated is filled with poison
before each replay, since in a graph other graphs have used it in between.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KERNELS = {
    "advance": ("_advance",),
    "int4_linear": ("_int4_linear",),
    "int8_linear": ("_int8_linear",),
    "paged_attention": ("_attend", "_merge"),
    "rms_norm": ("_rms_norm",),
    "rope": ("_rope",),
    "sample": ("_argmax",),
    "silu_gate": ("_silu_gate",),
    "split_sum": ("_split_sum",),
    "store_kv": ("_store_kv",),
    "w8a8_linear": ("_quantize_tokens", "_w8a8_linear"),
}
"""Every kernel that a step launches, by the file of `minillm.ops.triton`."""
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
"""Methods of a tensor that wait for its numbers."""
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
"""Operations whose result, or the size of it, depends on numbers that the host must see."""
POISON = {torch.int64: 2**40, torch.int32: 2**30}


class CaptureError(RuntimeError):
    """Something that a CUDA graph could not have recorded."""


class SoftwareGraphs:
    """A `gpu_executor.Capture`: one for each executor, as `CudaCapture`."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self.num_launches = 0
        """Kernels in the last capture: memory that is allocated and views are none."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()  # warm up, as one must
        recording = _Recording(_storages())
        with _launches(recording), _NoReading(recording), recording:
            function()
        self.num_captures += 1
        self.num_launches = len(recording.launches) - recording.num_allocations

        def replay() -> None:
            self.num_replays += 1
            for launch in recording.launches:
                launch()

        return replay


class _Recording(TorchDispatchMode):
    """What was launched, in order. `known`: where tensors lie that were there before."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.launches: list[Callable[[], None]] = []
        self.num_allocations = 0
        self.known = known
        self.kept: list[Any] = []
        self.in_kernel = False

    def check(self, tensors: Any, what: str) -> None:
        """Every tensor must have been there before, or come of something recorded."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.numel() and _place(tensor) not in self.known:
                raise CaptureError(f"{what} is given numbers from the host, {list(tensor.shape)} {tensor.dtype}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.in_kernel:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in WAITING or (name.startswith("index") and _has_mask(args)):
            raise CaptureError(f"{name} waits for the device")
        self.check((args, kwargs), name)
        out = func(*args, **kwargs)
        returned = func._schema.returns
        self.kept.append((args, kwargs, out))
        if any(r.alias_info is not None and r.alias_info.is_write for r in returned) or not returned:
            self.launches.append(lambda: func(*args, **kwargs))
        elif not _places(out) <= _places((args, kwargs)):  # else a view; a schema does not say what `contiguous` does
            self._record_new(func, args, kwargs, out)
        self.known |= _places(out)
        return out

    def _record_new(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation that returns new tensors: a replay has its results where this run had them."""
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if "empty" in func.overloadpacket.__name__:
            self.launches.append(lambda: _poison(outs))
            self.num_allocations += 1
            return

        def again() -> None:
            new = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for old, fresh in zip(outs, new, strict=True):
                assert old.shape == fresh.shape
                old.copy_(fresh)

        self.launches.append(again)


class _NoReading(TorchFunctionMode):
    """Refuses what reads a tensor's memory without an ATen operation."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.recording.in_kernel and name in READS:
            raise CaptureError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class _Kernel:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any, recording: _Recording) -> None:
        self.kernel, self.recording = kernel, recording

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.recording.check((args, kwargs), "a kernel")
            assert all(type(size) is int for size in grid)
            run = self.kernel[grid]
            self.recording.kept.append((args, kwargs))
            self.recording.launches.append(lambda: run(*args, **kwargs))
            self.recording.in_kernel = True
            try:
                run(*args, **kwargs)
            finally:
                self.recording.in_kernel = False

        return launch


@contextmanager
def _launches(recording: _Recording) -> Iterator[None]:
    """While this lasts, kernels are recorded."""
    places: list[tuple[ModuleType, str, Any]] = []
    for file, names in KERNELS.items():
        module = import_module(f"minillm.ops.triton.{file}")
        places += [(module, name, getattr(module, name)) for name in names]
    try:
        for module, name, kernel in places:
            setattr(module, name, _Kernel(kernel, recording))
        yield
    finally:
        for module, name, kernel in places:
            setattr(module, name, kernel)


def _has_mask(args: Any) -> bool:
    """Whether there are booleans among what `index` and its like were called with, the tensor itself aside."""
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1:2]))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(tensors: Any) -> set[int]:
    return {_place(t) for t in tree_leaves(tensors) if isinstance(t, Tensor)}


def _storages() -> set[int]:
    """Where all tensors lie that there are now."""
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    return {_place(tensor) for tensor in found if tensor.layout == torch.strided}


def _poison(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif tensor.dtype in POISON:
            tensor.fill_(POISON[tensor.dtype])
