"""Weight matrices with fewer parameters: plain SVD, BLAST and Monarch, fitted to a given matrix.

    SVD       W ≈ U V                                            r (m + n)
    BLAST     W_ij ≈ U_i diag(s_ij) V_jᵀ    blocks i, j           r (m + n) + r b²       (Lee et al. 2024)
    Monarch   W[l, j, k, i] ≈ L[j, l, k] R[k, j, i]               b (m + n)              (Dao et al. 2022)

With all s_ij equal, BLAST *is* the SVD, so fitting from there can only improve on it; its b² further vectors let blocks
differ. Monarch, in the closed form of the paper, is a best rank-one fit of every slice (j, k): as many parameters as an
SVD of rank b, arranged so that no block is left out.

Which one fits a trained matrix best is an experiment: `compare` measures all three on a model's own matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ConfigError


@dataclass(frozen=True)
class LowRank:
    """W ≈ U V."""

    u: Tensor
    """`[out, rank]`."""
    v: Tensor
    """`[rank, in]`."""

    @classmethod
    def fit(cls, weight: Tensor, rank: int) -> LowRank:
        """The best fit of this rank (Eckart and Young 1936). Its factors, as those of all structures, are float32 if
        `weight` is float16 or bfloat16. Raises `ConfigError` for a rank that `weight` cannot have."""
        _check_rank(rank, weight)
        u, s, v = torch.linalg.svd(_full_precision(weight), full_matrices=False)
        return cls(u[:, :rank] * s[:rank], v[:rank])

    @property
    def num_parameters(self) -> int:
        """Numbers that are stored."""
        return self.u.numel() + self.v.numel()

    def dense(self) -> Tensor:
        """The matrix, `[out, in]`."""
        return self.u @ self.v

    def apply(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        return x @ self.v.T @ self.u.T


@dataclass(frozen=True)
class Blast:
    """W_ij ≈ U_i diag(s_ij) V_jᵀ: the blocks of a row share U_i, those of a column V_j."""

    u: Tensor
    """`[blocks, out / blocks, rank]`."""
    s: Tensor
    """`[blocks, blocks, rank]`."""
    v: Tensor
    """`[blocks, in / blocks, rank]`."""

    @classmethod
    def fit(cls, weight: Tensor, blocks: int, rank: int, rounds: int = 30) -> Blast:
        """Alternating least squares from the SVD: in turn, two of U, s, V are kept and the third is the best there is.
        So the error never grows. (The paper uses gradient descent.)"""
        _check_rank(rank, weight)
        _check_blocks(blocks, weight)
        device = weight.device
        weight = _full_precision(weight).cpu()  # for other devices PyTorch lacks the solver
        start = LowRank.fit(weight, rank)
        u, v = start.u.unflatten(0, (blocks, -1)), start.v.T.unflatten(0, (blocks, -1))
        s = torch.ones(blocks, blocks, rank, dtype=weight.dtype)
        tiles = weight.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1)).transpose(1, 2)  # [i, j, rows, columns]
        for _ in range(rounds):
            u = torch.stack([_solve(_side_by_side(s[i], v), torch.cat(list(tiles[i]), -1)) for i in range(blocks)])
            by_column = tiles.transpose(2, 3)
            v = torch.stack(
                [_solve(_side_by_side(s[:, j], u), torch.cat(list(by_column[:, j]), -1)) for j in range(blocks)]
            )
            s = torch.stack(
                [torch.stack([_scales(u[i], v[j], tiles[i, j]) for j in range(blocks)]) for i in range(blocks)]
            )
        return cls(u.to(device), s.to(device), v.to(device))

    @property
    def num_parameters(self) -> int:
        """Numbers that are stored."""
        return self.u.numel() + self.s.numel() + self.v.numel()

    def dense(self) -> Tensor:
        """The matrix, `[out, in]`."""
        return torch.einsum("ipr,ijr,jqr->ipjq", self.u, self.s, self.v).flatten(2).flatten(0, 1)

    def apply(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`: y_i = U_i Σ_j s_ij ⊙ (V_jᵀ x_j)."""
        latents = torch.einsum("jqr,njq->njr", self.v, x.unflatten(-1, (self.v.shape[0], -1)))
        return torch.einsum("ipr,ijr,njr->nip", self.u, self.s, latents).flatten(1)


@dataclass(frozen=True)
class Monarch:
    """Two block-diagonal matrices with a permutation between them."""

    left: Tensor
    """`[J, L, K]`."""
    right: Tensor
    """`[K, J, I]`."""

    @classmethod
    def fit(cls, weight: Tensor, blocks: int) -> Monarch:
        """The best fit: each slice (j, k) of W, seen as `[L, J, K, I]`, becomes its best matrix of rank one."""
        _check_blocks(blocks, weight)
        weight = _full_precision(weight)
        slices = weight.unflatten(0, (-1, blocks)).unflatten(2, (blocks, -1)).permute(1, 2, 0, 3)  # [j, k, l, i]
        u, s, v = torch.linalg.svd(slices, full_matrices=False)
        left = (u[..., 0] * s[..., :1]).permute(0, 2, 1)
        return cls(left, v[..., 0, :].transpose(0, 1))

    @property
    def num_parameters(self) -> int:
        """Numbers that are stored."""
        return self.left.numel() + self.right.numel()

    def dense(self) -> Tensor:
        """The matrix, `[out, in]`."""
        return torch.einsum("jlk,kji->ljki", self.left, self.right).flatten(2).flatten(0, 1)

    def apply(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        latents = torch.einsum("kji,nki->nkj", self.right, x.unflatten(-1, (self.right.shape[0], -1)))
        return torch.einsum("jlk,nkj->nlj", self.left, latents).flatten(1)


def relative_error(weight: Tensor, fitted: LowRank | Blast | Monarch) -> float:
    """‖W - Ŵ‖ / ‖W‖, Frobenius."""
    weight = _full_precision(weight)
    return float(torch.linalg.norm(weight - fitted.dense()) / torch.linalg.norm(weight))


def compare(weight: Tensor, blocks: int) -> dict[str, tuple[int, float]]:
    """Parameters and relative error of each structure, at about the parameters of Monarch with `blocks` blocks."""
    rows, columns = weight.shape
    monarch = Monarch.fit(weight, blocks)
    blast_rank = max(1, monarch.num_parameters // (rows + columns + blocks**2))
    fits = {
        "SVD": LowRank.fit(weight, max(1, monarch.num_parameters // (rows + columns))),
        "BLAST": Blast.fit(weight, blocks, blast_rank),
        "Monarch": monarch,
    }
    return {name: (fit.num_parameters, relative_error(weight, fit)) for name, fit in fits.items()}


def _full_precision(weight: Tensor) -> Tensor:
    """PyTorch decomposes no float16 and no bfloat16."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _check_rank(rank: int, weight: Tensor) -> None:
    if not 1 <= rank <= min(weight.shape):
        raise ConfigError(f"rank={rank} must be from 1 to {min(weight.shape)} for a matrix {tuple(weight.shape)}")


def _check_blocks(blocks: int, weight: Tensor) -> None:
    if blocks < 1 or any(size % blocks for size in weight.shape):
        raise ConfigError(f"blocks={blocks} must divide both sides of a matrix {tuple(weight.shape)}")


def _side_by_side(scales: Tensor, factors: Tensor) -> Tensor:
    """diag(s_j) V_jᵀ for all j, side by side: `[rank, columns of all]`."""
    return (scales[:, None] * factors).flatten(0, 1).T


def _solve(basis: Tensor, wanted: Tensor) -> Tensor:
    """The X for which X · `basis` is nearest to `wanted`: `[rows, rank]`."""
    return torch.linalg.lstsq(basis.T, wanted.T, driver="gelsd").solution.T


def _scales(u: Tensor, v: Tensor, tile: Tensor) -> Tensor:
    """The s for which U diag(s) Vᵀ is nearest to `tile`: least squares over the rank-one matrices u_r v_rᵀ."""
    gram = (u.T @ u) * (v.T @ v)
    right = torch.einsum("pr,pq,qr->r", u, tile, v)
    return torch.linalg.lstsq(gram, right[:, None], driver="gelsd").solution[:, 0]
