"""Keys and values of some consecutive tokens, outside of any cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.models.config import ModelConfig
from minillm.models.rope import inverse_frequencies
from minillm.ops.rerotation import rerotate

Rotation = Callable[[Tensor, Tensor, int], Tensor]
"""`(keys, frequencies, delta)` → the keys `delta` positions further on, as `minillm.ops.rerotation.rerotate`."""


@dataclass(frozen=True)
class KVSpan:
    """What a model's layers have stored of the tokens at positions `start`, `start` + 1, …"""

    token_ids: Sequence[int]
    start: int
    keys: Tensor
    """`[num_layers, num_tokens, num_kv_heads, head_dim]`, rotated for their positions."""
    values: Tensor
    """As `keys`; values are not rotated."""

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def between(self, start: int, end: int) -> KVSpan:
        """The part at positions `start` to `end` - 1."""
        part = slice(start - self.start, end - self.start)
        return KVSpan(self.token_ids[part], start, self.keys[:, part], self.values[:, part])

    def placed_at(self, start: int) -> KVSpan:
        """The same keys and values at other positions, *without* rotating them: their positions are then wrong."""
        return KVSpan(self.token_ids, start, self.keys, self.values)

    def moved_to(self, start: int, config: ModelConfig, rotate: Rotation = rerotate) -> KVSpan:
        """The span at other positions, its keys rotated by the difference. `config`: that of the model."""
        if start == self.start:
            return self
        frequencies, _ = inverse_frequencies(config.rope, config.head_dim)
        rotated = [config.rotates(layer) for layer in range(config.num_layers)]
        moved = rotate(self.keys, frequencies, start - self.start)
        if not all(rotated):
            moved = torch.where(torch.tensor(rotated, device=moved.device)[:, None, None, None], moved, self.keys)
        return KVSpan(self.token_ids, start, moved, self.values)
