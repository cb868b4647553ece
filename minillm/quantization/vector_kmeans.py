"""k-means over vectors, for several heads at once (Lloyd 1982).

A round assigns every point to its nearest centroid, then moves every centroid to the mean of its points. Each half is
optimal given the other, so Σ |point − its centroid|² never rises. A centroid without points does not move.
"""

from __future__ import annotations

import torch
from torch import Tensor


def vector_kmeans(points: Tensor, num_clusters: int, rounds: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Centroids `[heads, num_clusters, d]` and the cluster of each point `[heads, n]`, int64.

    `points`: `[heads, n, d]`, n ≥ `num_clusters`. Begins with points that the seed chooses, the same in every head.
    Stops early once no point changes its cluster.
    """
    order = torch.randperm(points.shape[1], generator=torch.Generator().manual_seed(seed))
    centroids = points[:, order[:num_clusters].sort().values.to(points.device)].clone()
    labels = nearest_vectors(points, centroids)
    for _ in range(rounds):
        centroids = cluster_means(points, labels, centroids)
        moved = nearest_vectors(points, centroids)
        if torch.equal(moved, labels):
            break
        labels = moved
    return centroids, labels


def nearest_vectors(points: Tensor, centroids: Tensor) -> Tensor:
    """The index of the centroid nearest to each point: `[heads, n]`. `centroids`: `[heads, k, d]`."""
    # |p − c|² = |p|² − 2 p · c + |c|², and |p|² is the same for all centroids of a point.
    return torch.baddbmm(centroids.square().sum(-1).unsqueeze(1), points, centroids.transpose(1, 2), alpha=-2).argmin(
        -1
    )


def cluster_means(points: Tensor, labels: Tensor, empty: Tensor) -> Tensor:
    """The mean of each cluster's points, `[heads, k, d]`; that of a cluster without points is its row of `empty`."""
    index = labels.unsqueeze(2).expand_as(points)
    sums = torch.zeros_like(empty).scatter_add_(1, index, points)
    counts = cluster_sizes(labels, empty.shape[1]).unsqueeze(2).to(points.dtype)
    return torch.where(counts > 0, sums / counts.clamp_min(1), empty)


def cluster_sizes(labels: Tensor, num_clusters: int) -> Tensor:
    """How many points each cluster has: `[heads, k]`, int64."""
    counts = torch.zeros(len(labels), num_clusters, dtype=torch.int64, device=labels.device)
    return counts.scatter_add_(1, labels, torch.ones_like(labels))
