"""Muon: momentum SGD with orthogonalised updates (Jordan et al. 2024). Only for matrices; the rest uses AdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from minillm.training.precision import forward_dtype


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices: Newton-Schulz with Muon's quintic coefficients.

    `matrices`: one, or several of one shape, `[..., rows, columns]`; returns the same shape.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(forward_dtype(matrices.device.type))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """SGD with Nesterov momentum; each update is orthogonalised and scaled by sqrt(max(1, rows / columns)).

    The rate may be a tensor, as in steps that are captured in a CUDA graph.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient.

        Matrices of one shape are orthogonalised together: a GPU would spend longer on starting the small products than
        on computing them.
        """
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    of_shape.setdefault(p.shape, []).append(p)
            for (rows, columns), params in of_shape.items():
                grads = [p.grad for p in params]
                buffers = [self._momentum(p) for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                updates = orthogonalise(torch.stack(torch._foreach_lerp(grads, buffers, group["momentum"])))
                updates = updates.to(params[0].dtype) * (-group["lr"] * max(1.0, rows / columns) ** 0.5)
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(updates.unbind()))

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        return state["momentum"]
