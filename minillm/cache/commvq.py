"""Codebooks for keys and values; those of keys commute with RoPE (CommVQ: Li et al. 2025).

    keys     8 channels (4 pairs that RoPE turns) → one of 256 centres, one byte; what is left → the next codebook …
    values   a rotation of the head's channels → their signs; what is left → the next rotation …

`bits` such stages are added up, so a number takes `bits` bits (8 channels per byte and stage). The codebooks are
trained once, when the engine starts, on the keys and values of calibration texts, per layer and KV head.

The centres of keys are scaled rotations of the plane, so they commute with RoPE's rotations: a kernel can multiply the
query with all centres first and never decode a key (see `quantization.codebooks`). This PyTorch path
decodes and rotates, as all layouts of `paged_latent` do, which gives the same scores.

Differences from the paper. It learns encoders and codebooks together, with more training than this; here stages are
fitted one after the other, each to what the ones before left. It counts 2 bits as 87.5% less; so does this, but for 4
bytes of position per token. The codebooks, `model_bytes`, are shared by all requests; a small cache does not pay for
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.layout_options import check_at_least
from minillm.cache.paged_latent import PagedLatentKVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.calibration import CalibrationTexts, keys_and_values, longest_row
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.quantization.codebooks import GROUP, BinaryCodebook, Codebook, CommutingCodebook

MAX_SAMPLES = 2048
"""Tokens that codebooks are trained on."""
MAX_BITS = 8
MAX_SEED = 2**63 - 1
"""PyTorch takes seeds below 2^64, and each stage has the next one."""


class CommVQKVCache(PagedLatentKVCache):
    """`bits`: bits per number, which is the number of stages. `seed`: of the first centres and rotations."""

    latent_dtype = torch.uint8

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bits: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device, bits=bits, seed=seed)
        self.bits, self.seed = bits, seed
        self.codebooks: dict[bool, list[Codebook]] = {}
        """Per layer, of keys (True) and values; from `prepare`."""

    @classmethod
    def widths(cls, config: ModelConfig, *, bits: int = 2, seed: int = 0) -> tuple[list[int], list[int]]:
        """See `PagedLatentKVCache.widths`: bytes."""
        check_at_least("bits", bits, 1)
        check_at_least("seed", seed, 0, MAX_SEED)
        if bits > MAX_BITS:
            raise ConfigError(
                f"kv_cache_config: bits={bits} must be at most {MAX_BITS}; layout 'paged' stores the model's dtype"
            )
        if config.head_dim % GROUP:
            raise UnsupportedError(
                f"cache layout 'commvq' codes {GROUP} channels at once, and this model's heads have {config.head_dim}; "
                "use kv_cache_dtype='int4'"
            )
        widths = [config.kv_size // GROUP * bits] * config.num_layers
        return widths, list(widths)

    def prepare(self, model: Decoder, texts: CalibrationTexts | None = None) -> None:
        """See `KVCache.prepare`: trains the codebooks. Raises `ConfigError` if there are no texts."""
        rows = [row[: longest_row(self.config)] for row in texts.rows() if len(row)] if texts else []
        if not rows:
            raise ConfigError("cache layout 'commvq' trains its codebooks on calibration texts, and there are none")
        device = self.positions.device
        self.codebooks = {True: [], False: []}
        positions = torch.cat([torch.arange(len(row), device=device) for row in rows])
        for layer, (keys, values) in enumerate(keys_and_values(model, rows)):
            for is_key, heads in ((True, self.rotate(layer, keys, -positions)), (False, values)):
                points = heads.transpose(0, 1).float()[:, :: -(-len(heads) // MAX_SAMPLES)]
                kind = CommutingCodebook if is_key else BinaryCodebook
                self.codebooks[is_key].append(kind.trained(points, self.bits, self.seed).to(device))

    @property
    def model_bytes(self) -> int:
        """See `KVCache.model_bytes`: centres, rotations, scales, means."""
        return sum(book.num_bytes for books in self.codebooks.values() for book in books)

    def compress(self, layer: int, is_key: bool, rows: Tensor) -> Tensor:
        """See `PagedLatentKVCache.compress`: `[num_tokens, kv_size]` → bytes `[num_tokens, width]`."""
        points = rows.unflatten(1, (self.config.num_kv_heads, -1)).transpose(0, 1)
        codes = self.codebooks[is_key][layer].encode(points.to(torch.promote_types(rows.dtype, torch.float32)))
        return codes.transpose(0, 1).flatten(1)

    def restore(self, layer: int, is_key: bool, latents: Tensor) -> Tensor:
        """See `PagedLatentKVCache.restore`."""
        codes = latents.unflatten(1, (self.config.num_kv_heads, -1)).transpose(0, 1)
        return self.codebooks[is_key][layer].decode(codes).transpose(0, 1).flatten(1).to(self.dtype)
