"""Distillation: the pretrained draft learns the target's distribution, which determines which drafts are accepted.

The loss per token, p the target's and q the draft's distribution at temperature 1 over the whole vocabulary:

    KL(p‖q)  +  TV(p, q)  +  0.1 · cross-entropy of the text,      TV = 1 − Σ min(p, q) = 1 − acceptance

- Forward KL moves probability to all tokens that the target may emit, and its gradient does not vanish where q is far
  from p. But a draft of a tenth of the target's size cannot drive it to zero and wastes capacity on the tail.
- TV is the rejection rate itself, so it spends the draft's capacity on the few tokens that decide acceptance. Its
  gradient is weak where q is far from p; there KL helps. SPIRe (Neelam et al. 2025) mixes the two in equal parts.
- The cross-entropy with the text's next tokens (hard labels) is a small regulariser. On sampled continuations it
  favours the target's likely tokens, on real code it keeps the draft a language model of code.

Half of every batch is real code, as in a prompt, and half the target's continuations, as after a prompt. Muon and AdamW
continue as in pretraining, at half the rate and with a shorter plateau (`recipes.distill_recipe`), because the weights
are already good but the loss is new. The target's forward runs for each batch (without gradients). Caching its top
tokens would save at most the half spent on continuations, and would need a second implementation of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.training.compiling import Compiled
from minillm.training.data import Batches
from minillm.training.divergence import kl_and_rejection
from minillm.training.precision import forward_precision
from minillm.training.pretrain import dense_logits

KL_WEIGHT, TV_WEIGHT, TEXT_WEIGHT = 1.0, 1.0, 0.1
LOSS_FORMULA = f"{KL_WEIGHT:g} · KL(p‖q) + {TV_WEIGHT:g} · TV(p, q) + {TEXT_WEIGHT:g} · cross-entropy"


class HalfAndHalf:
    """Batches with rows of the corpus in the first half and the target's continuations in the second."""

    def __init__(self, text: Batches, continuations: Batches) -> None:
        self.text, self.continuations = text, continuations

    def batch(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, each `[rows, length]`, int64."""
        code = self.text.batch(step, rows - rows // 2, length)
        own = self.continuations.batch(step, rows // 2, length)
        return torch.cat((code[0], own[0])), torch.cat((code[1], own[1]))


class DistillationLoss:
    """The loss for `Trainer`. It runs the target on the same tokens as the draft."""

    def __init__(self, target: Decoder) -> None:
        self.target = target.eval().requires_grad_(False)
        self._target_logits = Compiled(autocast_logits)
        self._loss = Compiled(distillation_loss)

    def __call__(self, draft: Decoder, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch; `inputs`, `targets`: `[rows, length]`."""
        with torch.no_grad():
            target_logits = self._target_logits(self.target, inputs)
        return self._loss(draft, inputs, targets, target_logits)


def autocast_logits(model: Decoder, inputs: Tensor) -> Tensor:
    """Logits `[rows · length, vocab_size]` in the precision of training."""
    with forward_precision(inputs.device.type):
        return dense_logits(model, inputs)


def distillation_loss(draft: Decoder, inputs: Tensor, targets: Tensor, target_logits: Tensor) -> Tensor:
    """Weighted sum of KL(p‖q), TV(p, q) and cross-entropy, each averaged over the tokens (see the module docstring)."""
    log_q = F.log_softmax(autocast_logits(draft, inputs).float(), dim=-1)
    log_p = F.log_softmax(target_logits.float(), dim=-1)
    kl, rejected = kl_and_rejection(log_p, log_q)
    text = F.nll_loss(log_q, targets.flatten())
    return KL_WEIGHT * kl + TV_WEIGHT * rejected + TEXT_WEIGHT * text
