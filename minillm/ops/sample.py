"""Choosing tokens where the logits are: the largest, or one drawn with a given uniform.

Nothing here waits for the device. Rows that hold no distribution are reported in a tensor of flags, and whoever reads
the tokens reads the flags with them; `minillm.sampling` raises on the spot instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the largest logits of each row (`[rows, vocab]`): tokens `[rows]` int64, and flags `[rows]` bool.

    A flag is False where a row holds NaN, or its largest is infinite; the token then means nothing, but is one.
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


def all_finite(logits: Tensor) -> Tensor:
    """Whether a row holds neither NaN nor an infinity: `[rows, vocab]` of any float type → `[rows]` bool.

    Two numbers per row are looked at, the smallest and the largest, and a NaN is both.
    """
    smallest, largest = logits.aminmax(dim=-1)
    return smallest.isfinite() & largest.isfinite()
