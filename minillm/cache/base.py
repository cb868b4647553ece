"""What a step tells the cache, and what every cache layout answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from minillm.models.config import ModelConfig


@dataclass(frozen=True)
class Batch:
    """One ragged step: for each request the tokens that are new to the cache, all side by side.

    Request r brings the tokens `query_start[r] … query_start[r + 1] - 1`; after the step it has `seq_lens[r]` tokens
    in the cache. Prefill, a chunk of prefill, decoding and verification differ in nothing but these numbers.
    """

    token_ids: Tensor
    """`[num_tokens]`, int64."""
    positions: Tensor
    """`[num_tokens]`, int64: index of each token in its request."""
    slot_mapping: Tensor
    """`[num_tokens]`, int64: where its key and value go, block id · block size + offset."""
    block_tables: Tensor
    """`[num_requests, max_blocks]`, int64; rows are padded with their first block."""
    query_start: list[int]
    """`num_requests + 1` numbers."""
    seq_lens: list[int]
    """`num_requests` numbers."""
    block_size: int
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What an attention op (by window) or a cache (by itself and the window) worked out for this step, so that every
    layer after the first finds it."""

    @property
    def num_requests(self) -> int:
        """Requests in this step."""
        return len(self.seq_lens)

    @cached_property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return [end - start for start, end in zip(self.query_start, self.query_start[1:], strict=False)]

    @cached_property
    def key_slots(self) -> Tensor:
        """`[num_requests, max(seq_lens)]`: the slot of every key, in order; padded with the request's first slot."""
        device = self.block_tables.device
        index = torch.arange(max(self.seq_lens), device=device)
        offset = torch.arange(self.block_size, device=device)
        slots = (self.block_tables.unsqueeze(-1) * self.block_size + offset).flatten(1)[:, : len(index)]
        if min(self.seq_lens) < slots.shape[1]:
            inside = index < torch.tensor(self.seq_lens, device=device).unsqueeze(1)
            slots = torch.where(inside, slots, slots[:, :1])
        return slots


class KVCache(ABC):
    """A layout of keys and values. It owns attention, so the model never knows how they are kept.

    A layout is built as `Layout(config, num_blocks, block_size, dtype, device, **options)`; its options are its
    keyword-only parameters, and what `kv_cache_config` names beside `layout` goes there. It raises `ConfigError` for
    an option that makes no sense.
    """

    whole_sequences: ClassVar[bool] = False
    """Whether a block is one whole request, as long as the engine's context. The block table of a request then has one
    entry, which names the request's place; how many rows that place really has is the layout's own business."""
    supports_prefix_sharing: ClassVar[bool] = True
    """Whether two requests may read the same block."""
    max_batch: ClassVar[int | None] = None
    """Most requests in one step; None: any number."""
    ops: Mapping[str, Callable[..., Any]] = {}
    """The operations it calls, by name; `LLM(ops={...})` puts others in their place."""

    @abstractmethod
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        **options: Any,
    ) -> None: ...

    @classmethod
    @abstractmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        """Most bytes that one block needs over all layers: keys, values, and whatever else is kept for them."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Store the new keys and values, then attend over all of each request's tokens up to the query's own.

        `q`: `[num_tokens, num_heads, head_dim]`; `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`. Returns like `q`.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes this cache holds now, scales and whatever else included."""

    @property
    def max_rollback(self) -> int | None:
        """Most tokens, counted from the last, that can be taken back by lowering a counter; None: any number."""
        return None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in order, from the first to the second of each pair (copy on write).

        Only layouts that support sharing are asked to.
        """
        raise NotImplementedError(f"{type(self).__name__} shares no blocks, so none is ever copied")

    def free(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """These blocks have lost their last owner. A layout that allocates as it goes lets go of their memory."""
