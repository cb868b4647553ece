"""Lesson 17, the references: a log-sum-exp in tiles, a backward pass in chunks, a block low-rank product, one bit and a
few exact weights, a weighted round of k-means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def tiled_lse(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
    """Return log Σ_j e^(x_i · y_j / temperature) for each row of x, from tiles of `tile` rows of y: `[n]`.

    `x`: `[n, d]`, `y`: `[m, d]`. At most n · tile similarities exist at a time. (Inf-CL, Cheng et al. 2024.)
    """
    lse = torch.full((len(x),), -torch.inf)
    for first in range(0, len(y), tile):
        part = (x @ y[first : first + tile].T / temperature).logsumexp(1)
        lse = torch.logaddexp(lse, part)
    return lse


def backward_in_chunks(
    run: Callable[[int, int, Tensor], tuple[Tensor, Tensor]], chunks: Sequence[tuple[int, int]], kept: Tensor
) -> Tensor:
    """Add the gradients of all chunks' losses to the parameters that `run` uses, one chunk's graph at a time. Returns
    what was sent to the rows: the gradient that each row of `kept` got from later chunks, `[n, width]`.

    `run(start, end, past)` → the loss of tokens start to end, and their rows, which later chunks read. `past`: the rows
    of all tokens before start. `kept`: the rows of all tokens, without a graph. (OOMB, 2026.)
    """
    sent = torch.zeros_like(kept)
    for start, end in reversed(chunks):
        past = kept[:start].detach().requires_grad_()
        loss, rows = run(start, end, past)
        (loss + (rows * sent[start:end]).sum()).backward()
        sent[:start] += past.grad
    return sent


def blast_apply(x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """Return x Wᵀ for the block low-rank W_ij = U_i diag(s_ij) V_jᵀ, without W or its blocks: `[n, out]`.

    `x`: `[n, in]`, `u`: `[blocks, out / blocks, rank]`, `s`: `[blocks, blocks, rank]`, `v`: `[blocks, in / blocks,
    rank]`. (BLAST, Lee et al. 2024.)
    """
    latents = torch.einsum("njq,jqr->njr", x.unflatten(1, (len(v), -1)), v)
    mixed = torch.einsum("ijr,njr->nir", s, latents)
    return torch.einsum("ipr,nir->nip", u, mixed).flatten(1)


def one_bit_and_exact(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the scales `[out]` and the exact part `[out, in]` of W ≈ diag(scales) sign(W) + exact.

    The `count` largest weights are exact, any of them where some are equally large: there, both parts together are W. A
    row's scale is the mean |W| of its other weights, 0 if it has none. (After BiMaCoSR, 2025.)
    """
    chosen = torch.zeros_like(weight, dtype=torch.bool)
    chosen.view(-1)[weight.abs().flatten().topk(count).indices] = True
    scales = weight.abs().masked_fill(chosen, 0).sum(1) / (~chosen).sum(1).clamp_min(1)
    return scales, torch.where(chosen, weight - scales[:, None] * weight.sign(), 0.0)


def centroid_step(points: Tensor, weights: Tensor, centroids: Tensor) -> Tensor:
    """Return the centroids `[k, d]` after one round of weighted k-means. One that no point is nearest to stays.

    `points`: `[n, d]`, `weights`: `[n]`, `centroids`: `[k, d]`. (MEC, 2025, weights by popularity.)
    """
    nearest = torch.cdist(points, centroids).argmin(1)
    moved = centroids.clone()
    for index in nearest.unique():
        own = nearest == index
        moved[index] = (points[own] * weights[own, None]).sum(0) / weights[own].sum()
    return moved
