"""Drafting with the target's last blocks and feedback memory (SPIRe: Neelam et al. 2025). See `spire_model`.

Per draft, two blocks and the unembedding run, whatever the target's depth, and 64 rows of two layers of its cache are
read, whatever the context. Nothing is computed for a prompt.

Wins: large batches of long contexts, where the target's step mostly reads its cache; there it is MagicDec (method
`self_sparse`) with a quarter of the blocks. The paper models a gain of 35% over MagicDec and of 100% over a small draft
model. Loses: small targets on a CPU, where the target's step is compiled and the draft runs in PyTorch. Of the 11.8M
weights of minicoder, a draft step reads 4.1M, two blocks and the unembedding, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minillm.request import Request
from minillm.speculative.drafter import TargetInfo
from minillm.speculative.masked_attention import PADDING
from minillm.speculative.reading_drafter import ReadingDrafter
from minillm.speculative.spire_model import Context, KVRows, Rollout, SpireModel, SpireShape
from minillm.speculative.target_parts import padded, slots_of
from minillm.speculative.trained_drafter import TrainedOptions, read_shape


@dataclass(frozen=True)
class SpireOptions(TrainedOptions):
    """The options of method `spire`."""

    def check_target(self, target: TargetInfo) -> None:
        """See `Drafter.Options`. Raises what `read_shape` raises."""
        read_shape("spire", self.model, target, SpireShape)


class SpireRound:
    """One rollout of the draft per request."""

    def __init__(self, model: SpireModel, context: Context, starts: Tensor) -> None:
        """`starts`: `[num_requests]`: the positions of the last tokens."""
        self.model = model
        self.rollout = Rollout(model.shape, context, starts.unsqueeze(1))

    def step(self, token_ids: Tensor) -> Tensor:
        """See `DraftRound.step`."""
        return self.model.target.logits(self.model.step(self.rollout, token_ids))

    def narrow(self, kept: list[int]) -> None:
        """See `DraftRound.narrow`."""
        self.rollout.narrow(kept)


class SpireDrafter(ReadingDrafter):
    """Drafts with a `SpireModel`."""

    Options = SpireOptions
    method, shape_class, model_class = "spire", SpireShape, SpireModel

    def begin(self, requests: Sequence[Request]) -> SpireRound:
        """See `ReadingDrafter.begin`."""
        verified = [request.num_tokens - 1 for request in requests]
        context = self._cached(requests, verified) if self.model.shape.feedback else self._own(requests, verified)
        return SpireRound(self.model, context, self.tensor(verified))

    def _cached(self, requests: Sequence[Request], verified: Sequence[int]) -> Context:
        """The rows of the target that the drafts see."""
        shape, device, stored = self.model.shape, self.runner.device, self.runner.cache.stored_rows()
        assert stored is not None
        seen = [visible(count, shape.window, shape.num_sinks) for count in verified]
        size = self.runner.block_size
        slots = padded([slots_of(r, p, size) for r, p in zip(requests, seen, strict=True)], None, device)
        rows = []
        for layer in self.model.layers:
            cached = stored.layer(layer.layer, layer.head_dim)
            rows.append(KVRows(*(part[slots.flatten()].unflatten(0, slots.shape) for part in cached)))
        return Context(rows, padded(seen, PADDING, device))

    def _own(self, requests: Sequence[Request], verified: Sequence[int]) -> Context:
        """What the draft without feedback memory makes of the tokens that its drafts see, and of those that these have
        seen in turn: each block looks back one window further."""
        shape, device = self.model.shape, self.runner.device
        reach = None if shape.window is None else shape.num_layers * (shape.window - 1) + 1
        seen = [visible(count, reach, shape.num_sinks) for count in verified]
        tokens = [[request.token_ids[p] for p in of] for request, of in zip(requests, seen, strict=True)]
        return self.model.own_context(padded(tokens, 0, device), padded(seen, PADDING, device))


def visible(position: int, window: int | None, num_sinks: int) -> list[int]:
    """The positions before `position` that a token there sees."""
    if window is None:
        return list(range(position))
    first = max(0, position - window + 1)
    return [*range(min(num_sinks, first)), *range(first, position)]
