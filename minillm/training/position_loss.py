"""Loss by position: whether a model's loss on held-out files falls with the number of tokens in its context.

Later positions have other text, too: files begin with a licence and imports. So each band is measured twice, in whole
files and in windows as short as the first band. Only the difference of the two comes from the longer context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
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
    """Mean cross-entropy in nats per token, each file read from its beginning."""
    tokens: int
    short_loss: float
    """The same, each file read in windows of as many tokens as the first band has: the context is never longer."""


@torch.no_grad()
def loss_by_position(model: Decoder, files: Sequence[np.ndarray], edges: Sequence[int] = EDGES) -> list[Band]:
    """The loss in each band between `edges`, over those `files` (token ids, `[length]`) that reach the last band's end.

    Raises `TrainingError` if no file has more than `edges[-1]` tokens.
    """
    longest = edges[-1]
    long = [file[: longest + 1] for file in files if len(file) > longest]
    if not long:
        most = max(map(len, files), default=0)
        raise TrainingError(
            f"no held-out file has more than {longest} tokens, the longest has {most}; collect longer files"
        )
    device = model.embed_tokens.weight.device
    whole, short = torch.zeros(2, longest, dtype=torch.float64)
    for file in tqdm(long, desc="loss by position", unit=" files", leave=False):
        tokens = torch.from_numpy(file.astype(np.int64)).to(device)
        whole += _losses(model, tokens, longest)
        short += _losses(model, tokens, edges[1] - edges[0])
    return [
        Band(
            first,
            last,
            whole[first:last].mean().item() / len(long),
            (last - first) * len(long),
            short[first:last].mean().item() / len(long),
        )
        for first, last in pairwise(edges)
    ]


def _losses(model: Decoder, tokens: Tensor, window: int) -> Tensor:
    """The loss of all `tokens` (`[length + 1]`) but the first, in windows of `window` tokens → `[length]`, float64."""
    losses = [
        F.cross_entropy(dense_logits(model, inputs[None]).float(), targets, reduction="none")
        for inputs, targets in zip(tokens[:-1].split(window), tokens[1:].split(window), strict=True)
    ]
    return torch.cat(losses).double().cpu()
