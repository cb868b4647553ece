"""What the layouts that keep a request in one piece share: attention over one tensor of rows per request.

A row is the key (or value) of one token in one layer, `[num_kv_heads, head_dim]`. On a CPU every request is a product
of its own, on a view of its rows, so nothing is gathered: one layer of decoding 8 requests of 800 rows took 0.7 ms
that way and 1.8 ms as one padded product (minicoder's heads, one core of an AMD EPYC; at 50 rows both took 0.16 ms).
A GPU would spend that loop launching kernels, so there all requests with few new tokens are padded to one product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minillm.cache.base import Batch
from minillm.errors import ConfigError

FEW_QUERIES = 16
"""Up to this many new tokens a request counts as decoding or verifying; above, as a prefill."""
SLOW_TO_LAUNCH = ("cuda",)
"""Devices on which one padded product beats one product per request."""


@dataclass(frozen=True)
class Rectangle:
    """The new tokens of some requests, as many query rows for each; a short request repeats its last query."""

    requests: list[int]
    """Their indices in the step."""
    tokens: slice | Tensor
    """Which of the step's tokens the rows are, request by request. A repeated query gives the same output again, so
    that `out[tokens] = …` is right without taking repetitions out first."""
    hidden: Tensor | None
    """Where not to look, `[count, 1, 1, queries, rows]`; None if every query sees every row."""


def query_positions(batch: Batch, requests: Sequence[int]) -> Tensor:
    """Positions of the new tokens of `requests`, `[count, longest]`; a short row repeats its last one."""
    longest = max(batch.query_lens[r] for r in requests)
    rows = []
    for r in requests:
        past, last = batch.seq_lens[r] - batch.query_lens[r], batch.seq_lens[r] - 1
        rows.append([min(past + j, last) for j in range(longest)])
    return torch.tensor(rows, device=batch.block_tables.device)


def together(batch: Batch, requests: Sequence[int]) -> bool:
    """Whether these requests are padded to one product."""
    return len(requests) > 1 and batch.block_tables.device.type in SLOW_TO_LAUNCH


def rectangles(batch: Batch, requests: Sequence[int], hidden: Tensor | None, rows: Sequence[int]) -> list[Rectangle]:
    """One rectangle for all `requests` where launching is slow, else one for each of them.

    `hidden`: `[count, longest, max(rows)]` or None. `rows`: how many rows each of them looks at.
    """
    if not requests:
        return []
    if hidden is not None:
        hidden = hidden[:, None, None]
    if together(batch, requests):
        return [_padded(batch, requests, hidden)]
    alone = []
    for i, r in enumerate(requests):
        count = batch.query_lens[r]
        mask = None if hidden is None else hidden[i : i + 1, :, :, :count, : rows[i]]
        alone.append(Rectangle([r], slice(*batch.query_start[r : r + 2]), mask))
    return alone


def _padded(batch: Batch, requests: Sequence[int], hidden: Tensor | None) -> Rectangle:
    longest, tokens = max(batch.query_lens[r] for r in requests), []
    for r in requests:
        tokens += [batch.query_start[r] + min(j, batch.query_lens[r] - 1) for j in range(longest)]
    return Rectangle(list(requests), torch.tensor(tokens, device=batch.block_tables.device), hidden)


def side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """`[count, most rows, num_kv_heads, head_dim]`: a view of one request's rows, or those of several padded with 0."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)


def product(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, q_sinks: Tensor | None = None, num_sinks: int = 0
) -> Tensor:
    """Attention of `count · longest` queries over the rows of their requests: returns like `q`.

    `q`: `[count · longest, num_heads, head_dim]`; `k`, `v`: `[count, rows, num_kv_heads, head_dim]`, finite wherever
    they are hidden; `hidden`: `[count, 1, 1, longest, rows]`. The first `num_sinks` rows are scored with `q_sinks`, if
    it is given.
    """
    count, _, num_kv, dim = k.shape
    keys = k.permute(0, 2, 3, 1)
    if q_sinks is None:
        scores = _packed(q, count, num_kv) @ keys
    else:
        sinks = _packed(q_sinks, count, num_kv) @ keys[..., :num_sinks]
        scores = torch.cat((sinks, _packed(q, count, num_kv) @ keys[..., num_sinks:]), dim=-1)
    longest = len(q) // count
    if hidden is not None:
        scores.unflatten(2, (-1, longest)).masked_fill_(hidden, float("-inf"))
    out = scores.softmax(-1) @ v.transpose(1, 2)
    return out.view(count, num_kv, -1, longest, dim).permute(0, 3, 1, 2, 4).reshape(q.shape)


def _packed(q: Tensor, count: int, num_kv: int) -> Tensor:
    """All query heads that share a KV head, for all queries of a request, as rows of one product, scaled by 1/√dim."""
    dim = q.shape[-1]
    rows = q.view(count, len(q) // count, num_kv, -1, dim).permute(0, 2, 3, 1, 4)
    return rows.reshape(count, num_kv, -1, dim).mul(dim**-0.5)


def new_tokens(k: Tensor, v: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """The new keys and values of each request in turn."""
    return zip(k.split(batch.query_lens), v.split(batch.query_lens), strict=True)


def check_at_least(name: str, value: Any, limit: int) -> None:
    """Raise `ConfigError` unless the option of a layout is an integer of at least `limit`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < limit:
        raise ConfigError(f"kv_cache_config: {name}={value!r} must be an integer of at least {limit}")
