"""Low-rank keys and values (inspired by LoRC: Zhang et al. 2024).

    W = U S Vᵀ (keys or values of one layer, all KV heads)        stored: Uᵣᵀ k        read: Uᵣ (Uᵣᵀ k)

The r first left singular vectors of a layer's projection span most of what its keys can be, so a token's r coordinates
take the place of its key. With all vectors nothing is lost. Keys are projected before RoPE (see `paged_latent`).

Wins: no training, no data; any rank. Loses: the singular values of a projection say what keys *can* be, not what they
are on real text, so methods that look at data keep more for the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.cache.layout_options import check_share
from minillm.cache.paged_latent import PagedLatentKVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.calibration import CalibrationTexts
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.rope import inverse_frequencies
from minillm.quantization.base import QuantizedLinear

Share = float | Sequence[float]
"""The part of the numbers to keep, above 0 and at most 1: for all layers, or one for each."""


class LorcKVCache(PagedLatentKVCache):
    """The coordinates of keys and values along the first singular vectors of each layer's projections.

    `key_share`, `value_share`: how many of the `num_kv_heads · head_dim` coordinates are stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        key_share: Share = 0.5,
        value_share: Share = 0.5,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device, key_share=key_share, value_share=value_share)
        self.bases: dict[bool, list[Tensor]] = {}
        """Uᵣ of each layer for keys (True) and values, `[kv_size, width]`, fp32; from `prepare`."""
        self.biases: dict[bool, list[Tensor]] = {}

    @classmethod
    def widths(
        cls, config: ModelConfig, *, key_share: Share = 0.5, value_share: Share = 0.5
    ) -> tuple[list[int], list[int]]:
        """See `PagedLatentKVCache.widths`."""
        return (
            _widths("key_share", key_share, config),
            _widths("value_share", value_share, config),
        )

    def prepare(self, model: Decoder, texts: CalibrationTexts | None = None) -> None:
        """See `KVCache.prepare`. Raises `UnsupportedError` for a model that normalises keys after their projection."""
        if model.config.qk_norm:
            raise UnsupportedError(
                "cache layout 'lorc' needs keys that are a projection, and this model normalises them afterwards "
                "(qk_norm); use layout 'paged'"
            )
        device = self.positions.device
        for is_key, pools in ((True, self.keys), (False, self.values)):
            parts = [projection(model, layer, is_key) for layer in range(model.config.num_layers)]
            vectors = [torch.linalg.svd(weight.double(), full_matrices=False).U.float() for weight, _ in parts]
            self.bases[is_key] = [
                u[:, : pool.shape[1]].to(device, copy=True) for u, pool in zip(vectors, pools, strict=True)
            ]
            self.biases[is_key] = [bias.to(device) for _, bias in parts]

    @property
    def model_bytes(self) -> int:
        """See `KVCache.model_bytes`: the singular vectors and biases."""
        return sum(part.nbytes for parts in (*self.bases.values(), *self.biases.values()) for part in parts)

    def compress(self, layer: int, is_key: bool, rows: Tensor) -> Tensor:
        """See `PagedLatentKVCache.compress`."""
        return (rows.float() - self.biases[is_key][layer]) @ self.bases[is_key][layer]

    def restore(self, layer: int, is_key: bool, latents: Tensor) -> Tensor:
        """See `PagedLatentKVCache.restore`."""
        rows = latents.float() @ self.bases[is_key][layer].T + self.biases[is_key][layer]
        return rows.to(self.dtype)


def projection(model: Decoder, layer: int, is_key: bool) -> tuple[Tensor, Tensor]:
    """Weight `[kv_size, hidden]` and bias `[kv_size]` that make the keys (with RoPE's factor, but without its rotation)
    or the values of a layer; fp32."""
    config, linear = model.config, model.layers[layer].qkv_proj
    weight = linear.dequantize() if isinstance(linear, QuantizedLinear) else linear.weight
    first = config.q_size + (0 if is_key else config.kv_size)
    part = slice(first, first + config.kv_size)
    _, factor = inverse_frequencies(config.rope, config.head_dim)
    scale = factor if is_key and config.rotates(layer) else 1.0
    bias = torch.zeros(config.kv_size) if linear.bias is None else linear.bias[part].detach().float()
    return weight[part].detach().float() * scale, bias * scale


def _widths(name: str, share: Share, config: ModelConfig) -> list[int]:
    shares = list(share) if isinstance(share, list | tuple) else [share] * config.num_layers
    if len(shares) != config.num_layers:
        raise ConfigError(
            f"kv_cache_config: {name} has {len(shares)} numbers for {config.num_layers} layers; give one number for "
            "all layers, or one for each"
        )
    for value in shares:
        check_share(name, value)
    most = min(config.kv_size, config.hidden_size)  # the rank of the projection
    return [max(1, min(most, round(value * config.kv_size))) for value in shares]
