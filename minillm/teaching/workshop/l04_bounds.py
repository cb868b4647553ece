"""Lesson 04: three bounds on what quantised keys and values change, tried on real queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Quantise = Callable[[Tensor, int], tuple[Tensor, Tensor]]
Bound = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Tried:
    """How many numbers were compared with a bound, and how near the score errors came to theirs."""

    tested: int
    beyond: int
    mean_share: float
    """Mean over all scores of error / bound."""
    largest_share: float


def try_bounds(
    heard: Mapping[int, tuple[Tensor, Tensor, Tensor]], levels: int, quantise: Quantise, bound: Bound
) -> Tried:
    """Scores, probabilities and outputs of query head 0 of each layer, with exact and with quantised keys and values.

    `heard`: layer → queries, keys, values, `[tokens, heads, head_dim]`. If no score of a row moves by more than ε, no
    probability changes by more than a factor of e^2ε; an output moves by half the largest value scale at most.
    """
    tested = beyond = 0
    shares = []
    for q, k, v in heard.values():
        q, k, v = q[:, 0].double(), k[:, :1], v[:, :1]
        (k_coded, k_scale), (v_coded, v_scale) = _coded(k, levels, quantise), _coded(v, levels, quantise)
        exact, coded = (q @ keys[:, 0].double().T / q.shape[-1] ** 0.5 for keys in (k, k_coded))
        causal = torch.ones_like(exact, dtype=torch.bool).tril()
        moved, most = (coded - exact).abs(), bound(q, k_scale)
        log_p, log_p_coded = (x.masked_fill(~causal, float("-inf")).log_softmax(-1) for x in (exact, coded))
        p = log_p.exp()
        epsilon = moved.where(causal, 0.0).amax(-1, keepdim=True).expand_as(p)
        ratio = (log_p_coded - log_p).abs()
        moved_out = (p @ (v_coded - v)[:, 0].double()).abs()
        most_out = (v_scale.cummax(0).values / 2)[:, None]
        for over in ((moved - most)[causal], (ratio - 2 * epsilon)[causal], moved_out - most_out):
            tested += over.numel()
            beyond += int((over > 1e-5).sum())
        shares.append((moved / most)[causal])
    joined = torch.cat(shares)
    return Tried(tested, beyond, float(joined.mean()), float(joined.max()))


def _coded(x: Tensor, levels: int, quantise: Quantise) -> tuple[Tensor, Tensor]:
    """What one head `[tokens, 1, dim]` becomes, and its scales `[tokens]`."""
    codes, scale = quantise(x, levels)
    return codes.float() * scale.float()[..., None], scale[:, 0].double()
