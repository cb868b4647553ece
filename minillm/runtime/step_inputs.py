"""The inputs of a step in one integer tensor, so that one copy brings them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from minillm.batch import Segment, logit_rows

ALIGNMENT = 4
"""The size of a field is a multiple of this: 16 bytes. Pointers aligned to 16 bytes can be read in wide loads; Triton
compiles one kernel for them and another for unaligned pointers."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a step, or the sizes to which it is padded."""

    tokens: int
    requests: int
    context: int
    """Tokens of the longest request after the step (or after drafting)."""
    block_size: int

    @property
    def blocks(self) -> int:
        """Width of the block tables."""
        return -(-self.context // self.block_size)

    @property
    def fields(self) -> dict[str, int]:
        """The size of each field of `StepInputs`, in the order of memory."""
        return {
            "token_ids": self.tokens,
            "positions": self.tokens,
            "slots": self.tokens,
            "logit_rows": max(self.tokens, self.requests),
            "query_start": self.requests + 1,
            "draft_query_start": self.requests + 1,
            "seq_lens": self.requests,
            "num_skipped": self.requests,
            "block_tables": self.requests * self.blocks,
        }

    @property
    def size(self) -> int:
        """The size of all fields together."""
        return sum(_aligned(size) for size in self.fields.values())


@dataclass(frozen=True)
class StepInputs:
    """The fields of a step: views of one tensor, either on the host, where they are filled, or on the device.

    Padding tokens and padding requests come last. A padding token has slot -1, so that it is not stored, and belongs to
    no request. A padding request has length 0 and no tokens.
    """

    flat: Tensor
    """`[shape.size]` int32."""
    shape: Shape
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    """`[tokens]`."""
    logit_rows: Tensor
    """Indices of the hidden states whose logits are wanted, in order; the rest is 0."""
    query_start: Tensor
    """`[requests + 1]`."""
    draft_query_start: Tensor
    """`[requests + 1]`: `query_start` of the following drafting steps, with one token per request."""
    seq_lens: Tensor
    """`[requests]`."""
    num_skipped: Tensor
    """`[requests]`: tokens that a block table leaves out (see `minillm.batch.Segment`)."""
    block_tables: Tensor
    """`[requests, blocks]`. Entries after the blocks in use are meaningless."""

    @classmethod
    def over(cls, flat: Tensor, shape: Shape) -> StepInputs:
        """Return the fields of a step of this shape, as views of the start of `flat` (int32)."""
        parts, begin = {}, 0
        for name, size in shape.fields.items():
            parts[name] = flat[begin : begin + size]
            begin += _aligned(size)
        parts["block_tables"] = parts["block_tables"].view(shape.requests, shape.blocks)
        return cls(flat[: shape.size], shape, **parts)

    def clear(self) -> None:
        """Make it a step of padding only, which can run at any time and changes nothing."""
        self.flat.zero_()
        self.slots.fill_(-1)

    def fill(self, segments: Sequence[Segment]) -> None:
        """Fill the fields with a step. The flat tensor is on the host and holds zeros."""
        lens = np.array([len(s.token_ids) for s in segments])
        starts = np.array([s.start for s in segments])
        ends, count = np.cumsum(lens), len(segments)
        tables, size = self.block_tables.numpy(), self.shape.block_size
        for row, segment in zip(tables, segments, strict=False):
            used = segment.block_table[: self.shape.blocks]
            row[: len(used)] = used
        request = np.repeat(np.arange(count), lens)
        indices = np.arange(ends[-1]) - np.repeat(ends - lens - starts, lens)
        skipped = np.array([s.num_skipped for s in segments])
        num_tokens = ends[-1]
        self.token_ids.numpy()[:num_tokens] = [token for s in segments for token in s.token_ids]
        self.positions.numpy()[:num_tokens] = indices + np.repeat(skipped, lens)
        slots = self.slots.numpy()
        slots[:num_tokens] = tables[request, indices // size] * size + indices % size
        slots[num_tokens:] = -1
        wanted = logit_rows(segments)
        self.logit_rows.numpy()[: len(wanted)] = wanted
        self.query_start.numpy()[1:] = np.pad(ends, (0, self.shape.requests - count), mode="edge")
        self.draft_query_start.numpy()[:] = np.arange(self.shape.requests + 1).clip(max=count)
        self.seq_lens.numpy()[:count] = starts + lens
        self.num_skipped.numpy()[:count] = skipped


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
