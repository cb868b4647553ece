"""The tensors of a checkpoint folder: one safetensors file or several, opened together and read one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
FLOATS = {"F64", "F32", "F16", "BF16"}


class Shards:
    """Tensors by stored name. Files are mapped into memory, so a tensor costs nothing until it is copied.

    Raises `CheckpointError` for a folder without safetensors, and for files that are missing, truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as problem:
                raise CheckpointError(f"{path} is truncated or corrupt ({problem}); fetch it again") from None
            self._file_of.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> set[str]:
        """The stored names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header. Raises `CheckpointError` if it holds no plain floats."""
        dtype, shape = self.header(name)
        if dtype not in FLOATS:
            raise CheckpointError(f"{name} is stored as {dtype}; quantised checkpoints are not read")
        return shape

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype of a tensor, as safetensors call it, and its shape. Nothing is read for it."""
        header = self._file_of[name].get_slice(name)
        return header.get_dtype(), tuple(header.get_shape())

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU, in the dtype that it is stored in."""
        return self._file_of[name].get_tensor(name)


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
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{folder / INDEX} is no index of safetensors ({problem!r}); fetch it again") from None
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)} of its {len(files)} weight files; fetch them again")
    return files
