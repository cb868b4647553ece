"""Copies weights from their file to the model, a megabyte at a time, through a small staging buffer.

So the host memory that loading needs in addition to the model does not grow with the model. A GPU copies
asynchronously only from pinned memory. For a GPU there are two pinned buffers: one is filled from the file while the
other is copied, and a buffer is refilled only after its copy has finished. (Waiting and copying are tested with a
simulated GPU; the speed on a real one has not been measured.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from minillm.models.shards import Shards

PIECE_BYTES = 2**20
"""Large enough that opening and seeking cost little compared with reading; small enough that the temporaries of
quantising a piece stay in the L2 cache."""


class Staging:
    """Reads tensors of a checkpoint in pieces of several rows, and copies them to `device`."""

    def __init__(self, shards: Shards, device: torch.device | str = "cpu") -> None:
        self.shards, self.device = shards, torch.device(device)
        self._buffers = cycle([_HostBuffer(self.device) for _ in range(2 if self.device.type == "cuda" else 1)])

    def pieces(self, name: str, rows: range | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in pieces, in its stored dtype and on the device: the index of the first row, and the rows.

        `rows`: only these, consecutive; None: all. A piece is valid until the next is requested. Raises
        `CheckpointError` if the file is truncated.
        """
        shape, dtype = self.shards.header(name)[1], self.shards.dtype(name)
        row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        if 0 in shape:
            return
        step = max(1, PIECE_BYTES // row_bytes)
        rows = range(shape[0]) if rows is None else rows
        for first in rows[::step]:
            buffer = next(self._buffers)
            host = buffer.tensor((min(step, rows.stop - first), *shape[1:]), dtype)
            self.shards.read(name, host, first)
            yield first, buffer.send(host)

    def copy(self, name: str, target: Tensor) -> None:
        """Copy a tensor to `target`, of the same shape and on the device. The device casts it to `target`'s dtype."""
        for first, piece in self.pieces(name):
            target.narrow(0, first, len(piece)).copy_(piece)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal in shape, dtype and values."""
        if self.shards.header(name) != self.shards.header(other):
            return False
        twin = Staging(self.shards, self.device)
        pairs = zip(self.pieces(name), twin.pieces(other), strict=True)
        return all(torch.equal(piece, others) for (_, piece), (_, others) in pairs)


class _HostBuffer:
    """A reusable buffer in host memory; pinned if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = host_memory(0, device)
        self._copy: Copy | None = None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in this memory, after waiting for the previous copy from it."""
        if self._copy is not None:
            self._copy.synchronize()
        needed = torch.Size(shape).numel() * dtype.itemsize
        if self._memory.nbytes < needed:
            self._memory = host_memory(needed, self.device)
        return self._memory[:needed].view(dtype).view(shape)

    def send(self, host: Tensor) -> Tensor:
        """Return `host` on the device. On a GPU the copy may still be running."""
        sent, self._copy = send(host, self.device)
        return sent


class Copy(Protocol):
    """A copy that may still be running, such as a recorded `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the copy has finished."""


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate bytes in host memory; pinned if `device` is a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def send(host: Tensor, device: torch.device) -> tuple[Tensor, Copy | None]:
    """Return `host` on `device`, and the copy if it may still be running. On the CPU it is `host` itself."""
    if device.type != "cuda":
        return host.to(device), None
    sent, copy = host.to(device, non_blocking=True), torch.cuda.Event()
    copy.record(torch.cuda.current_stream(device))
    return sent, copy
