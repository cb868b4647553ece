"""Choose tokens on the device of the logits: by argmax, or by sampling with a given uniform.

Nothing here waits for the device. Rows without a valid distribution are reported in a tensor of flags, which the caller
reads together with the tokens; `minillm.sampling` raises at once instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax of each row (`[rows, vocab]`), the first of equals: tokens `[rows]` int64, flags `[rows]` bool.

    A flag is False where a row holds NaN or its maximum is infinite; the token is then meaningless but in the
    vocabulary.
    """
    peak, winner = logits.float().max(dim=-1)
    return winner, peak.isfinite()


def sample(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution, as `minillm.sampling.sample`: tokens `[rows]` int64, flags `[rows]` bool.

    `probs`: `[rows, vocab]` fp32, not negative, not necessarily summing to 1; `uniforms`: `[rows]` fp64 in [0, 1). The
    token is the first whose cumulative sum (in fp64) is above uniform · total; its own probability is above 0. A flag
    is False where the sum is 0, NaN or infinite.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    threshold = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_max(probs.shape[1] - 1)
    return tokens, (total.isfinite() & (total > 0)).squeeze(1)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Distributions with probability 1 for one token each: tokens `[rows]` int64 → a tensor like `like`, `[rows,
    vocab]`."""
    return torch.zeros_like(like).scatter_(1, tokens[:, None], 1.0)


def all_finite(logits: Tensor) -> Tensor:
    """Whether each row holds neither NaN nor infinity: `[rows, vocab]` of any float dtype → `[rows]` bool.

    Only the minimum and the maximum of a row are checked: a NaN in the row makes both NaN.
    """
    smallest, largest = logits.aminmax(dim=-1)
    return smallest.isfinite() & largest.isfinite()
