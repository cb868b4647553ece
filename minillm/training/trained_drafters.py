"""The drafters that `minillm train` trains for a finished, frozen target. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.speculative.draft_heads import DraftHeads, HeadsShape
from minillm.speculative.long_model import LongModel, LongShape
from minillm.speculative.prompt_tokens import PromptTokens, PromptTokensShape
from minillm.speculative.spire_model import SpireModel, SpireShape
from minillm.speculative.target_parts import TargetParts
from minillm.training import heads_loss, prompt_tokens_loss, rollouts
from minillm.training.drafter_evaluation import Guesses
from minillm.training.heads_loss import HeadsLoss, guessed_logits
from minillm.training.pretrain import Loss, Recipe, initialise
from minillm.training.prompt_tokens_loss import PromptTokensLoss, prompted
from minillm.training.rollouts import LongLoss, SpireLoss, long_guesses, spire_guesses
from minillm.training.target_states import Targets, target_states, targets_of_roots


@dataclass(frozen=True)
class TrainedDrafter:
    """One drafter in training. Its module has an attribute `shape`, a dataclass."""

    minutes: float
    """Default training time on a CPU."""
    recipe: Callable[[float], Recipe]
    """Minutes → recipe."""
    new_module: Callable[[Decoder], nn.Module]
    """Target → a newly initialised module."""
    loss: Callable[[Decoder], Loss]
    """Target → the loss for `Trainer`."""
    loss_formula: str
    guesses: Guesses
    """What it drafts on given text, for evaluation."""
    sure_drafts: int = 0
    """Drafts of each round before the trained ones, which are always accepted."""


def _drafter_recipe(minutes: float) -> Recipe:
    """Short rows: a drafter learns what the target's last states say, not what long contexts are. Small steps: there
    are few numbers to learn, and each token is compared with several drafts."""
    return Recipe(minutes, lengths=(256,), tokens_per_step=2048, tokens_at_once=2048, decay_from=0.3)


def _prompt_tokens_recipe(minutes: float) -> Recipe:
    """Few numbers, all trained by AdamW."""
    return Recipe(minutes, lengths=(256,), tokens_per_step=4096, tokens_at_once=2048, decay_from=0.3, adam_lr=1e-2)


def _copied_recipe(minutes: float) -> Recipe:
    """For drafts that start as copies of the target's blocks: half of the rates, as for any trained weights."""
    return Recipe(
        minutes,
        tokens_per_step=4096,
        tokens_at_once=2048,
        lengths=(256,),
        decay_from=0.3,
        warmup_steps=10,
        muon_lr=0.01,
        adam_lr=1.5e-3,
    )


def new_heads(target: Decoder, seed: int = 0) -> DraftHeads:
    """Newly initialised heads, the same for the same seed."""
    torch.manual_seed(seed)
    heads = DraftHeads(HeadsShape(target.config.hidden_size, norm_eps=target.config.rms_norm_eps))
    heads.initialise()
    return heads


def new_prompt_tokens(target: Decoder, seed: int = 0) -> PromptTokens:
    """Newly initialised prompt tokens, the same for the same seed."""
    torch.manual_seed(seed)
    prompts = PromptTokens(PromptTokensShape(target.config.hidden_size))
    prompts.initialise(target)
    return prompts


def new_spire(target: Decoder, seed: int = 0, from_target: bool = True, **shape: Any) -> SpireModel:
    """The draft with copies of the target's last blocks, or newly initialised. `shape`: fields of `SpireShape`."""
    torch.manual_seed(seed)
    model = SpireModel(SpireShape(target.config.hidden_size, **shape), TargetParts(target))
    if from_target:
        model.copy_blocks_of(target)
    else:
        initialise(model)
    return model


def new_long(target: Decoder, seed: int = 0, **shape: Any) -> LongModel:
    """The draft with copies of the target's last block. `shape`: fields of `LongShape`."""
    torch.manual_seed(seed)
    model = LongModel(LongShape(target.config.hidden_size, **shape), TargetParts(target))
    model.copy_block_of(target)
    return model


def _guesses_of_heads(heads: DraftHeads, target: Decoder, inputs: Tensor, targets: Tensor) -> tuple[Targets, Tensor]:
    states = target_states(target, inputs)
    compared = targets_of_roots(states, targets, heads.shape.num_drafts)
    return compared, F.log_softmax(guessed_logits(heads, target, states, compared), dim=-1)


def guesses_of_prompts(
    prompts: PromptTokens, target: Decoder, inputs: Tensor, targets: Tensor, alone: bool = False
) -> tuple[Targets, Tensor]:
    """See `drafter_evaluation.Guesses`. `alone`: no prompt token attends to another."""
    states, logits = prompted(prompts, target, inputs, alone)
    return targets_of_roots(states, targets, prompts.shape.num_drafts), F.log_softmax(logits, dim=-1)


TRAINED: dict[str, TrainedDrafter] = {
    "heads": TrainedDrafter(20.0, _drafter_recipe, new_heads, HeadsLoss, heads_loss.LOSS_FORMULA, _guesses_of_heads),
    "prompt_tokens": TrainedDrafter(
        10.0,
        _prompt_tokens_recipe,
        new_prompt_tokens,
        PromptTokensLoss,
        prompt_tokens_loss.LOSS_FORMULA,
        guesses_of_prompts,
        sure_drafts=1,
    ),
    "spire": TrainedDrafter(20.0, _copied_recipe, new_spire, SpireLoss, rollouts.LOSS_FORMULA, spire_guesses),
    "long": TrainedDrafter(20.0, _copied_recipe, new_long, LongLoss, rollouts.LOSS_FORMULA, long_guesses),
}
"""Method → how its weights are trained."""
