"""Attention sinks: the first few tokens stay, plus a sliding window (StreamingLLM: Xiao et al. 2024, section 3.2).

Many models put much of their attention on the first tokens, whatever these are, because the softmax must sum to 1. A
plain window evicts them and the output degrades; keeping four of them is enough to prevent that.

**Positions are those within the cache**, not those in the text. A query at position t whose window begins at w > s sees
the s sinks at 0 … s - 1 and its window at s, s + 1, …, as if the e = w - s evicted tokens between them did not exist.
So no distance is larger than the model was trained on. The paper caches unrotated keys and rotates all of them in every
step. That is not necessary with RoPE. R(a) rotates by position a; a score depends on the difference only:

    ⟨R(a) q, R(b) k⟩ = ⟨R(a - b) q, k⟩          because R(b)ᵀ R(a) = R(a - b)

Keys are cached as R(p) k with their position p in the text, and the query is R(t) q. Within the cache, the query has
position t - e.

    window key at p - e:   the difference is (t - e) - (p - e) = t - p, unchanged: cached key and query stay as they are
    sink key at j:         the difference is  t - e - j:  ⟨R(t - e) q, R(j) k⟩ = ⟨R(-e) R(t) q, R(j) k⟩

So only the query changes, and only for the scores of the sinks: it is rotated back by e. This is exact, costs one more
copy of q per layer, and changes no key. e differs between queries; it is 0 while nothing is evicted. In code, q is the
rotated query, and attention adds the bias ⟨R(-e) q - q, k⟩ / √d to the scores of the sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.layout_options import check_at_least
from minillm.cache.window import WindowKVCache
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig
from minillm.models.rope import inverse_frequencies
from minillm.ops.rope import rope


class SinksKVCache(WindowKVCache):
    """The first `sinks` tokens, the last `window` tokens, and `spare` more so that tokens can be rolled back.

    In a layer without RoPE, the sinks are kept and no query is rotated. If a layer has its own sliding window,
    `sinks + window` must fit into it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sinks: int = 4,
        window: int = 252,
        spare: int = 16,
    ) -> None:
        _check(config, sinks, window)
        self.num_sinks = sinks
        super().__init__(config, num_blocks, block_size, dtype, device, window=window, spare=spare)
        self.rotated = [config.rotates(layer) for layer in range(config.num_layers)]
        # Only the frequencies: the query already contains YaRN's factor on cosines and sines.
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)[0].to(device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of the current requests, and of the RoPE frequencies."""
        return super().num_bytes + self.frequencies.nbytes

    def sink_query_delta(self, layer: int, q: Tensor, batch: Batch) -> Tensor | None:
        """R(-e) q - q, which moves `q` to its position within the cache; None if no query moves."""
        if not self.rotated[layer] or max(batch.seq_lens) <= self.num_sinks + self.window:
            return None
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, signed_sin = batch.once_per_step(SinksKVCache, lambda: self._rotate_back(batch.positions, dtype), self)
        return rope(q.to(cos.dtype), cos - 1, signed_sin).to(q.dtype)

    def _rotate_back(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of R(-e) for each new token, each `[num_tokens, 1, head_dim]`."""
        evicted = (positions + 1 - self.window - self.num_sinks).clamp(min=0)
        angles = torch.outer(evicted.to(dtype), self.frequencies.to(dtype))
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((sin, -sin), dim=-1).unsqueeze(1)


def _check(config: ModelConfig, sinks: int, window: int) -> None:
    check_at_least("sinks", sinks, 1)
    check_at_least("window", window, 1)
    for layer in range(config.num_layers):
        own = config.window(layer)
        if own is not None and sinks + window > own:
            raise ConfigError(
                f"kv_cache_config: sinks={sinks} and window={window} give a query {sinks + window} tokens, but layer "
                f"{layer} of this model has a window of {own}; lower their sum to {own}, or use layout 'window'"
            )
