"""Drafting with one block that reads the target's cache (LongSpec: Yang et al. 2025). See `long_model`.

A draft model for long contexts usually has a cache that grows with them. This one keeps, per request, keys and values
of its last 511 tokens in one layer, and reads everything farther away in the target's last layer. Drafts are chains;
the paper's trees are not implemented.

Wins: long contexts. A draft step reads one layer of the target's cache, an eighth of what a step of minicoder does, and
its own memory is constant. Loses: short contexts, where the cache of a draft model is small, too; and small targets on
a CPU, where the target's step is compiled and the draft runs in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from minillm.batch import Batch, Segment
from minillm.ops.paged_attention import paged_attention
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.drafter import TargetInfo
from minillm.speculative.long_model import LongModel, LongShape
from minillm.speculative.masked_attention import PADDING, hidden_keys, masked_attention
from minillm.speculative.reading_drafter import ReadingDrafter
from minillm.speculative.spire_model import KVRows
from minillm.speculative.target_parts import padded
from minillm.speculative.trained_drafter import TrainedOptions, read_shape


@dataclass(frozen=True)
class LongOptions(TrainedOptions):
    """The options of method `long`."""

    def check_target(self, target: TargetInfo) -> None:
        """See `Drafter.Options`. Raises what `read_shape` raises."""
        read_shape("long", self.model, target, LongShape)


@dataclass(frozen=True)
class RecentRows:
    """The rows of self-attention of a request's tokens before position `end`, at most a window of them."""

    end: int
    rows: KVRows
    """`[n, num_kv_heads, head_dim]` each."""


class LongRound:
    """One round of drafting."""

    def __init__(self, drafter: LongDrafter, requests: Sequence[Request], rows: KVRows, positions: Tensor) -> None:
        """`rows`, `positions`: of the tokens before the last one of each request that self-attention may see,
        `[num_requests, n, …]`."""
        self.model, self.runner = drafter.model, drafter.runner
        self.requests = list(requests)
        self.rows, self.row_positions = rows, positions
        self.positions = drafter.tensor([request.num_tokens - 1 for request in requests])
        """Of the next tokens."""
        self.verified = self._verified()
        stored, block = self.runner.cache.stored_rows(), self.model.block
        assert stored is not None
        self.cached = stored.layer(block.layer, block.head_dim)

    def _verified(self) -> Batch:
        """A batch in which each request has one query that sees the tokens that the target has verified. The query is
        in the place of the last of them, which hides all slots behind it."""
        return self.runner.batch([Segment([0], r.num_tokens - 2, r.block_table) for r in self.requests])

    def step(self, token_ids: Tensor) -> Tensor:
        """See `DraftRound.step`."""
        model, positions = self.model, self.positions
        cos, signed_sin = model.target.rotations(positions)
        x = model.target.embed(token_ids)
        q, k, v = model.block.heads(x, cos, signed_sin)
        self.rows = KVRows(torch.cat((self.rows.keys, k[:, None]), 1), torch.cat((self.rows.values, v[:, None]), 1))
        self.row_positions = torch.cat((self.row_positions, positions[:, None]), 1)
        hidden = hidden_keys(positions[:, None], self.row_positions, model.shape.window)
        x = x + model.block.o_proj(masked_attention(q[:, None], self.rows.keys, self.rows.values, hidden).flatten(1))
        if model.cross is not None:
            q = model.cross.queries(x, cos, signed_sin)
            x = x + model.cross.o_proj(paged_attention(q, *self.cached, self.verified).flatten(1))
        self.positions = positions + 1
        return model.target.logits(model.finish(x))

    def narrow(self, kept: list[int]) -> None:
        """See `DraftRound.narrow`."""
        index = torch.tensor(kept, device=self.positions.device)
        self.requests = [self.requests[i] for i in kept]
        self.rows = self.rows.narrowed(index)
        self.row_positions, self.positions = self.row_positions[index], self.positions[index]
        self.verified = self._verified()


class LongDrafter(ReadingDrafter):
    """Drafts with a `LongModel`."""

    Options = LongOptions
    method, shape_class, model_class = "long", LongShape, LongModel

    def __init__(self, runner: ModelRunner, model: nn.Module, greedy: bool) -> None:
        super().__init__(runner, model, greedy)
        self._recent: WeakKeyDictionary[Request, RecentRows] = WeakKeyDictionary()
        """Rows of committed tokens. They follow from token and position, so they are valid as long as the request."""

    def request_dropped(self, request: Request) -> None:
        """See `Drafter.request_dropped`."""
        self._recent.pop(request, None)

    def begin(self, requests: Sequence[Request]) -> LongRound:
        """See `ReadingDrafter.begin`."""
        self._catch_up(requests)
        recent = [self._recent[request] for request in requests]
        positions = [range(r.end - len(r.rows.keys), r.end) for r in recent]
        keys, values = (
            torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            for part in ([r.rows.keys for r in recent], [r.rows.values for r in recent])
        )
        return LongRound(self, requests, KVRows(keys, values), padded(positions, PADDING, self.runner.device))

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Compute the rows of committed tokens that are still missing, all but each request's last one."""
        most, missing = self.model.shape.window - 1, []
        for request in requests:
            known, end = self._recent.get(request), request.num_tokens - 1
            missing.append(range(max(end - most, known.end if known else 0), end))
        tokens = [request.token_ids[p] for request, new in zip(requests, missing, strict=True) for p in new]
        rows = self.model.rows(self.tensor(tokens), self.tensor([p for new in missing for p in new]))
        counts = [len(new) for new in missing]
        parts = zip(rows.keys.split(counts), rows.values.split(counts), strict=True)
        for request, new in zip(requests, parts, strict=True):
            if (known := self._recent.get(request)) is not None:
                new = tuple(torch.cat(pair) for pair in zip((known.rows.keys, known.rows.values), new, strict=True))
            keys, values = (part[max(0, len(part) - most) :] for part in new)
            self._recent[request] = RecentRows(request.num_tokens - 1, KVRows(keys, values))
