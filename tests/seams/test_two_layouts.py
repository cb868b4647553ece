"""Two caches over one model in one engine: one to draft from, one to verify with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Batch
from minillm.cache.base import KVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.sinks import SinksKVCache
from minillm.errors import UnsupportedError
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import paged_attention
from minillm.runtime.runner import ModelRunner
from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.drafter import DraftContext, NoOptions
from minillm.speculative.rejection_sampler import AcceptRule
from minillm.trace import TokensCommitted
from tests.conftest import TinyPair

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):"]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


class LowBitSelf(DraftModelDrafter):
    """The target drafts for itself over a cache in INT4."""

    Options = NoOptions

    @classmethod
    def build(cls, context: DraftContext) -> LowBitSelf:
        return cls(context.new_runner(context.target.model, PagedInt4KVCache), context.max_num_batched_tokens, True)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "pytorch"])
def test_a_target_drafts_over_a_cache_in_four_bits(eager: bool) -> None:
    options: dict[str, Any] = {"block_size": 4, "enforce_eager": eager}
    llm = LLM("minicoder", speculative_config={"method": LowBitSelf, "num_speculative_tokens": 3}, **options)
    target, draft = llm.engine.runner, llm.engine.drafter.runner
    assert target.model is draft.model and type(draft.cache) is PagedInt4KVCache
    if not eager:
        assert target.executor.packed is draft.executor.packed  # the weights are in memory once
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM("minicoder", **options))
    judged = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert sum(e.num_accepted for e in judged) > 0.6 * sum(e.num_drafts for e in judged)


class LastTokens(KVCache):
    """A sparse view of another cache: the first block and the last tokens, read where the other one keeps them."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        *, of: ModelRunner, window: int = 8,
    ) -> None:  # fmt: skip
        self.of, self.window, self.num_attended = of, window, 0

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self.num_attended += 1
        keys, values = self.of.cache.keys[layer], self.of.cache.values[layer]
        keys.index_copy_(0, batch.slot_mapping, k)
        values.index_copy_(0, batch.slot_mapping, v)
        return paged_attention(q, keys, values, batch, self.window)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The other one copies."""


class SparseSelf(LowBitSelf):
    """The target drafts for itself over few of its own keys and values. What it writes there, verifying overwrites."""

    @classmethod
    def build(cls, context: DraftContext) -> SparseSelf:
        runner = context.new_runner(context.target.model, LastTokens, of=context.target)
        return cls(runner, context.max_num_batched_tokens, True)

    def num_computed_tokens(self, request: Any) -> int:
        super().num_computed_tokens(request)
        self._progress[request].num_computed = request.num_computed_tokens  # the target has computed them
        return request.num_computed_tokens


def test_a_target_drafts_over_a_sparse_view_of_its_own_cache(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, speculative_config={"method": SparseSelf, "num_speculative_tokens": 3})
    view = llm.engine.drafter.runner.cache
    assert llm.engine.runner.executor is None is llm.engine.drafter.runner.executor  # unknown rows: both step aside
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target), block_size=4))
    assert view.num_attended and sum(e.num_accepted for e in trace.of(TokensCommitted))


class Sinks(LowBitSelf):
    @classmethod
    def build(cls, context: DraftContext) -> Sinks:
        return cls(context.new_runner(context.target.model, SinksKVCache), 64, True)


def test_layouts_that_share_no_block_table_cannot_serve_one_engine(tiny: TinyPair) -> None:
    with pytest.raises(UnsupportedError, match="SinksKVCache and PagedKVCache cannot serve one engine"):
        LLM(str(tiny.target), speculative_config={"method": Sinks, "num_speculative_tokens": 3})


def test_an_accept_rule_of_ones_own_reaches_the_engine(tiny: TinyPair) -> None:
    """One that takes every guess: lossy, and so the text is the draft's."""
    lenient = AcceptRule(accept=lambda p, q, x: torch.ones(len(x)))
    config = {"model": str(tiny.draft), "num_speculative_tokens": 3}
    exact = LLM(str(tiny.target), speculative_config=config)
    llm = LLM(str(tiny.target), speculative_config={**config, "rejection_sample_method": lenient})
    with llm.trace() as trace:
        assert tokens(llm) != tokens(exact)
    judged = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert judged and all(e.num_accepted == e.num_drafts for e in judged)
