"""The target drafts for itself and reads only a part of its KV cache (MagicDec: Sadhukhan et al. 2024).

With long contexts and large batches, a step mostly reads keys and values. A draft step here reads the weights and
`budget` tokens of each request, however long the context is. There is no second model and no second cache.

A draft step gets a *shortened block table*. Blocks that are left out are neither read nor copied: cached keys are
rotated by their own positions, and the new tokens keep theirs (`Segment.num_skipped`). So each layout costs a list:

    sinks      [ 0 ]                         [ newest blocks ……………… ]      StreamingLLM (Xiao et al. 2024)
    snapkv     [ 0 ]    [ 7 ] [ 8 ]   [ 19 ]       [ newest ……… ]          SnapKV (Li et al. 2024)

`snapkv` keeps the blocks that the last queries of the prompt attended to most, and the newest blocks.

Differences from the papers. Both choose tokens; here whole blocks are chosen, of `block_size` tokens, so `budget` is
rounded up and the first block is the sink. (In SnapKV, pooling over neighbours has a similar effect.) SnapKV chooses
for each layer and KV head; here the attention is summed over layers, heads and queries, because one block table serves
all of them: that is what lets every executor and every paged layout run it as it is. Only the prompt's blocks are
ranked; later blocks that are older than the window are chosen only if the prompt has too few. A layer with a sliding
window counts it in tokens of the shortened table.

Wins: long contexts, where reading keys and values dominates. Loses: contexts near the budget or below it, where
drafting costs as much as decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.batch import Segment
from minillm.cache.snapkv import observed_mass
from minillm.config import at_least
from minillm.errors import ConfigError
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.chain_drafter import check_sample_method
from minillm.speculative.drafter import DraftContext, TargetInfo
from minillm.speculative.self_drafter import SelfDrafter

SPARSE_LAYOUTS = ("sinks", "snapkv")
OBSERVED_QUERIES = 32
"""Last queries of the prompt whose attention chooses blocks (SnapKV's observation window)."""
NEWEST_SHARE = 0.5
"""The part of the budget that `snapkv` spends on the newest blocks."""


@dataclass(frozen=True)
class SelfSparseOptions:
    """The options of method `self_sparse`, minillm's own."""

    sparse_layout: str = "sinks"
    """`sinks`: the first block and the newest ones; `snapkv`: the blocks that the prompt's last queries attended to
    most, and the newest ones."""
    budget: int = 257
    """Most cached tokens that a draft attends to, rounded up to whole blocks. MagicDec's is 1 sink and 256 others."""
    draft_sample_method: str = "probabilistic"
    """`probabilistic` samples drafts from the distribution under the sparse cache, `greedy` takes its argmax."""

    def __post_init__(self) -> None:
        at_least("budget", self.budget, 1)
        if self.sparse_layout not in SPARSE_LAYOUTS:
            raise ConfigError(f"sparse_layout={self.sparse_layout!r} must be 'sinks' or 'snapkv'")
        check_sample_method(self.draft_sample_method)

    def check_target(self, target: TargetInfo) -> None:
        """See `Drafter.Options`."""
        if self.budget <= target.block_size:
            raise ConfigError(
                f"budget={self.budget} must be above block_size={target.block_size}: a draft reads the newest block "
                "and at least one other; raise budget or lower block_size"
            )


class SelfSparseDrafter(SelfDrafter):
    """The target over a shortened block table."""

    Options = SelfSparseOptions

    def __init__(self, runner: ModelRunner, options: SelfSparseOptions) -> None:
        super().__init__(runner, options.draft_sample_method == "greedy")
        self.num_blocks = -(-options.budget // runner.block_size)
        """Blocks that a draft reads, that of the newest token included."""
        self.num_observed_queries = OBSERVED_QUERIES if options.sparse_layout == "snapkv" else 0
        self.reads_target_cache = self.num_observed_queries > 0
        self._ranking: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()
        """The blocks of each observed request, by the attention that they got, most first."""

    @classmethod
    def build(cls, context: DraftContext) -> SelfSparseDrafter:
        """See `Drafter.build`."""
        return cls(context.target, context.options)

    @classmethod
    def default_num_drafts(cls, options: Any) -> int:
        """MagicDec's γ."""
        return 3

    def observe(self, request: Request, queries: Tensor) -> None:
        """See `Drafter.observe`."""
        runner, size, count = self.runner, self.runner.block_size, request.num_tokens
        table = torch.tensor(request.block_table, device=queries.device).unsqueeze(1) * size
        slots = (table + torch.arange(size, device=queries.device)).flatten()[:count]
        mass = torch.zeros(count, device=queries.device)
        config, rows = runner.model.config, runner.cache.stored_rows()
        assert rows is not None
        for layer, of_layer in enumerate(queries):
            keys, _ = rows.layer(layer, config.head_dim)
            mass += observed_mass(of_layer, keys[slots], config.window(layer)).sum(0)
        of_blocks = F.pad(mass, (0, -count % size)).view(-1, size).sum(1)
        self._ranking[request] = of_blocks.argsort(descending=True, stable=True).tolist()

    def request_dropped(self, request: Request) -> None:
        """See `Drafter.request_dropped`."""
        self._ranking.pop(request, None)

    def first_segment(self, request: Request) -> Segment:
        """See `SelfDrafter.first_segment`."""
        last, size = request.num_tokens - 1, self.runner.block_size
        newest = last // size
        chosen = self.chosen_blocks(request, newest)
        table = [*(request.block_table[i] for i in chosen), *request.block_table[newest:]]
        num_skipped = (newest - len(chosen)) * size
        return Segment(request.token_ids[-1:], last - num_skipped, table, num_skipped=num_skipped)

    def chosen_blocks(self, request: Request, newest: int) -> list[int]:
        """Which of the blocks 0 … `newest` - 1 a draft reads, in order."""
        most = self.num_blocks - 1
        # What was observed depends on how the prompt was cut into chunks, and on what was cached. A text that can be
        # repeated must not depend on that.
        may_rank = self.num_observed_queries and not request.samples_with_own_seed
        ranking = self._ranking.get(request) if may_rank else None
        return sink_and_newest(newest, most) if ranking is None else most_attended(ranking, newest, most)


def sink_and_newest(count: int, most: int) -> list[int]:
    """Of `count` blocks the first and the last ones, `most` (≥ 1) in all."""
    return list(range(count)) if count <= most else [0, *range(count - most + 1, count)]


def most_attended(ranking: Sequence[int], count: int, most: int) -> list[int]:
    """Of `count` blocks the last ones and the first of `ranking` before them, `most` in all. If too few blocks are
    ranked, more of the last ones are taken."""
    if count <= most:
        return list(range(count))
    window = count - int(most * NEWEST_SHARE)
    best = [i for i in ranking if i < window][: most - (count - window)]
    others = [i for i in reversed(range(count)) if i not in best]
    return sorted([*best, *others[: most - len(best)]])
