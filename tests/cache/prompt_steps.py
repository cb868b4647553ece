"""Random steps for layouts that compress a prompt once it is complete, judged by a definition that sees everything.

Requests of random lengths run together in random chunks. Some chunks end in drafts, which the next chunk overwrites.
Some requests start again from their first token. What a query must see follows from its position and from the length of
the prompt; a definition computes all outputs of a request at once from all of its queries, keys and values.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import KVCache
from minillm.models.config import ModelConfig
from tests.cache.steps import CONTEXT

Definition = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""`(queries [n, heads, dim], keys [n, kv heads, dim], values, prompt length)` of one layer → for queries behind the
prompt, of each query head: keys `[heads, n, dim]`, values `[heads, n, dim]`, and which tokens are gone, `[heads, n]`
or, if that depends on the query, `[heads, n queries, n]`."""


@dataclass
class Text:
    """One request: everything it will ever bring, per layer."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    prompt: int | None
    done: int = 0

    def __len__(self) -> int:
        return len(self.q[0])


def random_text(config: ModelConfig, length: int, prompt: int | None, dtype: torch.dtype = torch.float64) -> Text:
    layers = range(config.num_layers)
    q = [torch.randn(length, config.num_heads, config.head_dim, dtype=dtype) for _ in layers]
    k, v = ([torch.randn(length, config.num_kv_heads, config.head_dim, dtype=dtype) for _ in layers] for _ in "kv")
    # Channels and tokens of very different size, so that there is something to choose.
    k = [x * torch.rand(config.num_kv_heads, config.head_dim, dtype=dtype) * 2 for x in k]
    return Text(q, k, v, prompt)


def step_of(parts: list[tuple[int, int, int, int | None]], token_ids: list[int] | None = None) -> Batch:
    """A step of `(place, past, new tokens, prompt length)`."""
    starts = [0]
    for _, _, count, _ in parts:
        starts.append(starts[-1] + count)
    nothing = torch.empty(0)
    tables = torch.tensor([[place] for place, *_ in parts])
    positions = torch.cat([torch.arange(past, past + count) for _, past, count, _ in parts])
    seq_lens = [past + count for _, past, count, _ in parts]
    prompts = [prompt for *_, prompt in parts]
    ids = nothing if token_ids is None else torch.tensor(token_ids)
    return Batch(ids, positions, nothing, tables, starts, seq_lens, CONTEXT, prompt_lens=prompts)


def expected(text: Text, layer: int, definition: Definition) -> Tensor:
    """The outputs of all tokens of a text, `[n, heads, dim]`, one query and one head at a time."""
    q, k, v = text.q[layer], text.k[layer], text.v[layer]
    groups, out = q.shape[1] // k.shape[1], torch.empty_like(q)
    prompt = len(q) if text.prompt is None else text.prompt
    after = definition(q, k, v, prompt) if len(q) > prompt else None
    for p in range(len(q)):
        for h in range(q.shape[1]):
            keys, values, gone = k[:, h // groups], v[:, h // groups], torch.zeros(len(q), dtype=torch.bool)
            if p >= prompt:
                keys, values, gone = (x[h] for x in after)
                gone = gone[p] if gone.ndim == 2 else gone
            seen = [j for j in range(p + 1) if not gone[j]]
            weights = (keys[seen] @ q[p, h] / q.shape[2] ** 0.5).softmax(0)
            out[p, h] = weights @ values[seen]
    return out


def outputs_are_the_definitions(
    cache: KVCache,
    config: ModelConfig,
    definition: Definition,
    seed: int,
    texts: list[Text] | None = None,
    token_at: Callable[[int], int] | None = None,
) -> None:
    """Run the texts (three random ones) through the cache until all are done; every output must be as defined.
    `token_at`: the token at each position, the same in all texts; drafts are random tokens below 10."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    if texts is None:
        lengths = [rng.randint(30, 60) for _ in range(3)]
        texts = [random_text(config, n, rng.choice([None, n // 2, n - 7, 3, n])) for n in lengths]
    wanted = [[expected(text, layer, definition) for layer in range(config.num_layers)] for text in texts]
    while unfinished := [i for i, text in enumerate(texts) if text.done < len(text)]:
        parts, drafts = [], []
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            if rng.random() < 0.05:
                texts[i].done = 0
            text = texts[i]
            count = min(rng.choice([1, 1, 2, 5, 23]), len(text) - text.done)
            decodes = text.prompt is None or text.done >= text.prompt
            drafts.append(rng.choice([0, 3]) if decodes and text.done else 0)
            parts.append((i, text.done, count + drafts[-1], text.prompt))
        token_ids = None
        if token_at is not None:
            token_ids = []
            for (_, past, count, _), extra in zip(parts, drafts, strict=True):
                token_ids += [token_at(i) for i in range(past, past + count - extra)]
                token_ids += [rng.randrange(10) for _ in range(extra)]
        batch = step_of(parts, token_ids)
        for layer in range(config.num_layers):
            inputs = []
            for name in "qkv":
                rows = []
                for (i, past, count, _), extra in zip(parts, drafts, strict=True):
                    own = getattr(texts[i], name)[layer][past : past + count - extra]
                    rows += [own, torch.randn(extra, *own.shape[1:], dtype=own.dtype)]
                inputs.append(torch.cat(rows))
            out = cache.attend(layer, *inputs, batch)
            for r, ((i, past, count, _), extra) in enumerate(zip(parts, drafts, strict=True)):
                got = out[batch.query_start[r] : batch.query_start[r] + count - extra]
                torch.testing.assert_close(got, wanted[i][layer][past : past + count - extra], rtol=1e-9, atol=1e-9)
        for (i, past, count, _), extra in zip(parts, drafts, strict=True):
            texts[i].done = past + count - extra
    cache.free(range(len(texts)))
    assert not cache.num_bytes
