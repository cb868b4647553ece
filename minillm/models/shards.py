"""The tensors of a checkpoint folder: one or more safetensors files, read a few rows at a time.

The files are read, not memory-mapped: a touched page of a mapped file counts as memory of this process until the file
is unmapped, so at the end of loading the whole file would count in addition to the whole model.
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
from minillm.json_files import read_json, short_repr, validated

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
"""PyTorch dtypes by their safetensors names."""


class Index(msgspec.Struct):
    """The part of a multi-file checkpoint's index that minillm reads."""

    weight_map: Annotated[dict[str, str], Meta(min_length=1, description="an object with a file name for every tensor")]


@dataclass(frozen=True)
class Stored:
    """The location of one tensor."""

    file: Path
    start: int
    """Offset of its first byte in the file."""
    dtype: str
    shape: tuple[int, ...]


class Shards:
    """The tensors of a checkpoint, by stored name. It keeps only headers in memory and no file open.

    Raises `CheckpointError` if the folder has no safetensors, or a file is missing, truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, Stored] = {}
        for path in weight_files(folder):
            found = dict(_read_header(path))
            duplicates = sorted(found.keys() & self._stored.keys())
            if duplicates:
                name = duplicates[0]
                raise CheckpointError(
                    f"{name} is stored twice, in {self._stored[name].file.name} and in {path.name}; fetch the "
                    "checkpoint again"
                )
            self._stored.update(found)

    def rename(self, name: str, new: str) -> None:
        """Give a tensor another name."""
        self._stored[new] = self._stored.pop(name)

    @property
    def names(self) -> set[str]:
        """The stored names of all tensors."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header. Raises `CheckpointError` if its dtype is not a plain float."""
        dtype, shape = self.header(name)
        if dtype not in FLOATS:
            raise CheckpointError(f"{name} is stored as {dtype}; quantised checkpoints are not supported")
        return shape

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The safetensors dtype of a tensor, and its shape, without reading the file."""
        stored = self._stored[name]
        return stored.dtype, stored.shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor. Raises `CheckpointError` for an unsupported one."""
        stored = self._stored[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{name} is stored as {stored.dtype}; supported are {', '.join(DTYPES)}")
        return DTYPES[stored.dtype]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor to the CPU, in its stored dtype."""
        tensor = torch.empty(self._stored[name].shape, dtype=self.dtype(name), device="cpu")
        self.read(name, tensor)
        return tensor

    def read(self, name: str, into: Tensor, first_row: int = 0) -> None:
        """Fill `into` (on the CPU, contiguous, in the stored dtype) with the rows of a tensor from `first_row` on.

        Raises `CheckpointError` if the file has been truncated since its header was read.
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


def _read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield name and location of each tensor in a file. Raises `CheckpointError` if safetensors rejects its header."""
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass  # checks that the tensors lie within the file, without gaps or overlaps
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
    """Return the safetensors files of the checkpoint. Raises `CheckpointError` if there are none."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _files_of_index(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} contains {', '.join(pickles[:3])}, but minillm reads only safetensors: unpickling runs code from"
            " the file. If you trust it, load it with transformers and save_pretrained() it to a new folder"
        )
    raise CheckpointError(
        f"{folder} contains neither {SINGLE} nor {INDEX}: minillm reads only safetensors. If the model is published in "
        "another format, load it with transformers and save_pretrained() it to a new folder"
    )


def _files_of_index(folder: Path) -> list[Path]:
    """Return the files that the index names. Each name must be in the folder itself, but may be a symbolic link."""
    try:
        index = validated(read_json(folder / INDEX), Index)
    except CheckpointError as problem:
        raise CheckpointError(f"{folder / INDEX} is not a valid index ({problem}); fetch it again") from None
    names = sorted(set(index.weight_map.values()))
    outside = [name for name in names if Path(name).name != name or len(name) > 200 or {*name} & {"\\", "\0"}]
    if outside:
        raise CheckpointError(f"{folder / INDEX} names {short_repr(outside[0])}, which is not a file in its folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        listing = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise CheckpointError(f"{folder} lacks {listing} of its {len(names)} weight files; fetch them again")
    return [folder / name for name in names]
