"""The gate of a SwiGLU layer: silu(gate) · up, with silu(x) = x / (1 + e^-x) (Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_gate(gate_up: Tensor) -> Tensor:
    """`gate_up`: `[num_tokens, 2 · size]`, gates first → `[num_tokens, size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
