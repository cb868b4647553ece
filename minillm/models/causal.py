"""Causal attention without a KV cache, for training and calibration: rows of equal length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.hardware import half_dtype

MIN_PART_SIZE, MAX_PARTS = 256, 4
"""Queries are split into parts. A part uses only the keys up to its last query, so most masked scores are skipped."""


class CausalAttention:
    """The decoder's `attention` argument where no KV cache is needed.

    On a CPU it is two matrix products and a softmax per part of the queries: in a profile, the backward pass of
    PyTorch's fused kernel was the largest part of a training step (bf16, rows of 512). Training on a GPU uses the fused
    kernel.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """`q`, `k`, `v`: `[rows · length, heads, head_dim]` → attention output, shaped like `q`."""
        q, k, v = (x.unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q, k, v))
        if q.is_cuda:
            # In fp32, and before sm_80, PyTorch's fused kernel needs as many KV heads as query heads, else all scores
            # are stored.
            in_half = q.dtype != torch.float32 or torch.is_autocast_enabled("cuda")
            grouped = in_half and half_dtype(q.device) == torch.bfloat16
            if not grouped:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            size = max(MIN_PART_SIZE, -(-self.length // MAX_PARTS))
            parts = [(start, min(start + size, self.length)) for start in range(0, self.length, size)]
            out = torch.cat([self._part(q, k, v, start, end) for start, end in parts], dim=2)
        return out.transpose(1, 2).flatten(0, 1)

    def _part(self, q: Tensor, k: Tensor, v: Tensor, start: int, end: int) -> Tensor:
        """`q`, `k`, `v`: `[rows, heads, length, head_dim]` → outputs of the queries `start` … `end - 1`."""
        kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        # The query heads of one KV head become further queries of that head, so keys are not repeated per query head.
        grouped = q[:, :, start:end].unflatten(1, (kv_heads, groups))
        scores = grouped.flatten(2, 3) @ k[:, :, :end].transpose(2, 3)
        scores = scores.float().unflatten(2, (groups, end - start)) * q.shape[-1] ** -0.5
        hidden = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
        out = weights.flatten(2, 3) @ v[:, :, :end]
        return out.unflatten(2, (groups, end - start)).flatten(1, 2)
