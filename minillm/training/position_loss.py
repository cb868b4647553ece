"""Loss by position: whether a model's loss on held-out files falls with the number of tokens in its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.models.decoder import Decoder
from minillm.training.pretrain import dense_logits

EDGES = (0, 500, 1000, 2000, 3000, 4000)
"""Boundaries of the bands of positions, in tokens."""


@dataclass(frozen=True)
class Band:
    """The mean loss at the positions `first` to `last - 1` of all files that are long enough for every band."""

    first: int
    last: int
    loss: float
    """Mean cross-entropy in nats per token."""
    tokens: int


@torch.no_grad()
def loss_by_position(model: Decoder, files: Sequence[np.ndarray], edges: Sequence[int] = EDGES) -> list[Band]:
    """The loss in each band between `edges`, over those `files` (token ids, `[length]`) that reach the last band's end.

    Every band has the same files, so the bands differ only in context, not in the kind of text. Raises `TrainingError`
    if no file has more than `edges[-1]` tokens.
    """
    longest = edges[-1]
    long = [file[: longest + 1] for file in files if len(file) > longest]
    if not long:
        most = max(map(len, files), default=0)
        raise TrainingError(
            f"no held-out file has more than {longest} tokens, the longest has {most}; collect longer files"
        )
    device = model.embed_tokens.weight.device
    total = torch.zeros(longest, dtype=torch.float64)
    for file in tqdm(long, desc="loss by position", unit=" files", leave=False):
        tokens = torch.from_numpy(file.astype(np.int64)).to(device)
        logits = dense_logits(model, tokens[None, :-1]).float()
        total += F.cross_entropy(logits, tokens[1:], reduction="none").double().cpu()
    mean = total / len(long)
    return [
        Band(first, last, mean[first:last].mean().item(), (last - first) * len(long)) for first, last in pairwise(edges)
    ]
