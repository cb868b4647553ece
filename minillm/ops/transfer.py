"""The two transfers of a step: one copy of its inputs to the device, one read of its results on the host.

Between the two nothing waits for the device. A copy from pageable memory would wait: it returns only when the device
has finished all earlier work, and so does every `torch.tensor(…, device="cuda")`. From pinned memory the device copies
asynchronously. These wait too, and so must not be used in a step: `.item()`, `.tolist()`, `bool(tensor)`, `nonzero`, an
index that is a list or a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def copy_to_device(columns: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy columns of int64 or fp64, of any lengths, to `device` under the same names: one copy, without waiting.

    Each column begins at a multiple of 16 bytes, because Triton compiles a kernel again for pointers that are not
    aligned so. No reference to the pinned memory is kept: PyTorch does not reuse it before the copy is done.
    """
    if not columns:
        return {}
    begins = [0, *accumulate(len(column) + len(column) % 2 for column in columns.values())]
    words = torch.empty(begins.pop(), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    host = words.numpy()
    for begin, column in zip(begins, columns.values(), strict=True):
        host[begin : begin + len(column)] = column.view(np.int64)
    device_words, sent = words.to(device, non_blocking=True), {}
    for begin, (name, column) in zip(begins, columns.items(), strict=True):
        part = device_words[begin : begin + len(column)]
        sent[name] = part if column.dtype == np.int64 else part.view(torch.float64)
    return sent


def indices_on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to `device` without waiting: `[len(values)]` int64."""
    return copy_to_device({"values": np.array(values, np.int64)}, device)["values"]


def copy_to_host(*results: Tensor) -> list[list[int]]:
    """Return vectors of integers and flags (1 or 0) as lists. Waits for the device, once for all of them."""
    flat = iter(torch.cat([result.long() for result in results]).tolist())
    return [[next(flat) for _ in range(len(result))] for result in results]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current GPU, if it is a GPU: kernels are launched on the current GPU, wherever their tensors
    are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
