"""Hashes that tell models apart: two trained models of the same shape, and two checkpoints that compute otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from minillm.models.shards import Shards

SAMPLES = 1024
"""Numbers of each tensor that tell models apart."""


def fingerprint_of_folder(folder: Path) -> str:
    """A hash of the norms of a checkpoint. Quantised checkpoints have that of the original, and so have fine-tunes that
    leave the norms as they are, such as merged LoRA: `digest_of_weights` tells these apart. Raises `CheckpointError` if
    the folder has no readable safetensors."""
    shards = Shards(folder)
    return _fingerprint((name, shards.tensor(name)) for name in sorted(filter(_is_norm, shards.names)))


def identity_of_folder(folder: Path) -> str:
    """A hash of what a checkpoint computes with: some numbers of every tensor, `config.json`, `generation_config.json`
    (the end-of-text tokens) and the tokenizer's files. Raises `CheckpointError` if the folder has no readable
    safetensors."""
    digest = sha256(digest_of_weights(folder).encode())
    configs = folder / "config.json", folder / "generation_config.json"
    for file in sorted([*configs, *folder.glob("tokenizer*")]):
        if file.is_file():
            digest.update(file.name.encode() + sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def digest_of_weights(folder: Path) -> str:
    """A hash of `SAMPLES` numbers of every tensor of a checkpoint: training, even of a few layers, changes it. Raises
    `CheckpointError` if the folder has no readable safetensors."""
    shards, digest = Shards(folder), sha256()
    for name in sorted(shards.names):
        numbers = shards.tensor(name).flatten()
        some = numbers[:: numbers.numel() // SAMPLES | 1].contiguous()  # an even step would skip columns
        digest.update(name.encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _is_norm(name: str) -> bool:
    """Whether this is the weight of a norm: these are few numbers, in floats in every format, and pretraining changes
    all of them."""
    return "norm" in name and name.endswith(".weight")


def _fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
