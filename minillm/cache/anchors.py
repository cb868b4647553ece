"""Line ends as anchors: of a finished line only its end stays (inspired by AnchorCoder: Zhang et al. 2025).

    a line = its tokens up to the one with a newline, its anchor

    x = 1 ⏎ y = x + 2 ⏎ print(y          a query in the last line sees   ⏎   ⏎   print(y
          └ anchor      └ anchor                                     anchors     its own line

A query sees the first `sinks` tokens, all anchors, its own line, and the last `window` tokens. Other rows are dropped
in the first step in which no query can see them any more, `spare` tokens later, so that rejected drafts drop nothing.
Positions are those in the text.

AnchorCoder *trains* a model to gather what a line says in its anchor, and passes it on between layers. This layout has
only its mask. The anchors of a model that was not trained for it say little about their lines: **expect poor recall**,
about that of layout `sinks` with the same bytes. It is here to be measured, and to be trained for.

What a query sees depends on its position and on the tokens before it. So chunks, batch, preemption and rejected drafts
change nothing. With a window as long as the context the output is that of the plain cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import SequenceKVCache
from minillm.cache.compressed_prompt import dense_attention
from minillm.cache.layout_options import check_at_least
from minillm.errors import ConfigError, MinillmError, UnsupportedError
from minillm.models.calibration import CalibrationTexts
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder


@dataclass
class AnchoredRows:
    """What is stored of one request. All layers store the same tokens."""

    keys: list[Tensor]
    """Per layer `[rows, num_kv_heads, head_dim]`, in order of position."""
    values: list[Tensor]
    positions: Tensor
    """`[rows]`."""
    lines: Tensor
    """The line of each row: how many anchors come before it, `[rows]`."""
    anchors: Tensor
    """Whether a row is an anchor, `[rows]`."""
    num_written: int = 0
    """One more than the largest position ever written."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        index = (self.positions, self.lines, self.anchors)
        return sum(part.nbytes for part in (*self.keys, *self.values, *index))


@dataclass(frozen=True)
class _Step:
    """What one request does in each layer of a step."""

    request: AnchoredRows
    tokens: slice
    """Its new tokens in the batch."""
    kept: Tensor
    """Indices of the stored rows that stay."""
    hidden: Tensor
    """`[new tokens, rows]`: True where a row is masked."""


class AnchorsKVCache(SequenceKVCache):
    """`window`: newest tokens that every query sees. `sinks`: first tokens that it sees. `spare`: tokens that can be
    rolled back."""

    keeps_every_token = False

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int = 64,
        sinks: int = 4,
        spare: int = 16,
    ) -> None:
        _check(config, window, sinks, spare)
        self.window, self.sinks, self.spare = window, sinks, spare
        self.config, self.dtype, self.device, self.max_rows = config, dtype, device, block_size
        self.anchor_ids = torch.empty(0, dtype=torch.int64, device=device)
        """Tokens with a newline, from `prepare`."""
        self.requests: dict[int, AnchoredRows] = {}
        """Key: block id. A block holds one request."""

    @property
    def max_block_bytes(self) -> int:
        """Bytes of a request as long as the context whose tokens are all anchors."""
        index = 2 * torch.int64.itemsize + torch.bool.itemsize
        return self.max_rows * (2 * self.config.num_layers * self.config.kv_size * self.dtype.itemsize + index)

    def prepare(self, model: Decoder, texts: CalibrationTexts | None = None) -> None:
        """See `KVCache.prepare`: finds the tokens with a newline."""
        if texts is None:
            raise ConfigError("cache layout 'anchors' must know which tokens end a line, and there is no tokenizer")
        self.anchor_ids = torch.tensor(texts.ids_with(b"\n"), dtype=torch.int64, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of the current requests."""
        return sum(request.num_bytes for request in self.requests.values())

    @property
    def model_bytes(self) -> int:
        """Bytes of the list of tokens that end a line."""
        return self.anchor_ids.nbytes

    @property
    def max_rollback(self) -> int:
        """`spare`, counted from the last token ever written: two rollbacks in a row add up."""
        return self.spare

    def free(self, block_ids: Sequence[int]) -> None:
        """See `KVCache.free`."""
        for block_id in block_ids:
            self.requests.pop(block_id, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`. Raises `MinillmError` if a request rolls back more tokens than `spare`."""
        out = torch.empty_like(q)
        for step in batch.once_per_step(_Step, lambda: self._plan(batch), self):
            rows, new = step.request, step.tokens
            rows.keys[layer] = torch.cat((rows.keys[layer][step.kept], k[new]))
            rows.values[layer] = torch.cat((rows.values[layer][step.kept], v[new]))
            out[new] = dense_attention(q[new], rows.keys[layer], rows.values[layer], step.hidden)
        return out

    def _plan(self, batch: Batch) -> list[_Step]:
        steps: list[_Step] = []
        is_anchor = torch.isin(batch.token_ids, self.anchor_ids)
        for r, block_id in enumerate(batch.block_tables[:, 0].tolist()):
            end, new = batch.seq_lens[r], slice(*batch.query_start[r : r + 2])
            past = end - batch.query_lens[r]
            if not past:
                self.requests[block_id] = self._new_request()
            steps.append(self._step(self.requests[block_id], past, end, new, is_anchor[new]))
        return steps

    def _step(self, rows: AnchoredRows, past: int, end: int, new: slice, anchors: Tensor) -> _Step:
        """Drop rows that were rolled back or are out of sight, and append the new ones; see `attend` for their keys."""
        if past < rows.num_written - self.spare:
            raise MinillmError(
                f"a request rolled back from {rows.num_written} tokens to {past}, but layout 'anchors' allows "
                f"spare={self.spare}; raise spare, or start the request again"
            )
        rows.num_written = max(rows.num_written, end)
        first = rows.num_written - self.spare  # no later query is before this one
        anchors_before = rows.anchors & (rows.positions < min(past, first))
        kept = (rows.positions < past) & self._visible(rows, max(0, min(past, first)), anchors_before.sum())
        index = kept.nonzero().squeeze(1)
        before = (rows.anchors & kept).sum()
        lines = before + anchors.cumsum(0) - anchors.long()
        positions = torch.arange(past, end, device=self.device)
        rows.positions = torch.cat((rows.positions[index], positions))
        rows.lines = torch.cat((rows.lines[index], lines))
        rows.anchors = torch.cat((rows.anchors[index], anchors))
        visible = self._visible(rows, positions.unsqueeze(1), lines.unsqueeze(1))
        return _Step(rows, new, index, ~visible | (rows.positions > positions.unsqueeze(1)))

    def _visible(self, rows: AnchoredRows, position: int | Tensor, line: Tensor) -> Tensor:
        """Whether a query at `position` in `line` sees each row, later ones included."""
        near = rows.positions > position - self.window
        return near | (rows.positions < self.sinks) | rows.anchors | (rows.lines >= line)

    def _new_request(self) -> AnchoredRows:
        shape = (0, self.config.num_kv_heads, self.config.head_dim)
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        layers = range(self.config.num_layers)
        return AnchoredRows([empty for _ in layers], [empty for _ in layers], nothing, nothing, nothing.bool())


def _check(config: ModelConfig, window: int, sinks: int, spare: int) -> None:
    check_at_least("window", window, 1)
    check_at_least("sinks", sinks, 0)
    check_at_least("spare", spare, 0)
    for layer in range(config.num_layers):
        if (own := config.window(layer)) is not None:
            raise UnsupportedError(
                f"cache layout 'anchors' keeps line ends from far back, but layer {layer} of this model has a sliding "
                f"window of {own} tokens; use layout 'window'"
            )
