"""All that a device must know of a step, in one tensor of whole numbers, so that it gets there in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from minillm.models.runner import Segment

ALIGNMENT = 4
"""Numbers that a field's size is a multiple of: 16 bytes, by which Triton tells pointers that can be read in wide
loads from others, and compiles a kernel for each kind."""


@dataclass(frozen=True)
class Shape:
    """How large a step is, or what it is filled up to."""

    tokens: int
    requests: int
    context: int
    """Tokens of the longest request when the step (or the drafting) is over."""
    block_size: int

    @property
    def blocks(self) -> int:
        """Width of the block tables."""
        return -(-self.context // self.block_size)

    @property
    def fields(self) -> dict[str, int]:
        """Numbers in each field of `StepInputs`, in the order in which they lie."""
        return {
            "token_ids": self.tokens,
            "positions": self.tokens,
            "slots": self.tokens,
            "rows": max(self.tokens, self.requests),
            "query_start": self.requests + 1,
            "next_start": self.requests + 1,
            "seq_lens": self.requests,
            "block_tables": self.requests * self.blocks,
        }

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(_aligned(size) for size in self.fields.values())


@dataclass(frozen=True)
class StepInputs:
    """The fields of a step: views of one tensor, on the host where they are filled in or on the device.

    Tokens and requests that only fill the step up come last. Such a token has slot -1, so that it is stored nowhere,
    and belongs to no request; such a request has length 0 and no tokens.
    """

    flat: Tensor
    """`[shape.size]` int32."""
    shape: Shape
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    """`[tokens]`."""
    rows: Tensor
    """Which rows of the hidden states want logits, in order; the rest is 0."""
    query_start: Tensor
    """`[requests + 1]`."""
    next_start: Tensor
    """`[requests + 1]`: `query_start` of a step of one token per request, as drafting goes on with."""
    seq_lens: Tensor
    """`[requests]`."""
    block_tables: Tensor
    """`[requests, blocks]`. What lies behind the blocks in use means nothing."""

    @classmethod
    def over(cls, flat: Tensor, shape: Shape) -> StepInputs:
        """The fields of a step of this shape at the beginning of `flat` (int32)."""
        parts, begin = {}, 0
        for name, size in shape.fields.items():
            parts[name] = flat[begin : begin + size]
            begin += _aligned(size)
        parts["block_tables"] = parts["block_tables"].view(shape.requests, shape.blocks)
        return cls(flat[: shape.size], shape, **parts)

    def clear(self) -> None:
        """Make it a step of nothing but filling: it may be run at any time, and changes nothing."""
        self.flat.zero_()
        self.slots.fill_(-1)

    def fill(self, segments: Sequence[Segment]) -> None:
        """Write down a step, over a flat tensor of zeros on the host."""
        lens = np.array([len(s.token_ids) for s in segments])
        starts = np.array([s.start for s in segments])
        ends, count = np.cumsum(lens), len(segments)
        tables, size = self.block_tables.numpy(), self.shape.block_size
        for row, segment in zip(tables, segments, strict=False):
            used = segment.block_table[: self.shape.blocks]
            row[: len(used)] = used
        request = np.repeat(np.arange(count), lens)
        positions = np.arange(ends[-1]) - np.repeat(ends - lens - starts, lens)
        number = ends[-1]
        self.token_ids.numpy()[:number] = [token for s in segments for token in s.token_ids]
        self.positions.numpy()[:number] = positions
        slots = self.slots.numpy()
        slots[:number] = tables[request, positions // size] * size + positions % size
        slots[number:] = -1
        wanted = [row for s, end in zip(segments, ends, strict=True) for row in range(end - s.num_logits, end)]
        self.rows.numpy()[: len(wanted)] = wanted
        self.query_start.numpy()[1:] = np.pad(ends, (0, self.shape.requests - count), mode="edge")
        self.next_start.numpy()[:] = np.arange(self.shape.requests + 1).clip(max=count)
        self.seq_lens.numpy()[:count] = starts + lens


def query_starts(lens: Sequence[int]) -> list[int]:
    """Where each request's tokens begin, and where the last one's end."""
    return list(accumulate(lens, initial=0))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
