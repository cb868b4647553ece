"""Attention sinks: the first few tokens for good, and a sliding window (StreamingLLM: Xiao et al. 2024, section 3.2).

Models put much of their attention on the first tokens, whatever these say, because the softmax must put it somewhere.
A plain window takes them away and the text falls apart; keeping four of them is enough to mend it.

**Positions are those within the cache**, not those in the text: a query at position t whose window begins at w > s sees
the s sinks at 0 … s - 1, then its window at s, s + 1, …, as if the e = w - s tokens between had never been. So no
distance is ever larger than the model was trained on. The paper keeps keys unrotated and rotates all of them anew in
every step. RoPE makes that needless. R(a) rotates by position a; a score depends on the difference only:

    ⟨R(a) q, R(b) k⟩ = ⟨R(a - b) q, k⟩          because R(b)ᵀ R(a) = R(a - b)

Keys are cached as R(p) k at their position p in the text, and the query arrives as R(t) q. Within the cache the query
stands at t - e.

    window key at p - e:   the difference is (t - e) - (p - e) = t - p, unchanged: the cached key and the query as is
    sink key at j:         the difference is  t - e - j:  ⟨R(t - e) q, R(j) k⟩ = ⟨R(-e) R(t) q, R(j) k⟩

So the sinks are scored with the query turned back by e, and everything else stays as it is: one more copy of q per
layer, exact, and no key is ever touched. e differs from query to query; where nothing is evicted yet it is 0. What is
added to the scores of the sinks is ⟨R(-e) q - q, k⟩ / √d, as a bias of an attention that is otherwise the usual one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.base import Batch
from minillm.cache.rows import check_at_least
from minillm.cache.window import WindowKVCache, ring_bytes
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig
from minillm.models.rope import inverse_frequencies, rotate


class SinksKVCache(WindowKVCache):
    """The first `sinks` tokens, the last `window` tokens, and `spare` more that can be taken back.

    A layer that does not rotate has no positions to reassign: there the sinks are simply kept. A model whose layers
    have a sliding window of their own is used only if `sinks + window` fits into it.
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
        # The frequencies alone: YaRN's factor on cosines and sines is in the query already.
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)[0].to(device)

    @classmethod
    def bytes_per_block(
        cls,
        config: ModelConfig,
        block_size: int,
        dtype: torch.dtype,
        *,
        sinks: int = 4,
        window: int = 252,
        spare: int = 16,
    ) -> int:
        """Keys and values of sinks and ring, or of the whole context where that is shorter."""
        _check(config, sinks, window)
        return ring_bytes(config, block_size, dtype, sinks, window, spare)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of the requests that are here now, and of the frequencies of rotation."""
        return super().num_bytes + self.frequencies.nbytes

    def sink_turn(self, layer: int, q: Tensor, batch: Batch) -> Tensor | None:
        """R(-e) q - q, so that `q` plus this stands where it belongs within the cache."""
        if not self.rotated[layer] or max(batch.seq_lens) <= self.num_sinks + self.window:
            return None
        key = (self, "back")
        if key not in batch.plans:
            batch.plans[key] = self._back(batch.positions, torch.promote_types(q.dtype, torch.float32))
        cos, signed_sin = batch.plans[key]
        return rotate(q.to(cos.dtype), cos - 1, signed_sin).to(q.dtype)

    def _back(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
                f"kv_cache_config: sinks={sinks} and window={window} show a query {sinks + window} tokens, but layer "
                f"{layer} of this model was trained to see {own}; lower them to {own} together, or use layout 'window'"
            )
