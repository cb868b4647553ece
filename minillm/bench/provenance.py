"""What a result was measured with: the git revision, the libraries, and the weights of the bundled models."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from minillm.models.bundled import WEIGHTS

PACKAGE = Path(__file__).resolve().parents[1]


@cache
def of_this_process() -> dict[str, str | bool | None]:
    """`revision` and `dirty` as they were when this was first called: this process has imported the files of then, and
    a benchmark that runs for an hour must not name those of its end."""
    return {"revision": revision(), "dirty": is_dirty()}


def revision() -> str | None:
    """The git revision of minillm; None if the package does not lie in a repository of its own."""
    return _git("rev-parse", "--short=12", "HEAD") or None


def is_dirty() -> bool | None:
    """Whether files of the package, weights included, differ from that revision; None as for `revision`."""
    changes = _git("status", "--porcelain", "--", ".")
    return None if changes is None else bool(changes)


def version(library: str) -> str | None:
    """The installed version of a library; None if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def weights_of(names: Iterable[Any], folder: Path = WEIGHTS) -> dict[str, str]:
    """Name → SHA-256 of the weights (`sha256_of_weights`), for each of `names` that is a bundled model or drafter."""
    found = {}
    for name in names:
        if isinstance(name, str) and name and Path(name).name == name and (folder / name).is_dir():
            found[name] = sha256_of_weights(folder / name)
    return found


def weights_of_config(config: Mapping[str, Any], folder: Path = WEIGHTS) -> dict[str, str]:
    """The same for the models that a benchmark's configuration names: `model`, `draft` and the list `drafters`."""
    return weights_of([config.get("model"), config.get("draft"), *(config.get("drafters") or ())], folder)


def sha256_of_weights(folder: Path) -> str:
    """SHA-256 of the safetensors files of a checkpoint, in the order of their names."""
    digest = sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    """What git prints in the repository whose root holds the package; None if there is none. An environment inside a
    repository of the user's is no such one."""
    try:
        top, done = (
            subprocess.run(["git", "-C", str(PACKAGE), *command], capture_output=True, text=True, check=False)
            for command in (("rev-parse", "--show-toplevel"), arguments)
        )
    except OSError:
        return None
    is_own = top.returncode == 0 and Path(top.stdout.strip()) == PACKAGE.parent
    return done.stdout.strip() if is_own and done.returncode == 0 else None
