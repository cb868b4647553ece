"""The way of weights from their file to where they will live: a megabyte at a time, through one piece of memory.

So loading needs no memory beside the model's own that grows with the model, on a CPU or before a GPU. A GPU reads
host memory by itself only where that is pinned. There are two pinned pieces for it: one is filled from the file while
the other is copied, and before a piece is filled again its copy is waited for. (The waiting and the copying are tested
with a stand-in for the GPU; how fast it is there has not been measured.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from minillm.models.shards import Shards

PIECE_BYTES = 2**20
"""Large enough that opening a file and seeking cost nothing beside reading so much; small enough that the few copies
which quantising makes of a piece stay in a processor's second cache."""


class Staging:
    """Reads tensors of a checkpoint in pieces, each of some rows, and brings them to `device`."""

    def __init__(self, shards: Shards, device: torch.device | str = "cpu") -> None:
        self.shards, self.device = shards, torch.device(device)
        self._pieces = cycle([_HostPiece(self.device) for _ in range(2 if self.device.type == "cuda" else 1)])

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The rows of a tensor in their stored dtype, on the device: number of the first row, and some rows from there.

        A piece is good until the next is asked for. Raises `CheckpointError` if the file ends too soon.
        """
        shape, dtype = self.shards.header(name)[1], self.shards.dtype(name)
        row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        if 0 in shape:
            return
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, shape[0], step):
            piece = next(self._pieces)
            host = piece.tensor((min(step, shape[0] - first), *shape[1:]), dtype)
            self.shards.read(name, host, first)
            yield first, piece.sent(host)

    def copy(self, name: str, target: Tensor) -> None:
        """Copy a tensor to `target`, which has its shape, on the device; the dtype is changed there."""
        for first, piece in self.pieces(name):
            target.narrow(0, first, len(piece)).copy_(piece)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are one and the same: shape, dtype and numbers."""
        if self.shards.header(name) != self.shards.header(other):
            return False
        twin = Staging(self.shards, self.device)
        pairs = zip(self.pieces(name), twin.pieces(other), strict=True)
        return all(torch.equal(piece, others) for (_, piece), (_, others) in pairs)


class _HostPiece:
    """Host memory that is filled, sent and filled again; for a GPU it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = host_memory(0, device)
        self._copy: Copy | None = None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in this memory, once nobody reads from there any more."""
        if self._copy is not None:
            self._copy.synchronize()
        needed = torch.Size(shape).numel() * dtype.itemsize
        if self._memory.nbytes < needed:
            self._memory = host_memory(needed, self.device)
        return self._memory[:needed].view(dtype).view(shape)

    def sent(self, host: Tensor) -> Tensor:
        """`host` on the device. On a GPU the copy may still be under way."""
        sent, self._copy = send(host, self.device)
        return sent


class Copy(Protocol):
    """A copy that may still be under way, such as `torch.cuda.Event` stands for."""

    def synchronize(self) -> None:
        """Return once it is done."""


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes on the CPU that `device` can read."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def send(host: Tensor, device: torch.device) -> tuple[Tensor, Copy | None]:
    """`host` on `device`, and the copy if it is not done yet. On the CPU it is `host` itself."""
    if device.type != "cuda":
        return host.to(device), None
    sent, copy = host.to(device, non_blocking=True), torch.cuda.Event()
    copy.record(torch.cuda.current_stream(device))
    return sent, copy
