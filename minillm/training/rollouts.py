"""Training drafters that read what the target has cached: on rollouts, as they draft.

A draft step sees the target's keys and values of the tokens before the rollout only, and knows of the others what the
draft itself has made of them. So it is trained on rollouts of `STEPS` tokens. They follow each other without a gap: one
batch trains every position once, in as many passes as a rollout has steps.

    row of tokens        0   1   2   3   4   5   6   7   8   9  …
    rollouts of 4            └───────────┘   └───────────┘           from `first_start` on, which changes with the batch
    at token 7 (step 2)      seen from the target: 0 … 4            from the rollout itself: 5, 6, 7

The loss of a drafted token, p the target's distribution and q the draft's, is ½ KL(p‖q) + ½ (1 − Σ min(p, q)): that of
SPIRe (Neelam et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.errors import TrainingError
from minillm.models.causal import CausalAttention
from minillm.models.decoder import Decoder
from minillm.speculative.long_model import NUM_ANCHORS, LongModel
from minillm.speculative.spire_model import Context, KVRows, Rollout, SpireModel
from minillm.training.divergence import kl_and_rejection
from minillm.training.precision import forward_precision
from minillm.training.target_states import Targets

STEPS = 4
"""Tokens of a rollout: SPIRe's k."""
LOSS_FORMULA = "0.5 · KL(p‖q) + 0.5 · (1 − Σ min(p, q))"


class RecordingAttention(CausalAttention):
    """Causal attention that keeps the keys and values of some layers, as a cache would store them."""

    def __init__(self, length: int, layers: Sequence[int]) -> None:
        super().__init__(length)
        self.layers = layers
        self.rows: list[KVRows] = []
        """`[rows, length, num_kv_heads, head_dim]` for each of `layers`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """See `CausalAttention.attend`."""
        if layer in self.layers:
            self.rows.append(KVRows(k.unflatten(0, (-1, self.length)), v.unflatten(0, (-1, self.length))))
        return super().attend(layer, q, k, v, batch)


@dataclass(frozen=True)
class TargetPass:
    """What the target computes of a batch."""

    logits: Tensor
    """`[rows, length, vocab]`."""
    rows: list[KVRows]
    """Keys and values of the recorded layers."""


def target_pass(target: Decoder, inputs: Tensor, positions: Tensor, layers: Sequence[int]) -> TargetPass:
    """Run the target, whose parameters are frozen, over `inputs` at `positions`, `[rows, length]` each, and record
    `layers`."""
    attention = RecordingAttention(inputs.shape[1], layers)
    with torch.enable_grad():  # without gradients, `Linear` would multiply in float32, whatever autocast says
        hidden = target(inputs.flatten(), positions.flatten(), attention)
        return TargetPass(target.logits(hidden).unflatten(0, inputs.shape), attention.rows)


def first_start(inputs: Tensor, steps: int) -> int:
    """Where the first rollout of a batch begins, 1 … `steps`. It depends on the batch alone, so that a run that was
    interrupted goes on as it would have."""
    return 1 + int(inputs[0].sum()) % steps


def num_rollouts(length: int, first: int, steps: int) -> int:
    """Whole rollouts of `steps` tokens in a row. Raises `TrainingError` if there is no room for one."""
    count = (length - first) // steps
    if count < 1:
        raise TrainingError(f"rows of {length} tokens are too short for rollouts of {steps}; use longer rows")
    return count


def draft_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """½ KL(p‖q) + ½ (1 − Σ min(p, q)), averaged over the tokens; `[…, vocab]` each."""
    log_q, log_p = F.log_softmax(logits.float(), dim=-1), F.log_softmax(target_logits.float(), dim=-1)
    kl, rejected = kl_and_rejection(log_p, log_q)
    return 0.5 * kl + 0.5 * rejected


def spire_logits(model: SpireModel, inputs: Tensor, rows: list[KVRows], first: int, steps: int) -> Tensor:
    """Logits of all rollouts of a batch, `[rows, rollouts, steps, vocab]`, from the target's keys and values."""
    count = num_rollouts(inputs.shape[1], first, steps)
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    context = Context(rows, positions) if model.shape.feedback else model.own_context(inputs, positions)
    starts = first + steps * torch.arange(count, device=inputs.device).expand(len(inputs), -1)
    rollout, hidden = Rollout(model.shape, context, starts), []
    for step in range(steps):
        hidden.append(model.step(rollout, inputs.gather(1, starts + step).flatten()))
    return model.target.logits(torch.stack(hidden, 1).flatten(0, 1)).unflatten(0, (len(inputs), count, steps))


def long_logits(model: LongModel, inputs: Tensor, positions: Tensor, rows: KVRows, first: int, steps: int) -> Tensor:
    """The same for `long`, whose rollouts need no order: each token's row follows from the tokens before it."""
    count, (num_rows, length) = num_rollouts(inputs.shape[1], first, steps), inputs.shape
    index = torch.arange(length, device=inputs.device)
    start = first + (index - first).div(steps, rounding_mode="floor") * steps
    hidden = model.over_texts(inputs, positions, rows, unseen=index >= start.unsqueeze(1))
    chosen = hidden.unflatten(0, (num_rows, length))[:, first : first + count * steps]
    return model.target.logits(chosen.flatten(0, 1)).unflatten(0, (num_rows, count, steps))


def rollout_targets(logits: Tensor, first: int, steps: int) -> Tensor:
    """What belongs to the tokens of the rollouts: `[rows, length, n]` → `[rows, rollouts, steps, n]`."""
    count = num_rollouts(logits.shape[1], first, steps)
    return logits[:, first : first + count * steps].unflatten(1, (count, steps))


def spire_guesses(model: SpireModel, target: Decoder, inputs: Tensor, targets: Tensor) -> tuple[Targets, Tensor]:
    """See `drafter_evaluation.Guesses`."""
    of_target, logits = _spire_pass(model, target, inputs, 1, STEPS)
    return _compared(of_target, logits, inputs, targets)


def long_guesses(
    model: LongModel, target: Decoder, inputs: Tensor, targets: Tensor, offsets: bool = False
) -> tuple[Targets, Tensor]:
    """See `drafter_evaluation.Guesses`. `offsets`: as if the texts were the ends of longer ones."""
    of_target, logits = _long_pass(model, target, inputs, 1, STEPS, offsets)
    return _compared(of_target, logits, inputs, targets)


def _compared(of_target: TargetPass, logits: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Targets, Tensor]:
    log_p = F.log_softmax(rollout_targets(of_target.logits, 1, STEPS).float(), dim=-1)
    given, text = (rollout_targets(part.unsqueeze(-1), 1, STEPS).squeeze(-1) for part in (inputs, targets))
    return Targets(given, text, log_p), F.log_softmax(logits.float(), dim=-1)


def _spire_pass(
    model: SpireModel, target: Decoder, inputs: Tensor, first: int, steps: int
) -> tuple[TargetPass, Tensor]:
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    with forward_precision(inputs.device.type):
        of_target = target_pass(target, inputs, positions, [layer.layer for layer in model.layers])
        return of_target, spire_logits(model, inputs, of_target.rows, first, steps)


def _long_pass(
    model: LongModel, target: Decoder, inputs: Tensor, first: int, steps: int, offsets: bool
) -> tuple[TargetPass, Tensor]:
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    if offsets:
        positions = with_offsets(inputs, target.config.max_position_embeddings)
    with forward_precision(inputs.device.type):
        of_target = target_pass(target, inputs, positions, [target.config.num_layers - 1])
        return of_target, long_logits(model, inputs, positions, of_target.rows[0], first, steps)


class SpireLoss:
    """The loss of `spire` for `Trainer`. It runs the target on the same tokens."""

    can_be_captured = False
    """Where rollouts begin is read from the batch on the host."""

    def __init__(self, target: Decoder, steps: int = STEPS) -> None:
        self.target, self.steps = target.eval().requires_grad_(False), steps

    def __call__(self, model: SpireModel, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch; `inputs`: `[rows, length]`; `targets` are not used, the target's distribution is."""
        first = first_start(inputs, self.steps)
        of_target, logits = _spire_pass(model, self.target, inputs, first, self.steps)
        return draft_loss(logits, rollout_targets(of_target.logits, first, self.steps))


class LongLoss:
    """The loss of `long` for `Trainer`.

    With `offsets`, each row keeps the positions 0 … 3 of its first tokens and has all others moved by a random number,
    as if it were the end of a long text (LongSpec's anchor-offset indices). So late positions are trained although rows
    are short; the first tokens, on which much attention rests, stay where they are.
    """

    can_be_captured = False
    """Where rollouts begin, and the offsets, are read from the batch on the host."""

    def __init__(self, target: Decoder, steps: int = STEPS, offsets: bool = True) -> None:
        self.target, self.steps, self.offsets = target.eval().requires_grad_(False), steps, offsets

    def __call__(self, model: LongModel, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch; `inputs`: `[rows, length]`; `targets` are not used, the target's distribution is."""
        first = first_start(inputs, self.steps)
        of_target, logits = _long_pass(model, self.target, inputs, first, self.steps, self.offsets)
        return draft_loss(logits, rollout_targets(of_target.logits, first, self.steps))


def with_offsets(inputs: Tensor, max_positions: int) -> Tensor:
    """Positions of the tokens of each row: 0 … 3, and then consecutive ones from a random place on. They depend on the
    tokens alone. `inputs`: `[rows, length]` → the same shape."""
    length = inputs.shape[1]
    index = torch.arange(length, device=inputs.device)
    generator = torch.Generator().manual_seed(int(inputs.sum()))
    offsets = torch.randint(max(1, max_positions - length + 1), (len(inputs), 1), generator=generator)
    return torch.where(index < NUM_ANCHORS, index, index + offsets.to(inputs.device))
