"""A stand-in for CUDA graphs where there is no GPU: records the operations of a function on tensors and replays them.

Like `torch.cuda.graph`, it records the launches and not the Python between them. Every ATen operation and every kernel
is recorded with its tensors; a replay repeats them into the same memory and calls no Python function. So anything that
the host decided, counted or read while recording is frozen, and shows as a wrong result in the next step.

It refuses what a capture refuses: reading a tensor on the host (`item`, `tolist`, `nonzero`, an index of booleans, …),
and copying from the host (`torch.tensor([...])`). Memory that was only allocated is filled with NaN or huge integers
before each replay, because other graphs of the same pool may have overwritten it.
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
    "int8_linear": ("_int8_linear", "_int8_linear_row"),
    "paged_attention": ("_attend", "_merge"),
    "rms_norm": ("_rms_norm",),
    "rope": ("_rope",),
    "sample": ("_argmax",),
    "silu_gate": ("_silu_gate",),
    "split_sum": ("_split_sum",),
    "store_kv": ("_store_kv",),
    "w8a8_linear": ("_quantize_tokens", "_w8a8_linear"),
}
"""File of `minillm.ops.triton` → the kernels in it that a step launches."""
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
"""Tensor methods that wait for the device."""
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
"""Operations that wait for the device, because the host needs their result or its size."""
POISON = {torch.int64: 2**40, torch.int32: 2**30}


class CaptureError(RuntimeError):
    """Raised for an operation that a CUDA graph cannot record."""


class SoftwareGraphs:
    """A `cuda_graphs.Capture`; each executor has its own, as with `CudaCapture`."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self.num_launches = 0
        """Launches in the last capture, without allocations and views."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()  # the warm-up that a capture needs
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
    """The launches, in order. `known`: addresses of the tensors that existed before."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.launches: list[Callable[[], None]] = []
        self.num_allocations = 0
        self.known = known
        self.kept: list[Any] = []
        self.in_kernel = False

    def check(self, tensors: Any, what: str) -> None:
        """Raise `CaptureError` unless every tensor existed before or was made by a recorded operation."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.numel() and _address(tensor) not in self.known:
                raise CaptureError(f"{what} is given a tensor from the host, {list(tensor.shape)} {tensor.dtype}")

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
        elif not _addresses(out) <= _addresses(
            (args, kwargs)
        ):  # else a view: the schema of `contiguous` does not tell which
            self._record_new(func, args, kwargs, out)
        self.known |= _addresses(out)
        return out

    def _record_new(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operation that returns new tensors: a replay writes its results to the same memory."""
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
    """Refuses methods that read a tensor's memory without an ATen operation."""

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
    """Record kernel launches inside this context."""
    originals: list[tuple[ModuleType, str, Any]] = []
    for file, names in KERNELS.items():
        module = import_module(f"minillm.ops.triton.{file}")
        originals += [(module, name, getattr(module, name)) for name in names]
    try:
        for module, name, kernel in originals:
            setattr(module, name, _Kernel(kernel, recording))
        yield
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)


def _has_mask(args: Any) -> bool:
    """Whether any index in the arguments of `index` or a similar operation is a mask."""
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1:2]))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(tensors: Any) -> set[int]:
    return {_address(t) for t in tree_leaves(tensors) if isinstance(t, Tensor)}


def _storages() -> set[int]:
    """Return the addresses of all existing tensors."""
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    return {_address(tensor) for tensor in found if tensor.layout == torch.strided}


def _poison(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif tensor.dtype in POISON:
            tensor.fill_(POISON[tensor.dtype])
