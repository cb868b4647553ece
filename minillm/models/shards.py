"""The tensors of a checkpoint folder: one safetensors file or several, opened together, read a few rows at a time.

They are read, not mapped: a page of a mapped file counts as this process's memory from when it is touched until the
whole map goes, and by the end of loading that is the whole file beside the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.models.json_files import checked, read_json, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
FLOATS = {"F64", "F32", "F16", "BF16"}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names that safetensors use."""


class Index(msgspec.Struct):
    """What is read of the index of a checkpoint in several files."""

    weight_map: Annotated[
        dict[str, str], Meta(min_length=1, description="an object with the name of a file for every tensor")
    ]


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    file: Path
    start: int
    """Its first byte, counted from the beginning of the file."""
    dtype: str
    shape: tuple[int, ...]


class Shards:
    """Tensors by stored name. Only headers are kept in memory, and no file is left open.

    Raises `CheckpointError` for a folder without safetensors, and for files that are missing, truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, Stored] = {}
        for path in weight_files(folder):
            found = dict(_stored_in(path))
            twice = sorted(found.keys() & self._stored.keys())
            if twice:
                raise CheckpointError(
                    f"{twice[0]} is in {self._stored[twice[0]].file.name} and in {path.name}; which of them counts "
                    "cannot be told, so fetch the checkpoint again"
                )
            self._stored.update(found)

    @property
    def names(self) -> set[str]:
        """The stored names of all tensors."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header. Raises `CheckpointError` if it holds no plain floats."""
        dtype, shape = self.header(name)
        if dtype not in FLOATS:
            raise CheckpointError(f"{name} is stored as {dtype}; quantised checkpoints are not read")
        return shape

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype of a tensor, as safetensors call it, and its shape. Nothing is read for it."""
        stored = self._stored[name]
        return stored.dtype, stored.shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor. Raises `CheckpointError` for one that minillm has no use for."""
        stored = self._stored[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{name} is stored as {stored.dtype}; what is read is {', '.join(DTYPES)}")
        return DTYPES[stored.dtype]

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU, in the dtype that it is stored in, in memory of its own."""
        tensor = torch.empty(self._stored[name].shape, dtype=self.dtype(name), device="cpu")
        self.read(name, tensor)
        return tensor

    def read(self, name: str, into: Tensor, first_row: int = 0) -> None:
        """Fill `into` (on the CPU, contiguous, in the stored dtype) with the rows of a tensor from `first_row` on.

        Raises `CheckpointError` if the file ends too soon, which it did not when it was opened.
        """
        stored = self._stored[name]
        row_bytes = torch.Size(stored.shape[1:]).numel() * into.dtype.itemsize
        target = memoryview(into.reshape(-1).view(torch.uint8).numpy())
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.start + first_row * row_bytes)
            while target.nbytes:
                count = file.readinto(target)
                if not count:
                    raise CheckpointError(f"{stored.file} ends in the middle of {name}; fetch it again")
                target = target[count:]


def _stored_in(path: Path) -> Iterator[tuple[str, Stored]]:
    """What a file holds, by name. Raises `CheckpointError` unless safetensors itself finds its header right."""
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass  # checks that the tensors lie within the file, one behind the other
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as problem:
        reason = " ".join(str(problem).split())
        reason = reason if len(reason) < 200 else f"{reason[:200]}…"
        raise CheckpointError(f"{path} is truncated or corrupt ({reason}); fetch it again") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        yield name, Stored(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint. Raises `CheckpointError` if there are none."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _files_of_index(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds {', '.join(pickles[:3])}, but only safetensors are read: unpickling runs code from the "
            "file. If you trust it, load it with transformers and save_pretrained() it to a new folder"
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _files_of_index(folder: Path) -> list[Path]:
    """The files that the index names: each lies in the folder itself, whatever a link there leads to."""
    try:
        index = checked(read_json(folder / INDEX), Index)
    except CheckpointError as problem:
        raise CheckpointError(f"{folder / INDEX} is no index of safetensors ({problem}); fetch it again") from None
    names = sorted(set(index.weight_map.values()))
    outside = [name for name in names if Path(name).name != name or len(name) > 200 or {*name} & {"\\", "\0"}]
    if outside:
        raise CheckpointError(f"{folder / INDEX} names {shown(outside[0])}, which is no file of its own folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        listing = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise CheckpointError(f"{folder} lacks {listing} of its {len(names)} weight files; fetch them again")
    return [folder / name for name in names]
