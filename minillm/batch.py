"""The input of one step: a `Segment` per request, and all of them concatenated without padding in a `Batch`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")
MAX_TREE_TOKENS = 64
"""Most tokens of a segment with a draft tree: an attention mask is an int64 with one bit per token."""


@dataclass(frozen=True)
class Segment:
    """The new tokens of one request. Token i of them is stored at token index `start + i` of the block table.

    The tokens are a chain, optionally followed by a draft tree. In a chain, token i has position `start + i`. The nodes
    of a tree are stored one after the other too, but the position of a node follows from its depth.

    The block table may leave out blocks of the request. The new tokens then attend only to the blocks that are in it;
    `num_skipped` keeps their positions true. Block size 4, blocks 3 and 8 left out, the next token has position 13:

        the request      [ 5 ][ 3 ][ 8 ][ 2 ]        positions 0-3, 4-7, 8-11, 12-15
        the segment      [ 5 ]          [ 2 ]        start 5, num_skipped 8: stored in slot 5 % 4 = 1 of block 2

    Cached keys are rotated by their own positions, so all distances between queries and keys stay true.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int = 1
    """The model returns logits for the last `num_logits` tokens."""
    parents: Sequence[int] | None = None
    """The parent of each tree node: the index of another node, or -1 for the last token before the tree. The nodes are
    the last `len(parents)` tokens, parents before their children. None: no tree."""
    num_skipped: int = 0
    """Number of earlier tokens whose blocks `block_table` leaves out: a position is a token index plus this number."""
    num_prompt_tokens: int | None = None
    """Length of the request's prompt, for cache layouts that compress a prompt once it is complete. None: unknown, so
    no such layout compresses anything."""

    @property
    def end(self) -> int:
        """Number of tokens in the cache after the step, in the blocks of `block_table`; tree nodes included."""
        return self.start + len(self.token_ids)

    @cached_property
    def depths(self) -> list[int]:
        """Position of each token relative to the first one."""
        depths = list(range(len(self.token_ids) - len(self.parents or ())))
        root = len(depths) - 1
        for parent in self.parents or ():
            depths.append(depths[root + 1 + parent] + 1)
        return depths

    @cached_property
    def masks(self) -> list[int]:
        """Attention mask of each token within the segment: bit i is set for itself and each ancestor i."""
        root = len(self.token_ids) - len(self.parents or ()) - 1
        masks = [(2 << i) - 1 for i in range(root + 1)]
        for node, parent in enumerate(self.parents or (), start=root + 1):
            masks.append(masks[root + 1 + parent] | 1 << node)
        return masks


@dataclass(frozen=True)
class Batch:
    """The new tokens of all requests in one step, concatenated without padding.

    The new tokens of request r are `query_start[r] … query_start[r + 1] - 1`. After the step, the cache holds
    `seq_lens[r]` tokens of it. Prefill, chunked prefill, decode and verification differ only in these numbers.
    """

    token_ids: Tensor
    """`[num_tokens]`, int64."""
    positions: Tensor
    """`[num_tokens]`, int64: index of each token in its request; for a tree node, it follows from the depth. Only RoPE
    uses it. Masks follow from `seq_lens`, because a block table may leave out blocks (see `Segment`)."""
    slot_mapping: Tensor
    """`[num_tokens]`, int64: the slot of each token's key and value, block id · block size + offset."""
    block_tables: Tensor
    """`[num_requests, max_blocks]`, int64; each row is padded with its first block."""
    query_start: list[int]
    """First token of each request, then `num_tokens`: `num_requests + 1` values."""
    seq_lens: list[int]
    """Tokens of each request in the blocks of its table after the step: `num_requests` values."""
    block_size: int
    tree: Tensor | None = None
    """`[num_tokens]`, int64, or None if no request has a draft tree. Bit i is set if the token attends to the i-th new
    token of its request. -1: the token is part of a chain and attends to all new tokens up to itself."""
    prompt_lens: list[int | None] | None = None
    """`Segment.num_prompt_tokens` of each request; None: all unknown."""
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What the first layer computes and all later layers of this step reuse: see `once_per_step`."""

    @classmethod
    def from_segments(cls, segments: Sequence[Segment], block_size: int, device: torch.device) -> Batch:
        """Concatenate the segments."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        for s in segments:
            token_ids += s.token_ids
            indices, first = range(s.start, s.end), s.start + s.num_skipped
            positions += range(first, s.end + s.num_skipped) if s.parents is None else [first + d for d in s.depths]
            slots += [s.block_table[i // block_size] * block_size + i % block_size for i in indices]
            query_start.append(len(token_ids))
        max_blocks = max(len(s.block_table) for s in segments)
        tables = [[*s.block_table, *[s.block_table[0]] * (max_blocks - len(s.block_table))] for s in segments]

        def tensor(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            block_tables=tensor(tables),
            query_start=query_start,
            seq_lens=[s.end for s in segments],
            block_size=block_size,
            tree=tensor(tree_masks(segments)) if any(s.parents is not None for s in segments) else None,
            prompt_lens=[s.num_prompt_tokens for s in segments],
        )

    def once_per_step(self, kind: type, make: Callable[[], Plan], *key: Hashable) -> Plan:
        """Return what `make` computes, calling it once per step for each `kind` and `key`.

        An op or a cache computes in the first layer what all layers need, such as masks or the slots to gather. `kind`,
        the class of the result or of its items, separates it from the plans of others.
        """
        if (kind, *key) not in self.plans:
            self.plans[(kind, *key)] = make()
        return self.plans[(kind, *key)]

    def set_plan(self, made: object) -> None:
        """Store a plan that was made elsewhere; `once_per_step(type(made), …)` then returns it."""
        self.plans[(type(made),)] = made

    @property
    def num_requests(self) -> int:
        """Number of requests in this step."""
        return len(self.seq_lens)

    @cached_property
    def query_lens(self) -> list[int]:
        """Number of new tokens of each request."""
        return [end - start for start, end in zip(self.query_start, self.query_start[1:], strict=False)]

    @cached_property
    def key_slots(self) -> Tensor:
        """`[num_requests, max(seq_lens)]`: the slot of every key, in order; padding is the request's first slot."""
        device = self.block_tables.device
        index = torch.arange(max(self.seq_lens), device=device)
        offset = torch.arange(self.block_size, device=device)
        slots = (self.block_tables.unsqueeze(-1) * self.block_size + offset).flatten(1)[:, : len(index)]
        if min(self.seq_lens) < slots.shape[1]:
            inside = index < torch.tensor(self.seq_lens, device=device).unsqueeze(1)
            slots = torch.where(inside, slots, slots[:, :1])
        return slots


def tree_masks(segments: Sequence[Segment]) -> list[int]:
    """The values of `Batch.tree` for these segments, as signed 64-bit integers."""
    masks: list[int] = []
    for s in segments:
        masks += [-1] * len(s.token_ids) if s.parents is None else [_signed(mask) for mask in s.masks]
    return masks


def logit_rows(segments: Sequence[Segment]) -> list[int]:
    """The indices of the step's tokens whose logits are requested, in order."""
    rows, end = [], 0
    for s in segments:
        end += len(s.token_ids)
        rows += range(end - s.num_logits, end)
    return rows


def _signed(mask: int) -> int:
    return mask - (1 << 64) if mask >> 63 else mask
