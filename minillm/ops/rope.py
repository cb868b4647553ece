"""Rotary position embedding of q and k: channel i is rotated with channel i + head_dim / 2 (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate `x` (`[num_tokens, num_heads, head_dim]`); the tables are `[num_tokens, 1, head_dim]`.

    With the sign of the sine folded into the table (minus in its first half), rotate_half(x)·sin is
    roll(x)·signed_sin.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)
