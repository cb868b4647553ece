"""The simplest thing that can hold a decoder's keys and values: one growing list per layer, one sequence, a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.models.config import ModelConfig


class NaiveAttention:
    """Attention of one sequence over everything it has seen, by the formula and with the mask written out."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        shape = (0, config.num_kv_heads, config.head_dim)
        self.keys = [torch.empty(shape) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape) for _ in range(config.num_layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        self.keys[layer] = torch.cat((self.keys[layer], k))
        self.values[layer] = torch.cat((self.values[layer], v))
        groups = self.config.num_heads // self.config.num_kv_heads
        keys, values = (x[layer].repeat_interleave(groups, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / self.config.head_dim**0.5
        scores = scores.masked_fill(~self._sees(layer, len(q), len(keys)), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

    def _sees(self, layer: int, num_queries: int, num_keys: int) -> Tensor:
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        window = self.config.window(layer) or num_keys
        return (distance >= 0) & (distance < window)
