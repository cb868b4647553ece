"""What all stages of training share: running a recipe to its end, and rounding a model as it is exported."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from minillm.training.export import EXPORTED, export
from minillm.training.pair import Pair
from minillm.training.pretrain import Trainer
from minillm.training.record import Hardware, RecipeFrom
from minillm.training.stage_inputs import check_budget
from minillm.training.state_files import only_writer


def run_to_the_end(stage: str, trainer: Trainer) -> None:
    """Train by the trainer's recipe, unless that is finished. Raises `TrainingError` if the run was started with
    another budget, or another process trains in its folder."""
    if trainer.progress < 1:
        with only_writer(trainer.folder):
            trainer.load_newer()  # another process may have trained on until this one took the lock
            if trainer.progress < 1:
                check_budget(trainer.folder, trainer.recipe)
                Hardware.here(trainer.device).append_to(trainer.folder)
                RecipeFrom(trainer.tokens_seen, trainer.recipe.without_budget()).append_to(trainer.folder)
                trainer.run()
                return
    tqdm.write(f"{stage}: done ({trainer.tokens_seen:,} tokens in {trainer.seconds / 60:.1f} minutes)")


def finished_target(pair: Pair) -> Path:
    """Export the pair's target and return the folder. Raises `TrainingError` if its last stage is not finished."""
    folder = pair.folder / "finished"
    export(pair.trained_target(), pair.corpus / "tokenizer.json", folder)
    return folder


def as_shipped(model: nn.Module) -> nn.Module:
    """Round the weights of `model` as they are exported, so that the exported model is evaluated."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(EXPORTED))
    return model
