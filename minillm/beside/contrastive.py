"""The contrastive loss in tiles (inspired by Inf-CL: Cheng et al. 2024): memory no longer grows with the batch squared.

    loss = mean over i of   log Σ_j e^{x_i · y_j / τ}  -  x_i · y_i / τ          (InfoNCE)

Written plainly, it needs the n × n matrix of similarities, and its gradient needs it again. But of a row only its
log-sum-exp is needed, and that can be merged from those of tiles: log(e^a + e^b). The backward pass computes each tile
once more:

    d loss / d x_i = (Σ_j p_ij y_j - y_i) / (n τ),       p_ij = e^{x_i · y_j / τ - lse_i}

So at any time there is one tile. The price is one more product in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError, UnsupportedError


def dense_contrastive_loss(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """The loss with the whole matrix of similarities. `x`, `y`: `[n, d]`; row i belongs to row i."""
    logits = x @ y.T / temperature
    return (logits.logsumexp(-1) - logits.diagonal()).mean()


def tiled_contrastive_loss(x: Tensor, y: Tensor, temperature: float, tile: int = 256) -> Tensor:
    """`dense_contrastive_loss`, of which at most `tile` × `tile` similarities exist at a time.

    Raises `ConfigError` for sizes that do not fit; its backward pass `UnsupportedError` with `create_graph`.
    """
    if x.shape != y.shape or x.ndim != 2:
        raise ConfigError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must both be [n, d]: row i belongs to row i")
    if tile < 1 or not temperature > 0:
        raise ConfigError(f"tile={tile} must be at least 1 and temperature={temperature} above 0")
    return _Tiled.apply(x, y, temperature, tile)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
        lse = torch.empty(len(x), dtype=x.dtype, device=x.device)
        for i in range(0, len(x), tile):
            rows = torch.full((min(tile, len(x) - i),), -torch.inf, dtype=x.dtype, device=x.device)
            for j in range(0, len(y), tile):
                part = (x[i : i + tile] @ y[j : j + tile].T / temperature).logsumexp(-1)
                rows = torch.logaddexp(rows, part)
            lse[i : i + tile] = rows
        ctx.save_for_backward(x, y, lse)
        ctx.temperature, ctx.tile = temperature, tile
        return (lse - (x * y).sum(-1) / temperature).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():  # `lse` would be a constant in the second derivative, which it is not
            raise UnsupportedError("the tiled loss has no second derivative; use the dense one with create_graph")
        x, y, lse = ctx.saved_tensors
        grad_x, grad_y = -y.clone(), -x.clone()
        for i in range(0, len(x), ctx.tile):
            rows = slice(i, i + ctx.tile)
            for j in range(0, len(y), ctx.tile):
                columns = slice(j, j + ctx.tile)
                p = (x[rows] @ y[columns].T / ctx.temperature - lse[rows, None]).exp()
                grad_x[rows] += p @ y[columns]
                grad_y[columns] += p.T @ x[rows]
        scale = grad / (len(x) * ctx.temperature)
        return grad_x * scale, grad_y * scale, None, None
