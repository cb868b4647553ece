"""Random steps for caches that keep a request in one piece, judged one query at a time by a textbook reference.

Requests begin, append chunks, take tokens back and begin again in the place of another. The reference keeps every
token's query, key and value *before rotation*, so that it can give them any position it likes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import KVCache
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.rope import inverse_frequencies

CPU = torch.device("cpu")
CONTEXT = 160

Reference = Callable[[ModelConfig, int, Tensor, Tensor, Tensor], Tensor]
"""`(config, layer, q, keys, values)`: the last token's `q` `[heads, dim]`, all `keys` and `values` `[tokens, kv, dim]`,
none of them rotated; returns `[heads, dim]`."""


def small_config(**changes: object) -> ModelConfig:
    fields = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "rope": RopeConfig(theta=100.0),
    }
    return ModelConfig(**{**fields, **changes})


def batch_of(segments: list[tuple[int, int, int]]) -> Batch:
    """A step of `(place, past, new tokens)`."""
    query_start = [0]
    for _, _, count in segments:
        query_start.append(query_start[-1] + count)
    return Batch(
        token_ids=torch.zeros(query_start[-1], dtype=torch.int64),
        positions=torch.cat([torch.arange(past, past + count) for _, past, count in segments]),
        slot_mapping=torch.cat([place * CONTEXT + torch.arange(past, past + count) for place, past, count in segments]),
        block_tables=torch.tensor([[place] for place, _, _ in segments]),
        query_start=query_start,
        seq_lens=[past + count for _, past, count in segments],
        block_size=CONTEXT,
    )


def rotated(config: ModelConfig, layer: int, x: Tensor, positions: Tensor) -> Tensor:
    """RoPE by complex numbers: `x` `[tokens, heads, dim]`, unless the layer has none."""
    if not config.rotates(layer):
        return x
    frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.outer(positions.double(), frequencies.double()))
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * turn.unsqueeze(1)
    return (torch.cat((turned.real, turned.imag), dim=-1) * scale).to(x.dtype)


def textbook(config: ModelConfig, layer: int, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """One query, the last of `positions`, over these keys as they are, rotated to `positions`."""
    groups = config.num_heads // config.num_kv_heads
    q = rotated(config, layer, q.unsqueeze(0), positions[-1:])[0]
    keys = rotated(config, layer, keys, positions).repeat_interleave(groups, dim=1)
    scores = torch.einsum("hd,khd->hk", q, keys) / config.head_dim**0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values.repeat_interleave(groups, dim=1))


def last_tokens(window: int) -> Reference:
    """Everyone sees the last `window` tokens, or what the layer's own window leaves of them."""

    def attention(config: ModelConfig, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen = slice(max(0, len(keys) - min(window, config.window(layer) or window)), None)
        return textbook(config, layer, q, keys[seen], values[seen], torch.arange(len(keys))[seen])

    return attention


full = last_tokens(10**9)


@dataclass
class Text:
    """One request: per layer `[tokens, kv heads, dim]`, not rotated."""

    keys: list[Tensor]
    values: list[Tensor]
    written: int = 0
    """One more than the last position ever written."""

    def cut(self, length: int) -> None:
        self.keys = [x[:length] for x in self.keys]
        self.values = [x[:length] for x in self.values]


@dataclass
class Play:
    """Runs random steps through a cache and compares every output with the reference."""

    config: ModelConfig
    cache: KVCache
    reference: Reference
    seed: int
    max_back: int
    """Tokens that may be taken back."""
    texts: dict[int, Text] = field(default_factory=dict)
    num_rolled_back: int = 0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        torch.manual_seed(self.seed)

    def steps(self, count: int, places: int, chunks: tuple[int, ...] = (1, 1, 1, 2, 5, 17, 40)) -> Play:
        for _ in range(count):
            chosen = self.rng.sample(range(places), self.rng.randint(1, places))
            self.step([(place, self._past(place), self.rng.choice(chunks)) for place in chosen])
        return self

    def _past(self, place: int) -> int:
        """How many tokens stay: all, or fewer after a roll-back, or none because the place changes hands."""
        text = self.texts.get(place)
        if text is None or text.written > CONTEXT - 40 or self.rng.random() < 0.05:
            if self.rng.random() < 0.5:
                self.cache.free([place])
            return 0
        length = len(text.keys[0])
        if self.rng.random() < 0.4:
            return self.rng.randint(max(1, text.written - self.max_back), length)
        return length

    def step(self, segments: list[tuple[int, int, int]]) -> None:
        """Run `(place, past, new tokens)` through every layer; assert that outputs are the reference's:
        of each request the first, the last and three others."""
        batch, config = batch_of(segments), self.config
        for place, past, count in segments:
            if not past:
                nothing = [torch.empty(0, config.num_kv_heads, config.head_dim, dtype=self.dtype)] * config.num_layers
                self.texts[place] = Text(nothing, nothing)
            self.num_rolled_back += past < len(self.texts[place].keys[0])
            self.texts[place].cut(past)
            self.texts[place].written = max(self.texts[place].written, past + count)
        tokens = batch.query_start[-1]
        for layer in range(config.num_layers):
            q = torch.randn(tokens, config.num_heads, config.head_dim, dtype=self.dtype)
            k, v = torch.randn(2, tokens, config.num_kv_heads, config.head_dim, dtype=self.dtype)
            turned = [rotated(config, layer, x, batch.positions) for x in (q, k)]
            out = self.cache.attend(layer, *turned, v, batch)
            for r, (place, past, count) in enumerate(segments):
                text, own = self.texts[place], slice(*batch.query_start[r : r + 2])
                text.keys[layer] = keys = torch.cat((text.keys[layer], k[own]))
                text.values[layer] = values = torch.cat((text.values[layer], v[own]))
                checked = {0, count - 1, *self.rng.sample(range(count), min(count, 3))}
                for i in checked:
                    expected = self.reference(config, layer, q[own][i], keys[: past + i + 1], values[: past + i + 1])
                    torch.testing.assert_close(out[own][i], expected, rtol=1e-10, atol=1e-10)


def tensor_bytes(cache: KVCache) -> int:
    """Bytes of every tensor that can be reached from `cache`, whatever it says of itself."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[object] = [vars(cache)]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple | set):
            todo += thing
        elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("minillm"):
            todo.append(vars(thing))
    return sum(found.values())


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """`torch.empty` gives NaN inside: whoever multiplies by a row that was never written is found out."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
