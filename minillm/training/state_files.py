"""Files of a training run on disk: written whole or not at all, and read with an error that names the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from minillm import whole_file
from minillm.errors import TrainingError, first_line


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """See `whole_file.replacing`. Raises `TrainingError` if the file cannot be written."""
    with write_errors(file), whole_file.replacing(file) as fresh:
        yield fresh


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """A new folder to write files to. At the end of the block each takes the place of the file of its name in `folder`;
    if the block fails, all old files stay. Processes that have an old file memory-mapped keep it.

    The old `config.json` is removed first, and the new one comes last: a drafter's says which target its weights are
    for, and a folder without one is not loaded. Raises `TrainingError` if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with write_errors(folder), tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        fresh = Path(temporary)
        yield fresh
        (folder / "config.json").unlink(missing_ok=True)
        for file in sorted(fresh.iterdir(), key=lambda file: file.name == "config.json"):
            file.chmod(0o644)
            file.replace(folder / file.name)


@contextmanager
def write_errors(place: Path) -> Iterator[None]:
    """Raise `TrainingError` for what Python, `torch.save` and safetensors raise if `place` cannot be written. An error
    of the memory or the GPU, from which `torch.save` copies, is raised as it is."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as problem:
        if isinstance(problem, RuntimeError) and MEMORY_OR_GPU_ERROR.search(str(problem)):
            raise
        raise TrainingError(
            f"{place} cannot be written ({first_line(problem)}); make free space there, or name another folder"
        ) from problem


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. The system takes it from a process that ends, also from one that is killed.

    Raises `TrainingError`, which names the process, if another one holds it. Where there are no such locks (Windows,
    some network drives), nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise TrainingError(
                f"process {file.read()} trains in {folder}; wait for its end, or name another folder with --folder"
            ) from None
        except OSError:
            yield
            return
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        for part in folder.glob(f"{STATE}.*.new"):  # of a process that was killed while it saved
            part.unlink()
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the file open still


def write_json(file: Path, values: Any, indent: int | None = 1) -> None:
    """Write `values` as one whole file."""
    with replacing(file) as fresh:
        fresh.write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8")


def write_array(file: Path, array: np.ndarray) -> None:
    """Write an array as one whole `.npy` file."""
    with replacing(file) as fresh, fresh.open("wb") as out:
        np.save(out, array)


def write_state(file: Path, state: Any) -> None:
    """Write a state of `torch.save` as one whole file."""
    with replacing(file) as fresh:
        torch.save(state, fresh)


def copy_whole(source: Path, file: Path) -> None:
    """Copy `source` to `file`, as one whole file."""
    with replacing(file) as fresh:
        shutil.copyfile(source, fresh)  # not its mode: a read-only file could not be synced


def read_json(file: Path) -> Any:
    """Read a JSON file of a run. Raises `TrainingError` if it is cut off or no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:  # UnicodeDecodeError is a ValueError
        raise TrainingError(
            f"{file} is cut off or no JSON ({problem}); restore it, or remove {file.parent} to start again"
        ) from None


def read_state(file: Path, device: str | torch.device, mmap: bool = False) -> dict[str, Any]:
    """Read a state that `write_state` wrote. Raises `TrainingError` if it is cut off or of something else."""
    try:
        state = torch.load(file, weights_only=True, mmap=mmap, map_location=device)
    except Exception as problem:  # what PyTorch raises depends on where the file ends
        raise TrainingError(
            f"{file} is cut off or no state of a run ({first_line(problem)}); restore it, or remove {file.parent} "
            "to start again"
        ) from None
    missing = STATE_KEYS - set(state if isinstance(state, dict) else ())
    if missing:
        raise TrainingError(f"{file} is no state of a run: it has no {', '.join(sorted(missing))}")
    return state


def digest_of_file(file: Path) -> str:
    """A hash of the content of a file."""
    return sha256(file.read_bytes()).hexdigest()[:16]


def digest_of_state(state: dict[str, Any]) -> str:
    """A hash of the weights of a state that `read_state` read."""
    digest = sha256()
    for name, weight in sorted(state["model"].items()):
        digest.update(name.encode())
        digest.update(weight.cpu().contiguous().numpy())
    return digest.hexdigest()[:16]


MEMORY_OR_GPU_ERROR = re.compile("CUDA error|CUDA out of memory|you tried to allocate")
"""In the messages of PyTorch. Those of its file writer have nothing in common ("iostream error", "unexpected pos")."""
LOCK = "lock"
"""The file in the folder of a run whose lock `only_writer` holds; it contains the id of the last process that did."""
STATE = "state.pt"
"""The file of a state in the folder of its run."""
STATE_KEYS = frozenset({"model", "optimizers", "step", "tokens_seen", "tokens_before", "steps_before", "seconds"})
"""What a state of `Trainer` consists of."""
