"""Weighted k-means on a line, for all rows of a matrix at once.

Sorted, a cluster on a line is an interval, so a row is split by the k - 1 midpoints between its centroids, and sums
over a cluster are differences of running sums. One round costs rows · k · log(columns) and never looks at the values
again. The objective Σ weight · (value − its centroid)² can only fall, because each half of a round is the best answer
to the other (Lloyd 1982).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F


class SortedRows:
    """Values and weights of each row in order of value, with the running sums that k-means asks for, in fp64."""

    def __init__(self, values: Tensor, weights: Tensor) -> None:
        """`values`, `weights`: `[rows, columns]`; weights at least 0."""
        self.values, order = values.double().sort(dim=1)
        weights = weights.double().gather(1, order)
        moments = (weights, weights * self.values, weights * self.values.square())
        self.sums = torch.stack([F.pad(moment.cumsum(1), (1, 0)) for moment in moments])

    def only(self, chosen: Tensor) -> SortedRows:
        """Those of the rows where `chosen` (`[rows]`, bool) is true."""
        part = copy.copy(self)
        part.values, part.sums = self.values[chosen], self.sums[:, chosen]
        return part

    def clusters(self, centroids: Tensor) -> Tensor:
        """Σ weight, Σ weight·value, Σ weight·value² of the values nearest to each of `centroids` (`[rows, k]`).

        `[3, rows, k]`. Centroids must be in order.
        """
        middles = (centroids[:, 1:] + centroids[:, :-1]) / 2
        ends = F.pad(torch.searchsorted(self.values, middles.contiguous()), (1, 1))
        ends[:, -1] = self.values.shape[1]
        return self.sums.gather(2, ends.expand(3, -1, -1)).diff(dim=2)


def weighted_kmeans(values: Tensor, weights: Tensor, centroids: Tensor, rounds: int = 30) -> tuple[Tensor, Tensor]:
    """`settle` for `values`, each counted by its weight; both `[rows, columns]`."""
    return settle(SortedRows(values, weights), centroids, rounds)


def settle(rows: SortedRows, centroids: Tensor, rounds: int = 30) -> tuple[Tensor, Tensor]:
    """Move `centroids` (`[rows, k]`) until they suit the values of their rows.

    Returns the centroids `[rows, k]` in order, fp64, and the objective of each row before each round and after the
    last: `[rounds + 1, rows]`. A centroid that no weight is nearest to stays where it is. A row that a round leaves as
    it is would stay so in all later ones, so rows that have settled are left out of those.
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
        if moved.sum() <= len(active) / 2:  # to pick rows costs about a round
            rows, active = rows.only(moved), active[moved]
    own = centroids[active]
    objectives[rounds, active] = _objective(own, *rows.clusters(own))
    return centroids, objectives


def nearest(values: Tensor, centroids: Tensor) -> Tensor:
    """The index of the centroid nearest to each value: `[rows, columns]`, int64. `centroids`: `[rows, k]` in order."""
    middles = (centroids[:, 1:] + centroids[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), values.to(middles.dtype).contiguous())


def _objective(centroids: Tensor, mass: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (second - 2 * centroids * first + centroids.square() * mass).sum(1).clamp_min(0)
