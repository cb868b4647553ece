"""Resolves the name of a model to a local folder: bundled, local, or from the Hugging Face hub."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from minillm.errors import CheckpointError
from minillm.json_files import short_repr
from minillm.models import bundled

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "*.tiktoken"]
UNWANTED = ["*/*.json", "*/*.safetensors", "*/*.tiktoken", "consolidated*"]
"""Sub-folders hold other formats, and further chat templates (`*.jinja`), which are wanted; Mistral's `consolidated`
files duplicate the weights."""
NOT_STORED = {errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""Errors of a disk that is full or must not be written to. Windows has no quota error."""
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How Rust, in which a part of the hub's client is written, names the number of an operating system's error."""


def resolve(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a bundled model, a local checkpoint, or a hub id (downloaded once, then cached).

    Raises `CheckpointError` if `name` is none of the three, or the download fails.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise CheckpointError(f"model {short_repr(name)} must be a name or a path, as text")
    name = os.fsdecode(name)
    if not name:  # as a path it would be the current folder
        raise CheckpointError("the name of the model is empty; give a bundled name, a folder or a hub id")
    if name in bundled.names():
        return bundled.path(name)
    try:
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (RuntimeError, ValueError, OSError) as problem:  # unknown home directory, a null byte, a name too long
        reason = getattr(problem, "strerror", None) or problem
        raise CheckpointError(f"no model {short_repr(name)}: {reason}") from None
    if is_folder:
        return folder
    if exists:
        raise CheckpointError(f"{name} is a file; give the folder that contains config.json and the safetensors files")
    if HUB_ID.fullmatch(name):
        return _download(name)
    raise CheckpointError(
        f"no model {short_repr(name)}: it is not a bundled model ({', '.join(bundled.names()) or 'there are none'}), "
        "not a local folder, and not a hub id of the form owner/name"
    )


def _download(hub_id: str) -> Path:
    # Imported here: most runs never need the hub, and it is slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError:
        fix = "the model is gated: accept its terms on the model's page, then log in with `hf auth login`"
    except RepositoryNotFoundError:
        fix = "the hub has no model of this name, and there is no such local folder; check the spelling"
    except HFValidationError as problem:
        fix = f"this is no valid name on the hub ({problem}); check the spelling"
    except Exception as problem:  # the client does not wrap the errors of its HTTP library
        if _error_number(problem) in NOT_STORED:
            fix = f"its files cannot be stored ({problem}); free space, or set HF_HOME to a folder that can be written"
        else:
            fix = (
                f"it is not in the local cache, and it cannot be downloaded ({_first_line(problem)}); run "
                f"`hf download {hub_id} --local-dir FOLDER` on a machine with a network, then give FOLDER"
            )
    raise CheckpointError(f"cannot load {hub_id}: {fix}")


def _error_number(problem: Exception) -> int | None:
    if isinstance(problem, OSError) and problem.errno is not None:
        return problem.errno
    found = OS_ERROR.search(str(problem))
    return int(found[1]) if found else None


def _first_line(problem: Exception) -> str:
    line = str(problem).strip().split("\n")[0]
    return f"{type(problem).__name__}: {line[:200]}" if line else type(problem).__name__
