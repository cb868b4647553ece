"""The base of layouts that compress the prompt once it is complete, by what its last queries attend to.

    position   0                       P - w        P                      p
               [ the prompt's older tokens ][ window ][ generated tokens … ]
                 compressed at P              whole      whole

A request begins with whole rows. When its prompt of P tokens is complete, `compress` gets the queries of its last w
tokens (the observed queries) and all keys and values. The tokens before the window are then stored as `compress`
returns them, and their whole rows are freed. The window and all generated tokens stay whole.

So what a query sees depends on its position and on P alone: below P the whole prompt up to itself, from P on the
compressed tokens and the whole rows behind them. A chunk that crosses P is split there. Chunks, the batch, preemption
and rejected drafts do not change the result (but for last bits of sums, which can turn a near tie in a choice).

Memory is freed layer by layer, in the step that completes the prompt. A prompt that arrives in chunks needs whole rows
until then, so `bytes_per_block` counts whole rows for the whole context, and the block pool admits no more requests
than with layout `contiguous`. `num_bytes` is what is really used.

Loses: each request has its own attention call, which restores the compressed tokens in every step. Prefixes cannot be
shared: what is left of a prompt depends on how it ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.batch import Batch
from minillm.cache.base import SequenceKVCache
from minillm.cache.layout_options import check_at_least
from minillm.cache.sequence_rows import packed_attention
from minillm.errors import MinillmError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import additive_mask, pack_queries, unpack_outputs

Parts = tuple[Tensor, ...]
"""What a layout stores in place of compressed tokens."""


@dataclass
class LayerRows:
    """What one layer stores of one request."""

    keys: Tensor
    """Whole rows: `[rows, num_kv_heads, head_dim]`, of consecutive positions from `first` on."""
    values: Tensor
    queries: Tensor
    """The newest queries of the prompt, `[at most window, num_heads, head_dim]`; none after the prompt is complete."""
    first: int = 0
    """Tokens before this position are compressed."""
    parts: Parts = ()
    """The compressed tokens, as `CompressedPromptKVCache.compress` returned them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in (self.keys, self.values, self.queries, *self.parts))


@dataclass
class RequestRows:
    """What is stored of one request."""

    num_prompt_tokens: int | None
    """None: unknown, so nothing is compressed."""
    layers: list[LayerRows] = field(default_factory=list)


@dataclass(frozen=True)
class _Chunk:
    """New tokens of one request, all on one side of the end of its prompt."""

    request: RequestRows
    tokens: slice
    """Their indices in the batch."""
    past: int
    """Position of the first of them."""
    in_prompt: bool
    completes_prompt: bool


class CompressedPromptKVCache(SequenceKVCache):
    """`compress` and `restore`, or `compress` and `attention`, are those of a subclass.

    `window`: the last tokens of the prompt that stay whole, and whose queries are observed.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int,
    ) -> None:
        _check(config, window, type(self).__name__)
        self.config, self.window, self.dtype, self.device = config, window, dtype, device
        self.max_rows = block_size
        self.requests: dict[int, RequestRows] = {}
        """Key: block id. A block holds one request."""

    @property
    def max_block_bytes(self) -> int:
        """Bytes of a prompt as long as the context, in chunks, just before it is complete: whole rows and the observed
        queries."""
        config, queries = self.config, min(self.window, self.max_rows)
        numbers = 2 * self.max_rows * config.kv_size + queries * config.q_size
        return config.num_layers * numbers * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows, compressed tokens and observed queries of the current requests."""
        return sum(rows.num_bytes for request in self.requests.values() for rows in request.layers)

    @property
    def max_rollback(self) -> int:
        """All generated tokens can be rolled back. It is a number, not None, because a step that was interrupted while
        it compressed a prompt must be computed again from the prompt's first token (`Engine._recover`)."""
        return self.max_rows

    def free(self, block_ids: Sequence[int]) -> None:
        """See `KVCache.free`."""
        for block_id in block_ids:
            self.requests.pop(block_id, None)

    @abstractmethod
    def compress(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Parts | None:
        """What to store in place of all tokens of a prompt but its last `window`; None: keep their whole rows.

        `queries`: `[window, num_heads, head_dim]`; `keys`, `values`: those of the whole prompt, `[num_prompt_tokens,
        num_kv_heads, head_dim]`. Only called if the prompt is longer than the window. The tensors returned must not be
        views of those given.
        """

    def restore(self, layer: int, parts: Parts) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, from what `compress` returned: `[tokens, num_kv_heads, head_dim]` each."""
        raise NotImplementedError

    def attention(self, layer: int, q: Tensor, rows: LayerRows, hidden: Tensor | None) -> Tensor:
        """Attention of queries behind the prompt: over the compressed tokens and the whole rows.

        `q`: `[queries, num_heads, head_dim]`. `hidden`: True where a whole row is masked, `[queries, whole rows]`; None
        if none is. Returns like `q`.
        """
        keys, values = rows.keys, rows.values
        if rows.parts:
            old_keys, old_values = self.restore(layer, rows.parts)
            keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
        if hidden is not None:
            hidden = F.pad(hidden, (len(keys) - hidden.shape[1], 0))
        return dense_attention(q, keys, values, hidden)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`. Raises `MinillmError` if a request rolls back into its compressed prompt."""
        out = torch.empty_like(q)
        for chunk in batch.once_per_step(_Chunk, lambda: list(self._chunks(batch)), self):
            rows = chunk.request.layers[layer]
            queries = q[chunk.tokens]
            self._append(rows, chunk, k[chunk.tokens], v[chunk.tokens])
            out[chunk.tokens] = self.attention(layer, queries, rows, _hidden(chunk, rows))
            if chunk.in_prompt:
                rows.queries = torch.cat((rows.queries, queries))[-self.window :].clone()
            if chunk.completes_prompt:
                self._compress(layer, rows)
        return out

    def _append(self, rows: LayerRows, chunk: _Chunk, k: Tensor, v: Tensor) -> None:
        """Append new whole rows, in place of those from position `chunk.past` on."""
        if chunk.past < rows.first:
            raise MinillmError(
                f"a request rolled back to {chunk.past} tokens, but its first {rows.first} tokens are compressed; "
                "start the request again"
            )
        kept = chunk.past - rows.first
        rows.keys, rows.values = torch.cat((rows.keys[:kept], k)), torch.cat((rows.values[:kept], v))

    def _compress(self, layer: int, rows: LayerRows) -> None:
        queries, rows.queries = rows.queries, rows.queries[:0].clone()
        num_old = len(rows.keys) - self.window
        if num_old <= 0:
            return
        parts = self.compress(layer, queries, rows.keys, rows.values)
        if parts is not None:
            rows.parts, rows.first = parts, num_old
            rows.keys, rows.values = rows.keys[num_old:].clone(), rows.values[num_old:].clone()

    def _chunks(self, batch: Batch) -> Iterator[_Chunk]:
        """The new tokens of each request, split where its prompt ends."""
        block_ids = batch.block_tables[:, 0].tolist()
        prompt_lens = batch.prompt_lens or [None] * batch.num_requests
        for r, (block_id, end, count) in enumerate(zip(block_ids, batch.seq_lens, batch.query_lens, strict=True)):
            start = end - count
            if not start:
                self.requests[block_id] = self._new_request(prompt_lens[r])
            request = self.requests[block_id]
            prompt = request.num_prompt_tokens
            border = start if prompt is None else min(max(start, prompt), end)
            first = batch.query_start[r] - start  # index in the batch of position 0
            if start < border:
                yield _Chunk(request, slice(first + start, first + border), start, True, border == prompt)
            if border < end:
                yield _Chunk(request, slice(first + border, first + end), border, False, False)

    def _new_request(self, num_prompt_tokens: int | None) -> RequestRows:
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        empty, queries = (torch.empty(0, n, dim, dtype=self.dtype, device=self.device) for n in (kv_heads, heads))
        layers = [LayerRows(empty, empty, queries) for _ in range(self.config.num_layers)]
        return RequestRows(num_prompt_tokens, layers)


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention of one request. `q`: `[queries, num_heads, head_dim]`; `keys`, `values`: `[rows, num_kv_heads,
    head_dim]`; `hidden`: `[queries, rows]`, True where a row is masked. Returns like `q`."""
    num_kv = keys.shape[1]
    mask = None if hidden is None else additive_mask(hidden.unsqueeze(0), q.shape[1] // num_kv, q.dtype)
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))
    return unpack_outputs(packed_attention(pack_queries(q, 1, num_kv), keys, values, mask), len(q))


def _check(config: ModelConfig, window: int, layout: str) -> None:
    check_at_least("window", window, 1)
    for layer in range(config.num_layers):
        if (own := config.window(layer)) is not None:
            raise UnsupportedError(
                f"{layout} compresses a prompt for queries that may see all of it, but layer {layer} of this model has "
                f"a sliding window of {own} tokens; use layout 'window'"
            )


def _hidden(chunk: _Chunk, rows: LayerRows) -> Tensor | None:
    """True where a whole row comes after a query of this chunk, `[queries, whole rows]`; None: nowhere."""
    count = chunk.tokens.stop - chunk.tokens.start
    if count == 1:
        return None
    query = torch.arange(chunk.past, chunk.past + count, device=rows.keys.device).unsqueeze(1)
    return torch.arange(rows.first, rows.first + len(rows.keys), device=rows.keys.device) > query
