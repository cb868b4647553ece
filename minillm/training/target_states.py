"""What a frozen target makes of a batch: the hidden states and the distributions that a drafter is trained on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.causal import CausalAttention
from minillm.models.decoder import Decoder
from minillm.training.compiling import Compiled
from minillm.training.precision import forward_precision


class TargetStates(NamedTuple):
    """The target at every token of a batch of `[rows, length]` inputs."""

    hidden: Tensor
    """`[rows, length, hidden]`, after the final norm."""
    log_probs: Tensor
    """`[rows, length, vocab]` fp32, at temperature 1: of the token after each input."""


class FrozenTarget:
    """A target that is run without gradients, in the precision of training."""

    def __init__(self, model: Decoder) -> None:
        self.model = model.eval().requires_grad_(False)
        self._states = Compiled(target_states)

    def __call__(self, inputs: Tensor) -> TargetStates:
        """`inputs`: `[rows, length]`."""
        with torch.no_grad():
            return self._states(self.model, inputs)


def target_states(model: Decoder, inputs: Tensor) -> TargetStates:
    """See `FrozenTarget`."""
    rows, length = inputs.shape
    positions = torch.arange(length, device=inputs.device).repeat(rows)
    with forward_precision(inputs.device.type):
        hidden = model(inputs.flatten(), positions, CausalAttention(length))
        logits = model.logits(hidden)
    log_probs = F.log_softmax(logits.float(), dim=-1)
    return TargetStates(hidden.float().view(rows, length, -1), log_probs.view(rows, length, -1))


class Targets(NamedTuple):
    """The tokens and distributions that the drafts of one batch are compared with.

    Every `count` inputs of a row there is a *root*: a token t₋₁ whose row chose t₀. The drafts x₁ … x_count follow t₀.
    """

    given: Tensor
    """`[rows, roots, count]` int64: the text's t₀, t₁, …, the token before each draft."""
    text: Tensor
    """The same shape: the text's own token in the place of each draft."""
    log_probs: Tensor
    """`[rows, roots, count, vocab]`: the target's distribution there, given the text before."""


def num_roots(length: int, count: int) -> int:
    """The number of roots in a row of `length` inputs; all their drafts are within the row."""
    return (length - 1) // count


def targets_of_roots(states: TargetStates, next_tokens: Tensor, count: int) -> Targets:
    """What `count` drafts after each root are compared with. `next_tokens`: `[rows, length]`, the batch's targets."""
    used = num_roots(next_tokens.shape[1], count) * count
    shape = (len(next_tokens), -1, count)
    return Targets(
        next_tokens[:, :used].reshape(shape),
        next_tokens[:, 1 : used + 1].reshape(shape),
        states.log_probs[:, 1 : used + 1].unflatten(1, (-1, count)),
    )
