"""The parts a decoder layer is made of. All of them work on a flat batch: `[num_tokens, …]`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minillm.ops.linear import Linear, is_plain_cpu


class RMSNorm(nn.Module):
    """x / rms(x) · weight, the mean square taken in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._eps = torch.tensor(eps, device="cpu")  # a number in a tensor: no device and no dtype matter to it

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x` (`[..., size]`)."""
        if not is_plain_cpu(x):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # On a CPU `F.rms_norm` is nine operations one after the other; these are five.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), with gate and up in one product (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden]` → `[num_tokens, hidden]`."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
