"""The loss of prompt tokens: Σ 0.8^i KL(p‖q) over the frozen target's rows of the prompt tokens.

    a row of a batch       x₀ x₁ x₂ x₃ x₄ x₅ x₆ …          the text, causal
    behind it              m₁ m₂ m₃ of root x₀ │ m₁ m₂ m₃ of root x₃ │ …

Prompt token i of a root at position t has position t + i. It attends to the text up to the root and to the prompt
tokens before it of the same root. No row of the text attends to a prompt token, so the text's rows are the target's
own, and p at position t + i is read from the same forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.speculative.prompt_tokens import PromptTokens
from minillm.training.precision import forward_precision
from minillm.training.target_states import TargetStates, num_roots, targets_of_roots

POSITION_WEIGHT = 0.8
LOSS_FORMULA = "0.8^i · KL(p‖q)"


class PromptAttention:
    """The decoder's `attention` for rows of text with the prompt tokens of their roots behind it."""

    def __init__(self, length: int, count: int, device: torch.device, alone: bool = False) -> None:
        """`length`: tokens of text per row; `count`: prompt tokens per root; there is a root every `count` tokens.
        `alone`: a prompt token attends to no other."""
        roots = torch.arange(num_roots(length, count), device=device) * count
        text, number = torch.arange(length, device=device), torch.arange(count, device=device)
        self.positions = torch.cat((text, (roots.unsqueeze(1) + 1 + number).flatten()))
        """`[length + roots · count]`."""
        root, place = roots.repeat_interleave(count), number.repeat(len(roots))
        sees_text = torch.cat((text, root)).unsqueeze(1) >= text
        before = place.unsqueeze(1) == place if alone else place.unsqueeze(1) >= place
        same_root = (root.unsqueeze(1) == root) & before
        self.mask = torch.cat((sees_text, F.pad(same_root, (0, 0, length, 0))), dim=1)
        """`[queries, keys]`: whether a row attends to another."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """`q`, `k`, `v`: `[rows · (length + roots · count), heads, head_dim]` → like `q`."""
        q, k, v = (x.unflatten(0, (-1, len(self.positions))).transpose(1, 2) for x in (q, k, v))
        if q.is_cuda:  # with a mask, the fused kernel needs as many KV heads as query heads, else all scores are stored
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=not q.is_cuda)
        return out.transpose(1, 2).flatten(0, 1)


def prompted(
    prompts: PromptTokens, target: Decoder, inputs: Tensor, alone: bool = False
) -> tuple[TargetStates, Tensor]:
    """Run the target over `inputs` (`[rows, length]`) and the prompt tokens of all roots. Returns its states at the
    text and the prompt tokens' logits, `[rows, roots, count, vocab]` fp32. `alone`: see `PromptAttention`."""
    rows, length = inputs.shape
    count = prompts.shape.num_drafts
    attention = PromptAttention(length, count, inputs.device, alone)
    roots = num_roots(length, count)
    own = prompts.embedding.weight.repeat(roots, 1).expand(rows, -1, -1)
    x = torch.cat((target.embed_tokens(inputs), own), dim=1).flatten(0, 1)
    with forward_precision(inputs.device.type):
        hidden = target.run_embedded(x, attention.positions.repeat(rows), attention)
        logits = target.logits(hidden)
    hidden, logits = (part.float().unflatten(0, (rows, -1)) for part in (hidden, logits))
    states = TargetStates(hidden[:, :length].detach(), F.log_softmax(logits[:, :length].detach(), dim=-1))
    return states, logits[:, length:].unflatten(1, (roots, count))


class PromptTokensLoss:
    """The loss for `Trainer`. Not `distilled`: -log q of the text's own tokens takes the place of KL(p‖q). `alone`: see
    `PromptAttention`."""

    def __init__(self, target: Decoder, distilled: bool = True, alone: bool = False) -> None:
        self.target, self.distilled, self.alone = target.eval().requires_grad_(False), distilled, alone

    def __call__(self, prompts: PromptTokens, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch; `inputs`, `targets`: `[rows, length]`."""
        states, logits = prompted(prompts, self.target, inputs, self.alone)
        compared = targets_of_roots(states, targets, prompts.shape.num_drafts)
        log_q = F.log_softmax(logits, dim=-1)
        if self.distilled:
            each = (compared.log_probs.exp() * (compared.log_probs - log_q)).sum(-1)
        else:
            each = -log_q.gather(-1, compared.text.unsqueeze(-1)).squeeze(-1)
        by_position = each.mean((0, 1))
        return (POSITION_WEIGHT ** torch.arange(len(by_position), device=each.device) * by_position).sum()
