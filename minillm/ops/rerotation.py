"""Re-rotation: keys that were rotated for one position become those for another (RoPE: Su et al. 2021).

    the key of a token at position p is R(p) k,  and  R(δ) R(p) = R(p + δ),  so  R(δ) moves it to p + δ

No weights are needed, and nothing but the key changes: values are not rotated. It costs one rotation of the keys, where
computing them again costs a forward. What it cannot change is what the token attended to (`minillm.reuse`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.ops.rope import rope


def rerotate(keys: Tensor, frequencies: Tensor, delta: int | Tensor) -> Tensor:
    """Move `keys` (`[…, num_tokens, num_kv_heads, head_dim]`) by `delta` positions: one number for all tokens, or
    `[num_tokens]`. It may be negative.

    `frequencies`: the angle per position of each channel pair, `[head_dim / 2]` (`models.rope.inverse_frequencies`).
    Computes in fp32 and returns the dtype of `keys`. Angles are formed in fp64, because they are far above 1.
    """
    steps = torch.as_tensor(delta, dtype=torch.float64, device=keys.device).reshape(-1, 1, 1)
    angles = steps * frequencies.to(keys.device, torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    return rope(keys.float(), torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)).to(keys.dtype)
