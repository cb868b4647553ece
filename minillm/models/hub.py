"""From the name of a model to a folder on this machine: bundled, local, or from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from minillm.errors import CheckpointError
from minillm.models import bundled
from minillm.models.json_files import shown

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "*.tiktoken"]
UNWANTED = ["*/*", "consolidated*"]
"""Sub-folders hold other formats; Mistral's `consolidated` files hold the same weights a second time."""


def resolve(name: str) -> Path:
    """The folder of a bundled model, of a local checkpoint, or of a hub id (downloaded once, then from its cache).

    Raises `CheckpointError` if it is none of the three, or cannot be fetched.
    """
    if name in bundled.names():
        return bundled.path(name)
    try:
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (RuntimeError, ValueError, OSError) as problem:  # no such home, a zero byte, a name too long
        reason = getattr(problem, "strerror", None) or problem
        raise CheckpointError(f"no model {shown(name)}: {reason}") from None
    if is_folder:
        return folder
    if exists:
        raise CheckpointError(f"{name} is a file; give the folder that holds config.json and the safetensors")
    if HUB_ID.fullmatch(name):
        return _download(name)
    raise CheckpointError(
        f"no model {shown(name)}: it is no bundled one ({', '.join(bundled.names()) or 'there are none'}), no folder "
        "here, and no hub id, which reads owner/name"
    )


def _download(hub_id: str) -> Path:
    # Imported here: most runs never need the hub, and it is slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError:
        fix = "its owner asks for consent: give it on the model's page, then log in with `hf auth login`"
    except RepositoryNotFoundError:
        fix = "the hub knows no model of this name, and there is no such folder here; check the spelling"
    except Exception as problem:  # the client lets errors of its HTTP library through
        fix = (
            f"it is not in the local cache, and the hub cannot be reached ({type(problem).__name__}); fetch it where "
            f"there is a network with `hf download {hub_id} --local-dir FOLDER`, then give FOLDER"
        )
    raise CheckpointError(f"cannot load {hub_id}: {fix}")
