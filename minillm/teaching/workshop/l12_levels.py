"""Lesson 12: a two-level cache with another way to make its codes, and how far a cache moves the target's output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm import LLM
from minillm.batch import Segment
from minillm.cache.paged_two_level import LEVELS, PagedTwoLevelKVCache
from minillm.ops.kv_quant import pack_int4, quantize_affine

Split = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(x, scale, zero)` → upper and lower codes: the exercise `two_levels`."""


def layout_with(split: Split) -> type[PagedTwoLevelKVCache]:
    """The engine's two-level layout, with codes from `split`."""

    class TwoLevels(PagedTwoLevelKVCache):
        def encode(self, x: Tensor) -> tuple[Tensor, ...]:
            """See `PagedQuantizedKVCache.encode`."""
            grouped = x.float().unflatten(-1, (-1, self.group))
            _, scale, zero = quantize_affine(grouped, dim=-1)
            upper, lower = split(grouped, scale.float(), zero.float())
            codes = (pack_int4(part.to(torch.uint8).flatten(-2)) for part in (upper, lower + LEVELS // 2))
            return next(codes), scale.squeeze(-1), zero.squeeze(-1), next(codes)

    return TwoLevels


def log_probs(llm: LLM, ids: list[int]) -> Tensor:
    """The target's log-probabilities after each token of `ids`: `[len(ids), vocab]`. Empties the prefix cache."""
    blocks = list(range(-(-len(ids) // llm.engine.runner.block_size)))
    found = llm.engine.runner.run([Segment(ids, 0, blocks, num_logits=len(ids))]).float().log_softmax(-1)
    llm.reset_prefix_cache()
    return found


def mean_kl(reference: Tensor, found: Tensor) -> float:
    """KL(reference ‖ found), the mean over the rows."""
    return float((reference.exp() * (reference - found)).sum(-1).mean())
