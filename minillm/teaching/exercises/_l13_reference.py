"""Lesson 13, the references: channels, a low rank, the commutator with RoPE, centres in the query, kept clusters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kept_channels(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` channels that each KV head keeps, ascending: `[num_kv_heads, count]`, int64.

    `queries`: `[n, num_heads, head_dim]`; `keys`: `[m, num_kv_heads, head_dim]`. Query heads h · g … h · g + g - 1 read
    KV head h. A channel's score is the mean of q² over the queries and their heads, times the mean of k² over the keys.
    The channels with the highest scores stay, the earlier of equals. (ThinK, Xu et al. 2024.)
    """
    of_queries = queries.square().unflatten(1, (keys.shape[1], -1)).mean((0, 2))
    of_keys = keys.square().mean(0)
    best = (of_queries * of_keys).argsort(dim=1, descending=True, stable=True)[:, :count]
    return best.sort(dim=1).values


def low_rank(weight: Tensor, out: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the first `rank` left singular vectors of `weight`, `[num_kv_heads · head_dim, rank]`, and `out` with them
    absorbed, `[num_heads, hidden, rank]`.

    `weight`: `[num_kv_heads · head_dim, hidden]`, which makes the values of a layer. `out`: `[num_heads, hidden,
    head_dim]`, what the output projection does with each query head. (LoRC, Zhang et al. 2024.)
    """
    basis = torch.linalg.svd(weight, full_matrices=False).U[:, :rank]
    of_heads = basis.unflatten(0, (-1, out.shape[2]))
    group = len(out) // len(of_heads)
    return basis, out @ of_heads.repeat_interleave(group, 0)


def commutation_error(matrix: Tensor, frequencies: Tensor, positions: Sequence[int]) -> float:
    """Return the largest ‖R M - M R‖ / ‖M‖ over the rotations R of these positions; 0: the matrix commutes with RoPE.

    `matrix`: `[d, d]`. `frequencies`: `[d / 2]`, the angle per position of each pair; pair i is channels i and
    i + d / 2.
    """
    errors = []
    for position in positions:
        cos, sin = (position * frequencies).cos().diag(), (position * frequencies).sin().diag()
        rotation = torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))
        errors.append(float((rotation @ matrix - matrix @ rotation).norm() / matrix.norm()))
    return max(errors)


def absorb_centres(query: Tensor, centres: Tensor) -> Tensor:
    """Return the table `[2, k, d / 2]` that a query and a codebook give.

    `query`: `[d]`, rotated to its own position; `centres`: `[k, d]`, keys before RoPE. The score of a token with
    centre c at position p is Σ over pairs i of cos(p · f_i) · table[0, c, i] + sin(p · f_i) · table[1, c, i].
    (CommVQ, Li et al. 2025.)
    """
    qx, qy = query.chunk(2)
    x, y = centres.chunk(2, dim=1)
    return torch.stack((qx * x + qy * y, qy * x - qx * y))


def kept_clusters(queries: Tensor, centroids: Tensor, sizes: Tensor, threshold: float) -> Tensor:
    """Return which clusters of keys a token's queries read: `[num_clusters]`, bool.

    `queries`: `[g, head_dim]`, those of the query heads of one KV head; `centroids`: `[num_clusters, head_dim]`;
    `sizes`: `[num_clusters]`, their tokens, at least 1. A cluster's estimated weight per key is e^(q · c / √d) over the
    sum of n · e^(q · c / √d) of all clusters, averaged over the query heads. Kept are those with at least `threshold`
    times the weight that every key has if all are equal. (Squeezed Attention, Hooper et al. 2024.)
    """
    scores = queries @ centroids.T * queries.shape[1] ** -0.5
    total = (scores + sizes.log()).logsumexp(1, keepdim=True)
    weights = (scores - total).exp().mean(0)
    return weights * sizes.sum() >= threshold
