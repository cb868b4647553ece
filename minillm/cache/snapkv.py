"""Fewer tokens: each KV head keeps the prompt tokens that the prompt's last queries attend to most (SnapKV: Li et al.
2024).

    mass of token j    = Σ over the observed queries and the query heads of this KV head of softmax(q · k / √d)_j
    pooled mass        = the largest mass among the `kernel` tokens around j
    kept               = the `budget - window` tokens with the largest pooled mass, and the last `window` tokens

The question usually stands at the end of a prompt. Its queries tell which tokens will be read while the answer is
generated. Pooling keeps the neighbours of such a token as well: a name without its definition is worth little. Layers
and KV heads choose for themselves. Keys are cached with the rotation of their own positions, so that leaving tokens out
changes no distance between those that stay.

Wins: recall over long prompts with few tokens. Loses: a token that matters only for later questions is gone for good.

Differences from the paper. It has one query head per KV head; here the query heads of one KV head vote together. Its
pooling is either an average or a maximum; here it is a maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.compressed_prompt import CompressedPromptKVCache, Parts
from minillm.cache.layout_options import check_at_least
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig


class SnapKVCache(CompressedPromptKVCache):
    """`budget`: most tokens of a prompt that a KV head keeps, the last `window` included. `kernel`: tokens around a
    token that share the largest mass among them, an odd number; 1: no pooling."""

    keeps_every_token = False

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        budget: int = 256,
        window: int = 32,
        kernel: int = 7,
    ) -> None:
        _check(budget, window, kernel)
        super().__init__(config, num_blocks, block_size, dtype, device, window=window)
        self.budget, self.kernel = budget, kernel

    def compress(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Parts | None:
        """See `CompressedPromptKVCache.compress`: keys and values of the kept tokens, in order of position."""
        if len(keys) <= self.budget:
            return None
        old = len(keys) - self.window
        mass = pooled(observed_mass(queries, keys)[:, :old], self.kernel)
        kept = mass.argsort(dim=1, descending=True, stable=True)[:, : self.budget - self.window].sort(dim=1).values
        index = kept.T.unsqueeze(2).expand(-1, -1, keys.shape[2])
        return keys.gather(0, index), values.gather(0, index)

    def restore(self, layer: int, parts: Parts) -> tuple[Tensor, Tensor]:
        """See `CompressedPromptKVCache.restore`. Row i of a KV head is its i-th kept token."""
        keys, values = parts
        return keys, values


def observed_mass(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
    """The attention that each token gets from the last tokens: `[num_kv_heads, n]`, at least fp32.

    `queries`: `[w, num_heads, head_dim]`, those of the last w tokens; `keys`: `[n, num_kv_heads, head_dim]`. `window`:
    that of the layer, if its queries see only the last `window` tokens.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.to(dtype).unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("wkgd,nkd->kgwn", grouped, keys.to(dtype)) * keys.shape[2] ** -0.5
    position = torch.arange(len(keys) - len(queries), len(keys), device=keys.device).unsqueeze(1)
    key = torch.arange(len(keys), device=keys.device)
    hidden = key > position if window is None else (key > position) | (key <= position - window)
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1).sum((1, 2))


def pooled(mass: Tensor, kernel: int) -> Tensor:
    """The largest of the `kernel` numbers around each one, fewer at the ends: `[heads, n]` → the same shape."""
    kernel = min(kernel, 2 * mass.shape[1] - 1)  # a wider one pools the same numbers
    return F.max_pool1d(mass.unsqueeze(0), kernel, stride=1, padding=kernel // 2)[0]


def _check(budget: int, window: int, kernel: int) -> None:
    check_at_least("window", window, 1)
    check_at_least("budget", budget, 1)
    check_at_least("kernel", kernel, 1)
    if budget <= window:
        raise ConfigError(
            f"kv_cache_config: budget={budget} must be above window={window}, which it includes; raise budget or lower "
            "window"
        )
    if kernel % 2 == 0:
        raise ConfigError(f"kv_cache_config: kernel={kernel} must be odd, so that a token is in the middle")
