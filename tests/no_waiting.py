"""Code under `NoWaiting` may not do what would make the host wait for a GPU, wherever it runs here.

On a CPU reading a number is no wait, and so nothing shows that code written for a GPU does it. This mode looks at every
PyTorch call, from Python (`TorchFunctionMode`) and below it (`TorchDispatchMode`), and raises `Waits` at:

    a number read           item, tolist, bool(tensor), int(tensor), numpy, cpu, equal …
    a length only data has  nonzero, unique, bincount, an index or an update by a mask, repeat_interleave by a tensor
    a copy to the device    torch.tensor, an index that is a list, .to(device): from ordinary memory these wait too
    two devices in one call a tensor that was forgotten on the host

The two places that may are `minillm.ops.transfer.copy_to_device` and `copy_to_host`, and they are counted; functions
that are `also` allowed to send are named. Kernels in Triton's interpreter may do as they please: on a GPU they are
compiled.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.ops import transfer


class Waits(AssertionError):
    """Here a GPU's host would wait."""


READS = {
    *("item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose", "unique", "bincount", "masked_select"),
    *(
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__array__",
        "__contains__",
        "argwhere",
        "is_nonzero",
    ),
}
SENDS = {"tensor", "as_tensor", "asarray", "from_numpy", "new_tensor", "pin_memory", "cuda"}
READS_BELOW = {
    *("_local_scalar_dense", "item", "nonzero", "nonzero_static", "masked_select", "equal", "bincount", "is_nonzero"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class NoWaiting:
    """`with NoWaiting() as crossed:` raises `Waits` where the host would wait; `crossed` counts `copy_to_device` as
    "send" and `copy_to_host` as "read"."""

    def __init__(self, *also: FunctionType) -> None:
        self._places = {transfer.copy_to_device.__code__: "send", transfer.copy_to_host.__code__: "read"}
        self._places |= {function.__code__: function.__name__ for function in also}

    def __enter__(self) -> Counter[str]:
        self._crossed: Counter[str] = Counter()
        self._modes = [_Above(self._places, self._crossed), _Below(self._places)]
        for mode in self._modes:
            mode.__enter__()
        return self._crossed

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def _place(places: dict[CodeType, str]) -> str | None:
    """Which place that may wait this call comes from, if from any; `kernel` in one of those."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in places:
            return places[frame.f_code]
        if frame.f_globals.get("__name__", "").startswith("triton."):
            return "kernel"
        frame = frame.f_back
    return None


class _Above(TorchFunctionMode):
    def __init__(self, places: dict[CodeType, str], crossed: Counter[str]) -> None:
        super().__init__()
        self.places, self.crossed = places, crossed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        trouble = _trouble_above(name, args, kwargs)
        if trouble is not None:
            place = _place(self.places)
            if place is None:
                raise Waits(trouble)
            self.crossed[place] += name in ("to", "tolist")
        return func(*args, **kwargs)


def _trouble_above(name: str, args: tuple, kwargs: dict) -> str | None:
    if name in READS or name in SENDS:
        return f"{name} of a tensor"
    if name == "to" and any(isinstance(a, (torch.device, str)) for a in (*args, *kwargs.values())):
        return "a copy to another device"
    if name in ("__getitem__", "__setitem__") and _is_by_list(args[1]):
        return "an index that lies on the host"
    if name == "where" and len(args) + len(kwargs) == 1:
        return "nonzero, called where"
    return None


def _is_by_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, range, np.ndarray)) for part in parts)


class _Below(TorchDispatchMode):
    def __init__(self, places: dict[CodeType, str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        trouble = _trouble_below(name, args, kwargs)
        if trouble is not None and _place(self.places) is None:
            raise Waits(trouble)
        return func(*args, **kwargs)


def _trouble_below(name: str, args: tuple, kwargs: dict) -> str | None:
    if len({x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim}) > 1:
        return f"{name} of tensors on two devices"
    if name in READS_BELOW:
        return name
    if name in INDEXING and any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return "an index that is a mask"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "repeat_interleave of an unknown length"
    if name in ("lift_fresh", "lift") and args[0].ndim:  # a single number goes along with the launch
        return "a tensor made of the host's numbers"
    if name == "_to_copy" and kwargs.get("device") is not None:
        return "a copy to another device"
    return None
