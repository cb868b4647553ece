"""The formulas that turn logits into the distribution a token is sampled from, shared by `host.py` and `device.py`.

    logits → penalties → softmax at a temperature → min-p → top-k → top-p

`host.py` applies a formula only to the rows that need it, `device.py` to all rows at once. `probs` are
`[num_rows, vocab]`, limits `[num_rows, 1]` on the same device. Each filter returns the tokens it keeps,
`[num_rows, vocab]` bool.
"""

from __future__ import annotations

import torch
from torch import Tensor

Value = Tensor | float


def penalised(logits: Tensor, count: Tensor, repetition: Value, frequency: Value, presence: Value) -> Tensor:
    """The penalised logits of tokens that were used before. `count`: how often each occurs in the output (fp32)."""
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency * count - presence * (count > 0)


def softmax_at(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """Row-wise softmax of logits / temperature. `peak`: each row's largest logit, which is subtracted first, because a
    large logit over a tiny temperature would overflow to infinity. Both `[num_rows, 1]`."""
    return torch.softmax((logits - peak) / temperature, dim=-1)


def in_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Tokens at least `min_p` times as likely as the most likely one."""
    return probs >= probs.amax(dim=-1, keepdim=True) * min_p


def in_top_k(probs: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """The `top_k` most likely tokens and any exactly as likely as the last of them. `largest`: the largest `top_k`."""
    ranked = probs.topk(largest, dim=-1).values
    return probs >= ranked.gather(1, (top_k - 1).clamp(min=0))


def in_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """The fewest most likely tokens whose probabilities sum to at least `top_p` (fp64). In order of probability, these
    are the tokens before which the sum is less than `top_p`, so the most likely token is always kept. Of equally likely
    tokens, lower ids come first."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, before < top_p)
