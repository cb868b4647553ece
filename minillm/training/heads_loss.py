"""The loss of draft heads: the rejection rate itself, and honest confidences.

For draft i after a root, with p the target's distribution, q the heads' and α = Σ min(p, q) the probability that the
draft is accepted, given the text's own tokens before it:

    0.8^i · [ λ KL(p‖q) − (1 − λ) log α ],      λ = 1 − the mean α at this position (no gradient)

−log α is the LK loss, which trains acceptance directly. Its gradient is that of α divided by α. Where q is far from p
it says little about where to go, and KL does; so KL counts most while few drafts are accepted. Weights fall with the
position, because a draft only counts if all before it were accepted.

The confidences are logistic regressions on c, which they do not change. Greedy: whether p and q have the same argmax,
over the places that greedy decoding with these drafts would reach. Sampled: α, each place weighted by the probability
that the drafts before it were accepted, given that the text has these tokens: the product of min(1, q / p).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.speculative.draft_heads import DraftHeads
from minillm.training.compiling import Compiled
from minillm.training.precision import forward_precision
from minillm.training.target_states import FrozenTarget, Targets, TargetStates, num_roots, targets_of_roots

POSITION_WEIGHT = 0.8
SMALLEST_ALPHA = 1e-4
"""−log α is cut off here: a single hopeless token must not dominate a batch."""
LOSS_FORMULA = "0.8^i · [λ · KL(p‖q) − (1 − λ) · log Σ min(p, q)]"


class HeadsLoss:
    """The loss for `Trainer`. It runs the frozen target on the batch."""

    def __init__(self, target: Decoder) -> None:
        self.target = FrozenTarget(target)
        self._loss = Compiled(heads_loss)

    def __call__(self, heads: DraftHeads, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch; `inputs`, `targets`: `[rows, length]`."""
        return self._loss(heads, self.target.model, self.target(inputs), targets)


def c_of_roots(heads: DraftHeads, target: Decoder, states: TargetStates, compared: Targets) -> tuple[Tensor, Tensor]:
    """c of every root, `[rows · roots, hidden]`, and the embeddings of the given tokens, `[rows · roots, count,
    hidden]`."""
    count = heads.shape.num_drafts
    used = num_roots(states.hidden.shape[1], count) * count
    hidden = states.hidden[:, :used:count].flatten(0, 1)
    embedded = F.embedding(compared.given.flatten(0, 1), target.embed_tokens.weight)
    return heads.trunk(hidden, embedded[:, 0]), embedded


def guessed_logits(heads: DraftHeads, target: Decoder, states: TargetStates, compared: Targets) -> Tensor:
    """The heads' logits of every draft of every root, given the text's tokens: `[rows, roots, count, vocab]` fp32."""
    c, embedded = c_of_roots(heads, target, states, compared)
    logits = target.logits(heads.given_tokens(c, embedded).flatten(0, 1))
    return logits.float().view(*compared.given.shape, -1)


def heads_loss(heads: DraftHeads, target: Decoder, states: TargetStates, next_tokens: Tensor) -> Tensor:
    """See the module docstring."""
    compared = targets_of_roots(states, next_tokens, heads.shape.num_drafts)
    with forward_precision(next_tokens.device.type):
        c, embedded = c_of_roots(heads, target, states, compared)
        logits = target.logits(heads.given_tokens(c, embedded).flatten(0, 1))
        confidences = heads.acceptance_logits(c.detach())
    log_q = F.log_softmax(logits.float(), dim=-1).view_as(compared.log_probs)
    p, q = compared.log_probs.exp(), log_q.exp()
    kl = (p * (compared.log_probs - log_q)).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    by_position = alpha.detach().mean((0, 1))
    lk = -alpha.clamp_min(SMALLEST_ALPHA).log()
    loss = (1 - by_position) * kl + by_position * lk
    weight = POSITION_WEIGHT ** torch.arange(loss.shape[-1], device=loss.device)
    return (weight * loss.mean((0, 1))).sum() + _confidence_loss(confidences.float(), compared, log_q.detach(), alpha)


def _confidence_loss(confidences: Tensor, compared: Targets, log_q: Tensor, alpha: Tensor) -> Tensor:
    """Cross-entropy of both kinds of confidence. `confidences`: `[rows · roots, 2, count]`."""
    greedy_reached, agree = greedy_survival(compared, log_q)
    sampled_reached = sampled_reach(compared, log_q)
    labels = torch.stack((agree.float(), alpha.detach().clamp(0, 1)), dim=2).flatten(0, 1)
    weights = torch.stack((greedy_reached, sampled_reached), dim=2).flatten(0, 1)
    each = F.binary_cross_entropy_with_logits(confidences, labels, reduction="none")
    return (weights * each).sum() / weights.sum().clamp_min(1)


def greedy_survival(compared: Targets, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """For each draft, whether greedy decoding with these drafts reaches it (1 or 0), and whether it agrees there:
    `[rows, roots, count]` each."""
    best = compared.log_probs.argmax(-1)
    agree = log_q.argmax(-1) == best
    return _reached((agree & (best == compared.text)).float()), agree


def sampled_reach(compared: Targets, log_q: Tensor) -> Tensor:
    """For each draft, the probability that all drafts before it were accepted, given that the target emitted the text:
    `[rows, roots, count]`. A token y that the target emits was an accepted draft with probability min(1, q(y) / p(y)).
    """
    at = compared.text.unsqueeze(-1)
    ratio = (log_q.gather(-1, at) - compared.log_probs.gather(-1, at)).squeeze(-1)
    return _reached(ratio.clamp(max=0).exp())


def _reached(accepted: Tensor) -> Tensor:
    """The product over the positions before each one."""
    return F.pad(accepted[..., :-1].cumprod(-1), (1, 0), value=1.0)
