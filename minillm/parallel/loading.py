"""Loads one rank's part of a checkpoint: only its slices are kept, read a megabyte at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minillm.models.empty_weights import UninitialisedParameters
from minillm.models.loading import open_full_precision
from minillm.models.staging import Staging
from minillm.models.tensor_names import stored_parts
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.group import Group
from minillm.parallel.split import Piece, check_split, config_of_rank, piece_of


def load_part(folder: Path, group: Group, dtype: torch.dtype) -> ParallelDecoder:
    """Load what this rank holds of the checkpoint in `folder`, for inference.

    Raises `CheckpointError` as `load_model` does, `UnsupportedError` for a quantised checkpoint, and what `check_split`
    raises.
    """
    config, staging = open_full_precision(folder, group.device)
    check_split(config, group.size)
    with UninitialisedParameters(group.device, dtype, dtype):
        model = ParallelDecoder(config, group)
    model.tie()
    model.to(group.device)
    with torch.no_grad():
        for name, part in stored_parts(config_of_rank(config, group.size)).items():
            _copy(staging, name, piece_of(name, config, group.rank, group.size), part.of(model), group.rank)
    return model.requires_grad_(False).eval()


def _copy(staging: Staging, name: str, piece: Piece, target: Tensor, rank: int) -> None:
    """Copy a piece of a stored tensor to `target`. Rows of `target` that the piece does not fill become 0."""
    if piece.on_rank_0_only and rank:
        target.zero_()
        return
    first = piece.rows.start if piece.rows is not None else 0
    for row, rows in staging.pieces(name, piece.rows):
        part = rows if piece.columns is None else rows[:, piece.columns.start : piece.columns.stop]
        target.narrow(0, row - first, len(part)).copy_(part)
    if piece.rows is not None:
        target[len(piece.rows) :].zero_()
