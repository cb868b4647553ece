"""An embedding table as codes into small codebooks (inspired by MEC, popularity-weighted quantisation).

    row of token t  ≈  [ C_0[code_t0] │ C_1[code_t1] │ … ]         parts of the row, each with its own codebook

Codebooks come from k-means over the rows, part by part. In plain k-means every token counts alike, though a few tokens
make most of any text. Weighting each row by how often its token occurs, to a power below 1, spends the codebook on what
is read; the power keeps rare tokens from being forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ConfigError

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`step(points, weights, centroids)` → the centroids after a round of k-means."""


@dataclass(frozen=True)
class EmbeddingCodes:
    """Codes and codebooks of a table `[vocab, dim]`."""

    codes: Tensor
    """`[vocab, parts]` uint8."""
    codebooks: Tensor
    """`[parts, codes, dim / parts]`."""

    @classmethod
    def fit(
        cls,
        table: Tensor,
        counts: Tensor,
        parts: int,
        num_codes: int = 256,
        power: float = 0.5,
        rounds: int = 20,
        step: Step | None = None,
    ) -> EmbeddingCodes:
        """`counts`: `[vocab]`, how often each token occurs; `power`: 0 counts all rows alike; `step`: a round of
        k-means, by default `lloyd_step`. Raises `ConfigError` for sizes that do not fit."""
        if parts < 1 or table.shape[1] % parts:
            raise ConfigError(f"parts={parts} must divide the width of the table, {table.shape[1]}")
        if not 1 <= num_codes <= min(256, len(table)):
            raise ConfigError(f"num_codes={num_codes} must be from 1 to {min(256, len(table))}")
        if counts.shape != (len(table),):
            raise ConfigError(f"counts {tuple(counts.shape)} must have one number for each of the {len(table)} rows")
        weights = counts.to(table).clamp_min(1) ** power
        split = table.unflatten(1, (parts, -1)).unbind(1)
        found = [kmeans(part, weights, num_codes, rounds, step=step or lloyd_step) for part in split]
        codes = torch.stack([assigned for _, assigned in found], dim=1).to(torch.uint8)
        return cls(codes, torch.stack([centroids for centroids, _ in found]))

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and codebooks."""
        return self.codes.nbytes + self.codebooks.nbytes

    def rows(self, token_ids: Tensor) -> Tensor:
        """The restored embeddings, `[…, dim]`."""
        parts = torch.arange(len(self.codebooks), device=token_ids.device)
        return self.codebooks[parts, self.codes[token_ids].long()].flatten(-2)


def lloyd_step(points: Tensor, weights: Tensor, centroids: Tensor) -> Tensor:
    """Every centroid moves to the weighted mean of the points that are nearest to it. See `kmeans`."""
    assigned = nearest(points, centroids)
    sums = torch.zeros_like(centroids).index_add_(0, assigned, points * weights[:, None])
    totals = weights.new_zeros(len(centroids)).index_add_(0, assigned, weights)
    return torch.where(totals[:, None] > 0, sums / totals[:, None].clamp_min(1e-30), centroids)


def kmeans(
    points: Tensor, weights: Tensor, num_centroids: int, rounds: int, step: Step = lloyd_step
) -> tuple[Tensor, Tensor]:
    """Weighted k-means (Lloyd) from k-means++ starts. `points`: `[n, d]`; `weights`: `[n]`, above 0.

    Returns centroids `[num_centroids, d]` and the index of each point's centroid. The weighted error never grows from
    round to round. A centroid that loses all points stays where it is.
    """
    generator = torch.Generator().manual_seed(0)
    chosen = [int(torch.multinomial(weights.float().cpu(), 1, generator=generator))]
    distances = (points - points[chosen[0]]).square().sum(-1)
    for _ in range(num_centroids - 1):
        likely = (weights * distances).float().cpu()
        if not likely.sum() > 0:  # every point is a centroid already
            likely = torch.ones(len(points))
        chosen.append(int(torch.multinomial(likely, 1, generator=generator)))
        distances = torch.minimum(distances, (points - points[chosen[-1]]).square().sum(-1))
    centroids = points[chosen].clone()
    for _ in range(rounds):
        centroids = step(points, weights, centroids)
    return centroids, nearest(points, centroids)


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """The index of the nearest centroid of each point, `[n]`."""
    return torch.cdist(points, centroids).argmin(-1)
