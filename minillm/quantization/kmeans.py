"""Weighted one-dimensional k-means, for all rows of a matrix at once.

In sorted order a one-dimensional cluster is an interval, so the k - 1 midpoints between the centroids split a row, and
a sum over a cluster is a difference of prefix sums. One round costs rows · k · log(columns). The objective
Σ weight · (value − its centroid)² never rises, because each half of a round (assign values, move centroids) is optimal
given the other (Lloyd 1982).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F


class SortedRows:
    """The sorted values of each row, and the prefix sums for k-means in fp64."""

    def __init__(self, values: Tensor, weights: Tensor) -> None:
        """`values`, `weights`: `[rows, columns]`; weights must not be negative."""
        self.values, order = values.double().sort(dim=1)
        weights = weights.double().gather(1, order)
        moments = (weights, weights * self.values, weights * self.values.square())
        self.sums = torch.stack([F.pad(moment.cumsum(1), (1, 0)) for moment in moments])

    def only(self, chosen: Tensor) -> SortedRows:
        """Return only the rows where `chosen` (`[rows]`, bool) is true."""
        part = copy.copy(self)
        part.values, part.sums = self.values[chosen], self.sums[:, chosen]
        return part

    def clusters(self, centroids: Tensor) -> Tensor:
        """Return Σ weight, Σ weight·value, Σ weight·value² over the values nearest to each centroid: `[3, rows, k]`.

        `centroids`: `[rows, k]`, in ascending order.
        """
        middles = (centroids[:, 1:] + centroids[:, :-1]) / 2
        ends = F.pad(torch.searchsorted(self.values, middles.contiguous()), (1, 1))
        ends[:, -1] = self.values.shape[1]
        return self.sums.gather(2, ends.expand(3, -1, -1)).diff(dim=2)


def run_kmeans(rows: SortedRows, centroids: Tensor, rounds: int = 30) -> tuple[Tensor, Tensor]:
    """Run k-means on each row, starting from `centroids` (`[rows, k]`).

    Returns the centroids `[rows, k]` in ascending order, fp64, and the objective of each row before each round and
    after the last: `[rounds + 1, rows]`. The centroid of an empty cluster does not move. Once a round leaves a row
    unchanged, the row has converged, and later rounds may skip it.
    """
    centroids = centroids.double().sort(dim=1).values
    objectives = centroids.new_empty(rounds + 1, len(centroids))
    active = torch.arange(len(centroids), device=centroids.device)
    for number in range(rounds):
        own = centroids[active]
        mass, first, second = rows.clusters(own)
        objectives[number:, active] = _objective(own, mass, first, second)
        centroids[active] = torch.where(mass > 0, first / mass, own).sort(dim=1).values
        moved = (centroids[active] != own).any(dim=1)
        if moved.sum() <= len(active) / 2:  # selecting rows costs about as much as a round
            rows, active = rows.only(moved), active[moved]
    own = centroids[active]
    objectives[rounds, active] = _objective(own, *rows.clusters(own))
    return centroids, objectives


def nearest(values: Tensor, centroids: Tensor) -> Tensor:
    """Return the index of the centroid nearest to each value: `[rows, columns]`, int64.

    `centroids`: `[rows, k]`, in ascending order.
    """
    middles = (centroids[:, 1:] + centroids[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), values.to(middles.dtype).contiguous())


def _objective(centroids: Tensor, mass: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (second - 2 * centroids * first + centroids.square() * mass).sum(1).clamp_min(0)
