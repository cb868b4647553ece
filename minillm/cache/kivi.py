"""KIVI's layout: INT4 keys per channel, INT4 values per token, the newest tokens whole (Liu et al. 2024, section 3).

Keys have a few channels that are large for every token. A scale per token must span them and leaves few codes for the
other channels; a scale per channel does not, but it needs a group of tokens that is complete. So the newest tokens
wait in full precision until their group can go.

    position   0          32         64         96   …                         p
               [ group 0 ][ group 1 ][ group 2 ][ … recent, in full precision … ]
               INT4, each group with its own scale and zero per channel (keys) or per token (values)

What a query at position p sees depends on p alone: tokens below `num_quantized(p + 1)` as INT4, the rest whole. So
results do not depend on how a prompt was chunked, on the batch, on preemption or on drafts that were rejected (but for
codes on the border of a step, see `PagedQuantizedKVCache`). It costs this: in a prefill, tokens that are whole for
early queries and INT4 for late ones are there twice.

Differences from the paper: it attends over the whole prompt in full precision and quantises afterwards, so its result
depends on what counts as the prompt; and it lets each value leave the window alone, here values leave with their
keys' group, so that one boundary serves both.

Where it loses: requests are attended one by one, which a GPU spends waiting for launches; every step makes numbers of
all codes; and the recent tokens weigh heavily where contexts are short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.base import Batch, KVCache
from minillm.cache.rows import check_at_least
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig
from minillm.ops.kv_quant import dequantize_affine, head_group, pack_int4, quantize_affine, unpack_int4


@dataclass(frozen=True)
class Shape:
    """How many rows of which kind one request has; `Shape.of` checks the options."""

    group_size: int
    """Tokens whose keys share their scales, and most channels whose values share one."""
    residual: int
    """Newest tokens that are stored whole."""
    rollback: int
    """How many of those are kept only so that tokens can be taken back."""
    num_groups: int
    num_recent: int
    """Rows for whole tokens: `residual`, or the context if that is shorter."""

    @classmethod
    def of(cls, max_len: int, group_size: int, residual: int, rollback: int) -> Shape:
        """The rows of a request of up to `max_len` tokens. Raises `ConfigError` for options that make no sense."""
        check_at_least("group_size", group_size, 1)
        check_at_least("residual", residual, 1)
        check_at_least("rollback", rollback, 0)
        if residual < group_size + rollback:
            raise ConfigError(
                f"kv_cache_config: residual={residual} is below group_size + rollback = {group_size + rollback}, so a "
                "group would have to go before it is complete; raise residual or lower one of the others"
            )
        empty = cls(group_size, residual, rollback, 0, min(residual, max_len))
        return cls(group_size, residual, rollback, empty.num_quantized(max_len) // group_size, empty.num_recent)

    def num_quantized(self, num_tokens: int) -> int:
        """Tokens that the last of `num_tokens` sees as INT4: whole groups, so that at most
        `residual - rollback` tokens are left whole."""
        excess = max(0, num_tokens - (self.residual - self.rollback))
        return -(-excess // self.group_size) * self.group_size


@dataclass(frozen=True)
class Step:
    """What one request does in every layer of a step, worked out once."""

    row: int
    """Its place in the pools."""
    tokens: slice
    """Its new tokens among those of the step."""
    old: Tensor
    """Recent rows that hold the tokens which are stored, not quantised yet, and needed."""
    keep: Tensor
    """Recent rows that its newest tokens go to."""
    flush: slice
    """Groups that are complete and leave the recent tokens in this step."""
    visible_from: int
    """Index, among old and new tokens, of the first one that some query sees whole."""
    hidden: Tensor | None
    """`[queries, INT4 tokens + whole tokens]`: where not to look; None if every query sees all."""


class Int4Groups:
    """Keys or values of whole groups of tokens, as packed codes with a scale and a zero point for each slice."""

    def __init__(
        self, lead: tuple[int, int], numbers: tuple[int, int, int, int, int], dim: int, device: torch.device
    ) -> None:
        """`lead`: layers, requests. `numbers` of each: groups, tokens of a group, KV heads, channel groups, channels of
        one. `dim`: which of these shares a scale, 1 (per channel) or 4 (per token)."""
        self.numbers, self.dim = numbers, dim
        scales = (*numbers[:dim], 1, *numbers[dim + 1 :])
        packed = (*numbers[:3], numbers[3] * numbers[4] // 2)
        self.codes = torch.empty((*lead, *packed), dtype=torch.uint8, device=device)
        self.scale = torch.empty((*lead, *scales), dtype=torch.float16, device=device)
        self.zero = torch.empty_like(self.scale)

    @property
    def num_bytes(self) -> int:
        """Codes, scales, zero points."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    def write(self, layer: int, row: int, groups: slice, x: Tensor) -> None:
        """Quantise `x`, `[tokens, num_kv_heads, head_dim]`, the tokens of these groups."""
        codes, scale, zero = quantize_affine(x.reshape(-1, *self.numbers[1:]), self.dim)
        self.codes[layer, row, groups] = pack_int4(codes.flatten(-2))
        self.scale[layer, row, groups] = scale
        self.zero[layer, row, groups] = zero

    def read(self, layer: int, row: int, count: int, dtype: torch.dtype) -> Tensor:
        """The tokens of the first `count` groups, `[tokens, num_kv_heads, head_dim]`."""
        codes = unpack_int4(self.codes[layer, row, :count]).view(count, *self.numbers[1:])
        x = dequantize_affine(codes, self.scale[layer, row, :count], self.zero[layer, row, :count], dtype)
        return x.flatten(3).flatten(0, 1)


class KiviKVCache(KVCache):
    """`group_size` tokens share the scales of their keys; the last `residual` tokens are stored whole.

    Of those, `rollback` are kept only so that as many tokens can be taken back: a query sees the newest
    `residual - rollback - group_size + 1` to `residual - rollback` tokens whole, the others as INT4. Values are grouped
    along the head, `group_size` channels at most. Bytes per number: 5/8 at groups of 32 (half a byte, and 4 bytes of
    scale and zero point per group), and the model's dtype for the recent rows.

    Raises `ConfigError` if `residual` is below `group_size + rollback`, `UnsupportedError` for an odd head size.
    """

    whole_sequences = True
    supports_prefix_sharing = False

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
        self.shape = Shape.of(block_size, group_size, residual, rollback)
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        channels = head_group(config.head_dim, group_size)
        lead, heads = (config.num_layers, num_blocks), config.num_kv_heads
        numbers = (self.shape.num_groups, group_size, heads, config.head_dim // channels, channels)
        self.keys, self.values = (Int4Groups(lead, numbers, dim, device) for dim in (1, 4))
        recent = (*lead, self.shape.num_recent, heads, config.head_dim)
        self.recent_keys, self.recent_values = (torch.empty(recent, dtype=dtype, device=device) for _ in "kv")

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        """All that one request of up to `block_size` tokens needs, its recent rows included."""
        return cls(config, 1, block_size, dtype, torch.device("meta"), **options).num_bytes

    @property
    def num_bytes(self) -> int:
        """Codes, scales, zero points and recent rows."""
        groups = self.keys.num_bytes + self.values.num_bytes
        return groups + self.recent_keys.nbytes + self.recent_values.nbytes

    @property
    def max_rollback(self) -> int:
        """The option `rollback`."""
        return self.shape.rollback

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        window = self.windows[layer]
        if window not in batch.plans:
            batch.plans[window] = [_plan(batch, r, self.shape, window) for r in range(batch.num_requests)]
        out = torch.empty_like(q)
        for step in batch.plans[window]:
            new_k, new_v = k[step.tokens], v[step.tokens]
            keys = self._store(layer, step, new_k, self.keys, self.recent_keys)
            values = self._store(layer, step, new_v, self.values, self.recent_values)
            out[step.tokens] = _attention(q[step.tokens], keys, values, step.hidden)
        return out

    def _store(self, layer: int, step: Step, new: Tensor, groups: Int4Groups, recent: Tensor) -> Tensor:
        """Keep the new keys (or values), quantise what leaves the window; returns all that the queries look at."""
        rows = recent[layer, step.row]
        whole = torch.cat((rows[step.old], new))
        rows[step.keep] = new[-len(step.keep) :]
        leaving = (step.flush.stop - step.flush.start) * self.shape.group_size
        if leaving:
            groups.write(layer, step.row, step.flush, whole[:leaving])
        if not step.flush.stop:
            return whole
        return torch.cat((groups.read(layer, step.row, step.flush.stop, new.dtype), whole[step.visible_from :]))


def _plan(batch: Batch, request: int, shape: Shape, window: int | None) -> Step:
    device, end = batch.block_tables.device, batch.seq_lens[request]
    start = end - batch.query_lens[request]
    before, after = shape.num_quantized(start), shape.num_quantized(end)
    first = shape.num_quantized(start + 1)
    """Below this position no query of this step sees a token whole."""
    return Step(
        row=int(batch.block_tables[request, 0]),
        tokens=slice(*batch.query_start[request : request + 2]),
        old=torch.arange(before, start, device=device) % shape.num_recent,
        keep=torch.arange(max(start, end - shape.num_recent), end, device=device) % shape.num_recent,
        flush=slice(before // shape.group_size, after // shape.group_size),
        visible_from=first - before,
        hidden=_hidden(range(start, end), first, after, shape, window, device),
    )


def _hidden(
    queries: range, first: int, after: int, shape: Shape, window: int | None, device: torch.device
) -> Tensor | None:
    """Where the queries at these positions must not look, among `after` INT4 tokens and the whole ones from `first`."""
    if len(queries) == 1 and window is None:
        return None
    position = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    boundary = torch.tensor([shape.num_quantized(p + 1) for p in queries], device=device).unsqueeze(1)
    coded = torch.arange(after, device=device)
    whole = torch.arange(first, queries.stop, device=device)
    hidden = torch.cat((coded >= boundary, (whole < boundary) | (whole > position)), dim=1)
    return hidden if window is None else hidden | (torch.cat((coded, whole)) <= position - window)


def _attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """One request: `q` `[queries, num_heads, head_dim]` over `[rows, num_kv_heads, head_dim]`; returns like `q`."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    visible = None if hidden is None else ~hidden
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
