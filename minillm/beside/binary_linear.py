"""A linear layer of one bit per weight, a few exact weights and a low-rank part (inspired by BiMaCoSR, 2025).

    W ≈ U V  +  S  +  diag(a) sign(R)

    U V    the first singular vectors: what all weights have in common
    S      the largest weights of what is left, exactly: outliers that a single scale would miss
    R      the rest, of which only the sign is kept; a = mean |R| of each output channel

sign(R) with the mean of |R| is the best fit by one bit and one scale per channel. The three parts are fitted one after
the other, each to what the ones before it have left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.beside.structured_linear import LowRank
from minillm.errors import ConfigError


@dataclass(frozen=True)
class BinaryLinear:
    """The three parts of a weight matrix `[out, in]`."""

    low_rank: LowRank | None
    sparse: Tensor
    """`[out, in]`, sparse COO: the largest weights that the low-rank part has left."""
    signs: Tensor
    """`[out, in]` bool: True where the rest is not negative."""
    scales: Tensor
    """`[out]`."""

    @classmethod
    def fit(cls, weight: Tensor, rank: int = 8, density: float = 0.005) -> BinaryLinear:
        """`rank`: of the low-rank part, 0 for none; `density`: the share of weights that are kept exactly."""
        if not 0 <= density < 1:
            raise ConfigError(f"density={density} must be from 0 to below 1")
        low_rank = LowRank.fit(weight, rank) if rank else None
        rest = weight - low_rank.dense() if low_rank else weight.clone()
        count = round(density * weight.numel())
        exact = torch.zeros_like(rest, dtype=torch.bool)
        if count:
            exact.view(-1)[rest.abs().flatten().topk(count).indices] = True
        sparse = torch.where(exact, rest, 0).to_sparse()
        rest = rest.masked_fill(exact, 0)
        scales = rest.abs().sum(1) / (~exact).sum(1).clamp_min(1)
        # An exact weight has a sign, too: the bit is there anyway. What it adds is taken off the exact value.
        signs = rest >= 0
        corrected = sparse.coalesce()
        rows, columns = corrected.indices()
        added = torch.where(signs[rows, columns], 1.0, -1.0).to(weight) * scales[rows]
        sparse = torch.sparse_coo_tensor(
            corrected.indices(), corrected.values() - added, weight.shape, is_coalesced=True, check_invariants=False
        )
        return cls(low_rank, sparse, signs, scales)

    @property
    def num_bits(self) -> int:
        """Bits of all parts: 1 per weight, 16 per scale and low-rank number, 16 + 32 per exact weight (its index)."""
        low_rank = self.low_rank.num_parameters if self.low_rank else 0
        return self.signs.numel() + 16 * (self.scales.numel() + low_rank) + 48 * self.sparse.values().numel()

    def dense(self) -> Tensor:
        """The matrix, `[out, in]`."""
        signed = torch.where(self.signs, 1.0, -1.0).to(self.scales) * self.scales[:, None]
        dense = signed + self.sparse.to_dense()
        return dense + self.low_rank.dense() if self.low_rank else dense

    def apply(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`. A signed sum is twice the sum over the set bits, minus the sum over all."""
        signed = (2 * (x @ self.signs.to(x.dtype).T) - x.sum(-1, keepdim=True)) * self.scales
        found = signed + torch.sparse.mm(self.sparse, x.T).T
        return found + self.low_rank.apply(x) if self.low_rank else found
