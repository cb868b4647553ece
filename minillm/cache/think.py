"""Thinner keys: each KV head drops the key channels that the prompt's last queries use least (ThinK: Xu et al. 2024).

    score of channel c = mean over the observed queries of q_c² · mean over the keys of k_c²

The part of all scores q · k that channel c contributes is the matrix Q_c K_cᵀ, one column times one row. The square of
its Frobenius norm is Σ q_c² · Σ k_c², so the channels with the lowest score change the matrix of all scores least, as
far as one channel at a time can tell. Query heads that share a KV head share its channels; their q_c² are averaged.

At the end of the prompt the lowest channels of each KV head are dropped, in each layer. The last `window` tokens and
all generated ones keep all channels. Values are untouched, so with a share s of the key channels the prompt takes
(1 + s) / 2 of its bytes: never below half. What is dropped is not stored: this is not a mask of zeros.

Differences from the paper. It drops 40% of the channels on top of token eviction (SnapKV, H2O) as well; here `think` is
a layout by itself. Keys are those in the cache, so RoPE has already been applied, as in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.compressed_prompt import CompressedPromptKVCache, Parts
from minillm.cache.layout_options import check_share
from minillm.models.config import ModelConfig


class ThinkKVCache(CompressedPromptKVCache):
    """`key_share`: the share of key channels that each KV head keeps of the prompt, the paper's 1 - λ; at least one."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        key_share: float = 0.6,
        window: int = 32,
    ) -> None:
        check_share("key_share", key_share)
        super().__init__(config, num_blocks, block_size, dtype, device, window=window)
        self.num_channels = max(1, round(key_share * config.head_dim))

    def compress(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Parts | None:
        """See `CompressedPromptKVCache.compress`: the kept channels' indices, keys in these channels, values."""
        if self.num_channels == self.config.head_dim:
            return None
        channels = channel_scores(queries, keys).argsort(dim=1, descending=True, stable=True)[:, : self.num_channels]
        channels = channels.sort(dim=1).values
        old = len(keys) - self.window
        thin = keys[:old].gather(2, channels.expand(old, -1, -1))
        return channels.to(torch.int16), thin, values[:old].clone()

    def restore(self, layer: int, parts: Parts) -> tuple[Tensor, Tensor]:
        """See `CompressedPromptKVCache.restore`: a dropped channel is 0, so it adds nothing to a score."""
        channels, thin, values = parts
        keys = torch.zeros_like(values)
        return keys.scatter_(2, channels.long().expand(len(thin), -1, -1), thin), values


def channel_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """The score of each channel: `[num_kv_heads, head_dim]`, at least fp32.

    `queries`: `[n, num_heads, head_dim]`; `keys`: `[m, num_kv_heads, head_dim]`.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    of_queries = queries.to(dtype).square().unflatten(1, (keys.shape[1], -1)).mean((0, 2))
    return of_queries * keys.to(dtype).square().mean(0)
