"""A short hash that tells two trained models of the same shape apart."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from minillm.models.decoder import Decoder
from minillm.models.loading import stored_tensors
from minillm.models.shards import Shards


def fingerprint_of_folder(folder: Path) -> str:
    """The fingerprint of a checkpoint. Quantised checkpoints have that of the original. Raises `CheckpointError` if
    the folder has no readable safetensors."""
    shards = Shards(folder)
    return _fingerprint((name, shards.tensor(name)) for name in sorted(filter(_is_norm, shards.names)))


def fingerprint_of_model(model: Decoder, dtype: torch.dtype) -> str:
    """The fingerprint that `model` has once it is saved as a Llama checkpoint in `dtype`."""
    norms = sorted((name, tensor) for name, tensor in stored_tensors(model) if _is_norm(name))
    return _fingerprint((name, tensor.detach().cpu().to(dtype)) for name, tensor in norms)


def _is_norm(name: str) -> bool:
    """Whether this is the weight of a norm: these are few numbers, in floats in every format, and training changes all
    of them."""
    return "norm" in name and name.endswith(".weight")


def _fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
