"""Lesson 04: do three bounds on the error of quantised keys and values hold for real queries, keys and values?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Quantise = Callable[[Tensor, int], tuple[Tensor, Tensor]]
Bound = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Tried:
    """How many errors were compared with their bound, and how close the errors of scores came to theirs."""

    tested: int
    beyond: int
    """Errors above their bound."""
    mean_share: float
    """Mean over all scores of error / bound."""
    largest_share: float


def try_bounds(
    recorded: Mapping[int, tuple[Tensor, Tensor, Tensor]], levels: int, quantise: Quantise, bound: Bound
) -> Tried:
    """Compare query head 0 of each layer, with exact and with quantised keys and values: scores against `bound`,
    probabilities and outputs against bounds that follow.

    `recorded`: layer → queries, keys, values, `[tokens, heads, head_dim]`. If no score of a row changes by more than ε,
    no probability changes by more than a factor of e^2ε. An output changes by half the largest value scale at most.
    """
    tested = beyond = 0
    shares = []
    for q, k, v in recorded.values():
        q, k, v = q[:, 0].double(), k[:, :1], v[:, :1]
        (k_coded, k_scale), (v_coded, v_scale) = _coded(k, levels, quantise), _coded(v, levels, quantise)
        exact, coded = (q @ keys[:, 0].double().T / q.shape[-1] ** 0.5 for keys in (k, k_coded))
        causal = torch.ones_like(exact, dtype=torch.bool).tril()
        score_error, score_bound = (coded - exact).abs(), bound(q, k_scale)
        log_p, log_p_coded = (x.masked_fill(~causal, float("-inf")).log_softmax(-1) for x in (exact, coded))
        p = log_p.exp()
        epsilon = score_error.where(causal, 0.0).amax(-1, keepdim=True).expand_as(p)
        log_ratio = (log_p_coded - log_p).abs()
        output_error = (p @ (v_coded - v)[:, 0].double()).abs()
        output_bound = (v_scale.cummax(0).values / 2)[:, None]
        for over in (
            (score_error - score_bound)[causal],
            (log_ratio - 2 * epsilon)[causal],
            output_error - output_bound,
        ):
            tested += over.numel()
            beyond += int((over > 1e-5).sum())
        shares.append((score_error / score_bound)[causal])
    joined = torch.cat(shares)
    return Tried(tested, beyond, float(joined.mean()), float(joined.max()))


def _coded(x: Tensor, levels: int, quantise: Quantise) -> tuple[Tensor, Tensor]:
    """One head `[tokens, 1, dim]`, quantised and dequantised, and its scales `[tokens]`."""
    codes, scale = quantise(x, levels)
    return codes.float() * scale.float()[..., None], scale[:, 0].double()
