"""Which optimiser trains which parameter of a module: Muon the matrices, AdamW the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.training.muon import Muon

UNEMBEDDINGS = ("lm_head",)
"""Linear layers with one row per token."""


def matrices(module: nn.Module) -> list[Tensor]:
    """The weights of the linear layers between hidden states, in the order of `module.parameters()`.

    Muon makes all directions of an update equally large. That suits a matrix that maps hidden states to hidden states.
    Embeddings and unembeddings are tables with one row per token, of which a batch uses some; they, norms and biases
    are left to AdamW (as Jordan et al. 2024 do).
    """
    linears = [m for name, m in module.named_modules() if isinstance(m, nn.Linear) and name not in UNEMBEDDINGS]
    ids = {id(linear.weight) for linear in linears}
    return [p for p in module.parameters() if id(p) in ids]


def optimizers(
    module: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float = 0.0
) -> list[tuple[torch.optim.Optimizer, float]]:
    """The optimisers of all parameters of `module` with their rates; none without parameters. `weight_decay` is that of
    the matrices."""
    own = matrices(module)
    ids = {id(p) for p in own}
    others = [p for p in module.parameters() if id(p) not in ids]
    found: list[tuple[torch.optim.Optimizer, float]] = []
    if own:
        found.append((Muon(own, lr=muon_lr, weight_decay=weight_decay), muon_lr))
    if others:
        adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        found.append((adam, adam_lr))
    return found
