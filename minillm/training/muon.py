"""Muon: momentum SGD with orthogonalised updates (Jordan et al. 2024). Only for matrices; the rest uses AdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from minillm.training.precision import forward_dtype


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Approximately the nearest semi-orthogonal matrix: Newton-Schulz with Muon's quintic coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(forward_dtype(matrix.device.type))
    tall = x.shape[0] > x.shape[1]
    x = x.T.contiguous() if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """SGD with Nesterov momentum; each update is orthogonalised and scaled by sqrt(max(1, rows / columns))."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
