"""Lesson 16: a split model with one mistake each. A docstring names the mistake; no mistake raises an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.cache.paged import PagedKVCache
from minillm.ops.linear import Linear
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.group import Group
from minillm.parallel.loading import load_part
from minillm.parallel.local import on_ranks
from minillm.runtime.runner import ModelRunner
from minillm.teaching.free_memory import give_back_freed_memory

Mistake = Callable[[ParallelDecoder], None]
BLOCK = 16


def right(model: ParallelDecoder) -> None:
    """No mistake."""


def attention_not_summed(model: ParallelDecoder) -> None:
    """`o_proj` is an ordinary linear layer: each rank goes on with its own part of the sum."""
    for layer in model.layers:
        layer.o_proj.forward = lambda x, its=layer.o_proj: Linear.forward(its, x)


def summed_twice(model: ParallelDecoder) -> None:
    """The result of `down_proj` is summed over the ranks once more, so it counts as often as there are ranks."""
    for layer in model.layers:
        own = layer.mlp.down_proj.forward
        layer.mlp.down_proj.forward = lambda x, own=own: model.group.all_reduce(own(x))


def neighbours_keys(model: ParallelDecoder) -> None:
    """Each rank has the KV heads of the next one, as if they were numbered in another way than the query heads."""
    group, own = model.group, model.config
    for layer in model.layers:
        rows = layer.qkv_proj.weight.data[own.q_size :]
        gathered = group.all_gather(rows).split(rows.shape[1], dim=1)
        layer.qkv_proj.weight.data[own.q_size :] = gathered[(group.rank + 1) % group.size]


def embedding_not_summed(model: ParallelDecoder) -> None:
    """Each rank begins with its own tokens' embeddings and zeros for the others."""

    def embed(token_ids: Tensor) -> Tensor:
        index = token_ids - model.first_token
        is_own = (index >= 0) & (index < model.num_tokens)
        return torch.where(is_own.unsqueeze(1), model.embed_tokens(index.where(is_own, 0)), 0)

    model.embed = embed


def own_logits_only(model: ParallelDecoder) -> None:
    """The logits are not gathered: each rank sees its own part of the vocabulary."""

    def logits(hidden: Tensor) -> Tensor:
        found = torch.full((len(hidden), model.num_tokens * model.group.size), float("-inf"))
        found[:, model.first_token : model.first_token + model.num_tokens] = model.lm_head(hidden)
        return found[:, : model.config.vocab_size]

    model.logits = logits


MISTAKES: dict[str, Mistake] = {
    "right": right,
    "attention is not summed": attention_not_summed,
    "the MLP is summed twice": summed_twice,
    "the neighbour's KV heads": neighbours_keys,
    "embeddings are not summed": embedding_not_summed,
    "logits are not gathered": own_logits_only,
}
"""By what they do; the first is none."""


@dataclass(frozen=True)
class OnRank:
    """What one rank has at the end of a step, for every token of a text."""

    hidden: Tensor
    """`[tokens, hidden]`: after the last norm."""
    logits: Tensor
    """`[tokens, vocab]`, float32."""

    def agrees(self, other: OnRank) -> bool:
        """Whether two ranks have the same numbers, to the last bit."""
        return torch.equal(self.hidden, other.hidden) and torch.equal(self.logits, other.logits)


def run_on_ranks(folder: Path, size: int, token_ids: Sequence[int], mistake: Mistake) -> list[OnRank]:
    """Run the model in `folder` over a text, split over `size` threads. Returns what each rank has at the end."""
    table = list(range(-(-len(token_ids) // BLOCK)))

    def work(group: Group) -> OnRank:
        model = load_part(folder, group, torch.float32)
        with torch.inference_mode():
            mistake(model)
        cache = PagedKVCache(model.config, len(table), BLOCK, torch.float32, group.device)
        segment = Segment(token_ids, 0, table, num_logits=len(token_ids))
        step = ModelRunner(model, cache, BLOCK).run_observed([segment])
        return OnRank(step.hidden, step.logits)

    give_back_freed_memory()
    return on_ranks(size, work)
