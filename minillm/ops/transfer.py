"""The two crossings of a step: what the device must know goes over in one copy, what it found comes back in one read.

Between the two nothing waits. A copy from ordinary memory would: it returns only when the device has worked off all it
was given before, and so does every `torch.tensor(…, device="cuda")`. From pinned memory the device fetches the numbers
itself when it gets there. What else waits, and so must not stand in a step: `.item()`, `.tolist()`, `bool(tensor)`,
`nonzero`, an index that is a list or a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def send(columns: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Columns of int64 or fp64, of any lengths, as tensors on `device` by the same names: one copy, and no wait for it.

    Each begins at a multiple of 16 bytes, as Triton wants to know of every pointer: it compiles a kernel once more for
    pointers that do not. The pinned memory belongs to the copy until it is done, although nothing here holds on to it:
    PyTorch gives it to nobody else before that.
    """
    if not columns:
        return {}
    begins = [0, *accumulate(len(column) + len(column) % 2 for column in columns.values())]
    words = torch.empty(begins.pop(), dtype=torch.int64, pin_memory=device.type == "cuda")
    here = words.numpy()
    for begin, column in zip(begins, columns.values(), strict=True):
        here[begin : begin + len(column)] = column.view(np.int64)
    there, sent = words.to(device, non_blocking=True), {}
    for begin, (name, column) in zip(begins, columns.items(), strict=True):
        part = there[begin : begin + len(column)]
        sent[name] = part if column.dtype == np.int64 else part.view(torch.float64)
    return sent


def read(*results: Tensor) -> list[list[int]]:
    """Vectors of integers and flags (1 or 0) as lists: where a step waits for the device, once for all of them."""
    flat = iter(torch.cat([result.long() for result in results]).tolist())
    return [[next(flat) for _ in range(len(result))] for result in results]


def current(device: torch.device) -> AbstractContextManager[object]:
    """In here `device` is the current GPU, if it is one: kernels are launched on the current one, which need not be
    where their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
