"""The parts a decoder layer is made of, as modules that hold the weights; the arithmetic is that of `minillm.ops`.

All of them work on a flat batch: `[num_tokens, …]`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.ops.linear import Linear
from minillm.ops.rms_norm import rms_norm
from minillm.ops.silu_gate import silu_gate


class RMSNorm(nn.Module):
    """x / rms(x) · weight (`minillm.ops.rms_norm`)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x` (`[..., size]`)."""
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), with gate and up in one matrix product (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden]` → `[num_tokens, hidden]`."""
        return self.down_proj(silu_gate(self.gate_up_proj(x)))
