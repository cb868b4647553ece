"""KIVI: INT4 keys per channel, INT4 values per token, the newest tokens in full precision (Liu et al. 2024, section 3).

Keys have a few channels that are large for every token. A scale per token must cover them and leaves few codes for the
other channels. A scale per channel avoids that, but it needs a complete group of tokens. So the newest tokens stay in
full precision until their group is quantised.

    position   0          32         64         96   …                         p
               [ group 0 ][ group 1 ][ group 2 ][ … recent, in full precision … ]
               INT4, each group with its own scale and zero per channel (keys) or per token (values)

What a query at position p sees depends on p alone: tokens below `num_quantized(p + 1)` as INT4, the others in full
precision. So results do not depend on how a prompt was chunked, on the batch, on preemption or on rejected drafts
(except for numbers near a rounding border, see `PagedQuantizedKVCache`). The cost: in a prefill, some tokens are in
full precision for early queries and INT4 for late ones, so attention reads them twice.

Differences from the paper. The paper attends over the whole prompt in full precision and quantises it afterwards, so
its result depends on what counts as the prompt. It quantises each value on its own; here a value is quantised together
with its key's group, so that keys and values have the same boundary.

Where it loses: each request has its own attention call, so on a GPU kernel launches dominate; every step dequantises
all codes; and with short contexts, the recent tokens take most of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.batch import Batch
from minillm.cache.base import SequenceKVCache
from minillm.cache.layout_options import check_at_least
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig
from minillm.ops.kv_quant import dequantize_affine, head_group, pack_int4, quantize_affine, unpack_int4


@dataclass(frozen=True)
class KiviShape:
    """How many INT4 groups and full-precision rows one request has; `KiviShape.of` checks the options."""

    group_size: int
    """Tokens per group of keys, and most channels per group of values; a group shares a scale."""
    residual: int
    """Most tokens that are stored in full precision, the newest."""
    rollback: int
    """How many of those are kept only so that tokens can be rolled back."""
    num_groups: int
    num_recent: int
    """Full-precision rows: `residual`, or the context if that is shorter."""

    @classmethod
    def of(cls, max_len: int, group_size: int, residual: int, rollback: int) -> KiviShape:
        """The shape for requests of at most `max_len` tokens. Raises `ConfigError` for invalid options."""
        check_at_least("group_size", group_size, 1)
        check_at_least("residual", residual, 1)
        check_at_least("rollback", rollback, 0)
        if residual < group_size + rollback:
            raise ConfigError(
                f"kv_cache_config: residual={residual} is below group_size + rollback = {group_size + rollback}, so a "
                "group would be quantised before it is complete; raise residual or lower one of the others"
            )
        empty = cls(group_size, residual, rollback, 0, min(residual, max_len))
        return cls(group_size, residual, rollback, empty.num_quantized(max_len) // group_size, empty.num_recent)

    def num_quantized(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens the last of them sees as INT4: complete groups, just enough that at
        most `residual - rollback` tokens stay in full precision."""
        excess = max(0, num_tokens - (self.residual - self.rollback))
        return -(-excess // self.group_size) * self.group_size


@dataclass(frozen=True)
class RequestPlan:
    """What one request does in each layer of a step; computed once per step."""

    row: int
    """The request's row in the pools: its block id."""
    tokens: slice
    """The request's new tokens in the batch."""
    old: Tensor
    """Indices of the recent rows that hold the earlier tokens in full precision."""
    recent_rows: Tensor
    """Indices of the recent rows that the newest tokens are written to."""
    groups_to_quantise: slice
    """Groups that are quantised in this step."""
    visible_from: int
    """Index, among the old and new tokens, of the first one that some query sees in full precision."""
    hidden: Tensor | None
    """`[queries, INT4 tokens + full-precision tokens]`: True where a token is masked; None: nothing is masked."""


class Int4Groups:
    """The INT4 keys or values of complete groups of tokens: packed codes, scales and zero points."""

    def __init__(
        self,
        leading_shape: tuple[int, int],
        group_shape: tuple[int, int, int, int, int],
        dim: int,
        device: torch.device,
    ) -> None:
        """`leading_shape`: (layers, requests). `group_shape`: (groups, tokens per group, KV heads, channel groups,
        channels of one). `dim`: the dimension of `group_shape` that shares a scale, 1 (a scale per channel) or 4 (a
        scale per token)."""
        self.group_shape, self.dim = group_shape, dim
        scales = (*group_shape[:dim], 1, *group_shape[dim + 1 :])
        packed = (*group_shape[:3], group_shape[3] * group_shape[4] // 2)
        self.codes = torch.empty((*leading_shape, *packed), dtype=torch.uint8, device=device)
        self.scale = torch.empty((*leading_shape, *scales), dtype=torch.float16, device=device)
        self.zero = torch.empty_like(self.scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes, scales and zero points."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    def write(self, layer: int, row: int, groups: slice, x: Tensor) -> None:
        """Quantise and store `x`, the tokens of these groups: `[tokens, num_kv_heads, head_dim]`."""
        codes, scale, zero = quantize_affine(x.reshape(-1, *self.group_shape[1:]), self.dim)
        self.codes[layer, row, groups] = pack_int4(codes.flatten(-2))
        self.scale[layer, row, groups] = scale
        self.zero[layer, row, groups] = zero

    def read(self, layer: int, row: int, count: int, dtype: torch.dtype) -> Tensor:
        """Dequantise the tokens of the first `count` groups: `[tokens, num_kv_heads, head_dim]`."""
        codes = unpack_int4(self.codes[layer, row, :count]).view(count, *self.group_shape[1:])
        x = dequantize_affine(codes, self.scale[layer, row, :count], self.zero[layer, row, :count], dtype)
        return x.flatten(3).flatten(0, 1)


class KiviKVCache(SequenceKVCache):
    """INT4 keys in groups of `group_size` tokens; at most `residual` of the newest tokens in full precision.

    `rollback` of those are kept only so that as many tokens can be rolled back: a query sees the newest
    `residual - rollback - group_size + 1` to `residual - rollback` tokens in full precision, the others as INT4. Values
    are grouped along the head, at most `group_size` channels each. With groups of 32, an INT4 number takes 5/8 byte
    (half a byte, and 4 bytes of scale and zero point per group). The recent rows have the model's dtype.

    Raises `ConfigError` if `residual` is below `group_size + rollback` or `group_size` does not divide the head size,
    `UnsupportedError` for an odd head size.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        group_size: int = 32,
        residual: int = 64,
        rollback: int = 8,
    ) -> None:
        self.shape = KiviShape.of(block_size, group_size, residual, rollback)
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        channels = head_group(config.head_dim, group_size)
        lead, heads = (config.num_layers, num_blocks), config.num_kv_heads
        numbers = (self.shape.num_groups, group_size, heads, config.head_dim // channels, channels)
        self.keys, self.values = (Int4Groups(lead, numbers, dim, device) for dim in (1, 4))
        recent = (*lead, self.shape.num_recent, heads, config.head_dim)
        self.recent_keys, self.recent_values = (torch.empty(recent, dtype=dtype, device=device) for _ in "kv")

    @property
    def max_block_bytes(self) -> int:
        """Bytes of one request's codes, scales, zero points and recent rows, which are allocated at once."""
        return self.num_bytes // len(self.recent_keys[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes, scales, zero points and recent rows."""
        groups = self.keys.num_bytes + self.values.num_bytes
        return groups + self.recent_keys.nbytes + self.recent_values.nbytes

    @property
    def max_rollback(self) -> int:
        """The option `rollback`."""
        return self.shape.rollback

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        window = self.windows[layer]
        steps = batch.once_per_step(
            RequestPlan, lambda: [_plan(batch, r, self.shape, window) for r in range(batch.num_requests)], self, window
        )
        out = torch.empty_like(q)
        for step in steps:
            new_k, new_v = k[step.tokens], v[step.tokens]
            keys = self._store(layer, step, new_k, self.keys, self.recent_keys)
            values = self._store(layer, step, new_v, self.values, self.recent_values)
            out[step.tokens] = _attention(q[step.tokens], keys, values, step.hidden)
        return out

    def _store(self, layer: int, step: RequestPlan, new: Tensor, groups: Int4Groups, recent: Tensor) -> Tensor:
        """Store the new keys (or values) and quantise the groups to flush.

        Returns all keys (or values) that the queries read: the dequantised ones, then those in full precision.
        """
        rows = recent[layer, step.row]
        unquantised = torch.cat((rows[step.old], new))
        rows[step.recent_rows] = new[-len(step.recent_rows) :]
        num_flushed = (step.groups_to_quantise.stop - step.groups_to_quantise.start) * self.shape.group_size
        if num_flushed:
            groups.write(layer, step.row, step.groups_to_quantise, unquantised[:num_flushed])
        if not step.groups_to_quantise.stop:
            return unquantised
        return torch.cat(
            (groups.read(layer, step.row, step.groups_to_quantise.stop, new.dtype), unquantised[step.visible_from :])
        )


def _plan(batch: Batch, request: int, shape: KiviShape, window: int | None) -> RequestPlan:
    device, end = batch.block_tables.device, batch.seq_lens[request]
    start = end - batch.query_lens[request]
    before, after = shape.num_quantized(start), shape.num_quantized(end)
    first = shape.num_quantized(start + 1)  # the first token that a query of this step sees in full precision
    return RequestPlan(
        row=int(batch.block_tables[request, 0]),
        tokens=slice(*batch.query_start[request : request + 2]),
        old=torch.arange(before, start, device=device) % shape.num_recent,
        recent_rows=torch.arange(max(start, end - shape.num_recent), end, device=device) % shape.num_recent,
        groups_to_quantise=slice(before // shape.group_size, after // shape.group_size),
        visible_from=first - before,
        hidden=_hidden(range(start, end), first, after, shape, window, device),
    )


def _hidden(
    queries: range, first: int, after: int, shape: KiviShape, window: int | None, device: torch.device
) -> Tensor | None:
    """The mask (`RequestPlan.hidden`) of the queries at these positions, over the first `after` tokens in INT4 and the
    tokens from position `first` on in full precision."""
    if len(queries) == 1 and window is None:
        return None
    position = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    boundary = torch.tensor([shape.num_quantized(p + 1) for p in queries], device=device).unsqueeze(1)
    quantised = torch.arange(after, device=device)
    full = torch.arange(first, queries.stop, device=device)
    hidden = torch.cat((quantised >= boundary, (full < boundary) | (full > position)), dim=1)
    return hidden if window is None else hidden | (torch.cat((quantised, full)) <= position - window)


def _attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention of one request. `q`: `[queries, num_heads, head_dim]`; `k`, `v`: `[rows, num_kv_heads, head_dim]`."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    visible = None if hidden is None else ~hidden
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
