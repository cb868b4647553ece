"""What all stages of training share: running a recipe to its end, and checking that its inputs are still the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.training.export import EXPORTED
from minillm.training.pretrain import Trainer
from minillm.training.record import Hardware


def run_to_the_end(stage: str, trainer: Trainer) -> None:
    """Train by the trainer's recipe, unless that is finished."""
    if trainer.progress >= 1:
        tqdm.write(f"{stage}: done ({trainer.tokens_seen:,} tokens in {trainer.seconds / 60:.1f} minutes)")
        return
    Hardware.here().append_to(trainer.folder)
    trainer.run()


def check_inputs(folder: Path, inputs: dict[str, int] | dict[str, str]) -> None:
    """Record what a stage started from. Raises `TrainingError` if it was started from something else."""
    file = folder / "inputs.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(inputs) + "\n")
    elif (started := json.loads(file.read_text())) != inputs:
        raise TrainingError(f"{folder} was started with {started}, now there is {inputs}; remove it to start again")


def as_shipped(model: nn.Module) -> nn.Module:
    """Round the weights of `model` as they are exported, so that the exported model is evaluated."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(EXPORTED))
    return model
