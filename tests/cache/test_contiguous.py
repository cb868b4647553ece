"""The contiguous layout, however its tensors grow: exact, honest about its bytes, and it counts what growing costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Batch
from minillm.cache import sequence_rows as rows_module
from minillm.cache.contiguous import ALLOCATION_COST, COPY_COST, PADDING_COST, ContiguousKVCache, best_rows
from minillm.cache.paged import PagedKVCache
from minillm.trace import DraftProposed, RequestPreempted
from tests.cache.runs import ENGINES, GREEDY, PROMPTS, PreemptingScheduler, draft_of, generated, paged
from tests.cache.steps import (
    CONTEXT,
    CPU,
    Play,
    batch_of,
    full,
    last_tokens,
    nan_in_new_memory,
    small_config,
    tensor_bytes,
)
from tests.conftest import TinyPair

GROWTHS: list[dict[str, Any]] = [
    {},
    {"growth": "concat"},
    {"growth": "every", "rows": 1},
    {"growth": "every", "rows": 7},
    {"growth": "every"},
]
TOKEN_BYTES = 2 * 2 * 2 * 8 * 8
"""One token of `small_config` in fp64: keys and values · layers · KV heads · head size · bytes."""

each_growth = pytest.mark.parametrize("options", GROWTHS, ids=str)
one_of_each_growth = pytest.mark.parametrize("options", [GROWTHS[0], GROWTHS[1], GROWTHS[3]], ids=str)


def make(options: dict[str, Any], places: int = 3, **config: Any) -> tuple[Any, ContiguousKVCache]:
    shape = small_config(**config)
    return shape, ContiguousKVCache(shape, places, CONTEXT, torch.float64, CPU, **options)


def test_rows_that_an_interrupted_step_left_unwritten_are_not_attended_to() -> None:
    """The interrupted step has grown the tensor for five tokens, and the next one writes the first of them."""
    with nan_in_new_memory():
        config, cache = make({"growth": "every", "rows": 16})
        play = Play(config, cache, full, 1, max_back=CONTEXT)
        play.step([(0, 0, 15)])
        q, k, v = (torch.randn(5, heads, config.head_dim, dtype=torch.float64) for heads in (4, 2, 2))
        cache.attend(0, q, k, v, batch_of([(0, 15, 5)]))  # interrupted: the second layer is not reached
        play.step([(0, 15, 1)])


@each_growth
@pytest.mark.parametrize("product", ["alone", "padded together"])
def test_random_steps_equal_the_textbook(
    options: dict[str, Any], product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if product == "padded together":
        monkeypatch.setattr(rows_module, "PADDED_DEVICES", ("cpu",))
    for seed in range(2):
        config, cache = make(options)
        assert Play(config, cache, full, seed, max_back=CONTEXT).steps(25, places=3).num_rolled_back > 3


@one_of_each_growth
def test_a_window_of_the_models_own_is_kept(options: dict[str, Any]) -> None:
    config, cache = make(options, sliding_window=6, sliding_layers=(True, False))
    Play(config, cache, last_tokens(CONTEXT), 0, max_back=CONTEXT).steps(30, places=2)


def test_alone_and_preallocated_it_gives_the_bits_of_the_paged_layout() -> None:
    torch.manual_seed(0)
    config = small_config()
    mine = ContiguousKVCache(config, 1, CONTEXT, torch.float32, CPU)
    other = PagedKVCache(config, 1, CONTEXT, torch.float32, CPU)
    for past, count in [(0, 50), (50, 1), (51, 5), (53, 5), (58, 1), (59, 30)]:
        batches = [batch_of([(0, past, count)]) for _ in (mine, other)]
        for layer in range(2):
            q, k, v = torch.randn(count, 4, 8), torch.randn(count, 2, 8), torch.randn(count, 2, 8)
            outs = [cache.attend(layer, q, k, v, batches[i]) for i, cache in enumerate((mine, other))]
            assert torch.equal(*outs)


@one_of_each_growth
@pytest.mark.parametrize(
    "engine",
    [{}, *ENGINES],
    ids=["together", "chunks of seven", "two places", "preempted"],
)
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_the_same_tokens_as_paged(
    tiny: TinyPair, options: dict[str, Any], engine: dict[str, Any], drafted: bool
) -> None:
    speculative = draft_of(tiny) if drafted else None
    layout = {"layout": "contiguous", **options}
    assert generated(str(tiny.target), layout, speculative_config=speculative, **engine) == paged(str(tiny.target))


def test_the_preempting_scheduler_preempts_and_the_draft_drafts(tiny: TinyPair) -> None:
    llm = LLM(
        str(tiny.target),
        kv_cache_config={"layout": "contiguous"},
        speculative_config=draft_of(tiny),
        scheduler_cls=PreemptingScheduler,
    )
    with llm.trace() as trace:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(trace.of(RequestPreempted)) >= 3
    assert trace.of(DraftProposed)


@one_of_each_growth
def test_the_same_tokens_as_paged_for_minicoder(options: dict[str, Any]) -> None:
    assert generated("minicoder", {"layout": "contiguous", **options}) == paged("minicoder")


def test_several_completions_of_a_prompt_are_those_of_the_paged_layout(tiny: TinyPair) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    texts = []
    for layout in (None, {"layout": "contiguous", "growth": "every", "rows": 4}):
        [output] = LLM(str(tiny.target), kv_cache_config=layout).generate("class", params, use_tqdm=False)
        texts.append([one.token_ids for one in output.outputs])
    assert texts[0] == texts[1] and len({tuple(tokens) for tokens in texts[0]}) == 3


def test_a_new_owner_sees_nothing_of_the_former_one() -> None:
    """The place changes hands without having been freed, and its tensor was full of poison."""
    for options in GROWTHS:
        config, cache = make(options)
        play = Play(config, cache, full, 1, max_back=0)
        play.step([(0, 0, 60)])
        cache.buffers[0].fill_(math.nan)
        play.step([(0, 0, 3)])
        play.step([(0, 3, 1)])


@one_of_each_growth
def test_rows_never_written_are_never_felt(options: dict[str, Any]) -> None:
    with nan_in_new_memory():
        config, cache = make(options)
        Play(config, cache, full, 2, max_back=CONTEXT).steps(8, places=2)


class Growths:
    """Counts what a cache does to grow."""

    def __init__(self, cache: ContiguousKVCache) -> None:
        self.rows_copied = self.allocations = self.rows_padded = 0
        self.grow, self.allocate = cache._grow, cache._allocate
        cache._grow, cache._allocate = self._grow, self._allocate  # type: ignore[method-assign]

    def _grow(self, old: Tensor | None, past: int, total: int) -> Tensor:
        self.allocations += 1
        self.rows_copied += 0 if old is None else past
        return self.grow(old, past, total)

    def _allocate(self, batch: Batch) -> Any:
        found = self.allocate(batch)
        self.rows_padded += sum(seen[0].shape[2] for seen in found.seen) - sum(batch.seq_lens)
        return found


def grow_by_one(options: dict[str, Any], prompt: int, new: int) -> tuple[ContiguousKVCache, Growths]:
    """A prompt, then one token at a time."""
    config, cache = make(options)
    counted = Growths(cache)
    play = Play(config, cache, full, 0, max_back=0)
    play.step([(1, 0, prompt)])
    for i in range(new):
        play.step([(1, prompt + i, 1)])
    return cache, counted


def test_what_growing_costs() -> None:
    """Prompt of 10, then 50 tokens one by one; counted against sums written out here."""
    cache, counted = grow_by_one({}, 10, 50)
    assert (counted.rows_copied, counted.rows_padded, counted.allocations) == (0, 0, 1)
    assert cache.num_bytes == CONTEXT * TOKEN_BYTES

    cache, counted = grow_by_one({"growth": "concat"}, 10, 50)
    assert (counted.rows_copied, counted.rows_padded, counted.allocations) == (sum(range(10, 60)), 0, 51)
    assert cache.num_bytes == 60 * TOKEN_BYTES

    cache, counted = grow_by_one({"growth": "every", "rows": 16}, 10, 50)
    padded = sum(-length % 16 for length in range(10, 61))
    assert (counted.rows_copied, counted.rows_padded, counted.allocations) == (16 + 32 + 48, padded, 4)
    assert cache.num_bytes == 64 * TOKEN_BYTES


def test_rows_of_one_copies_what_concat_copies() -> None:
    [_, concat], [_, every] = (grow_by_one(o, 5, 30) for o in ({"growth": "concat"}, {"growth": "every", "rows": 1}))
    assert concat.rows_copied == every.rows_copied
    assert concat.allocations == every.allocations


def test_spare_rows_host_the_drafts() -> None:
    """Rounds of four drafts of which one is accepted: only committed tokens make the tensor grow, but for the last."""
    config, cache = make({"growth": "every", "rows": 16})
    counted, play = Growths(cache), Play(config, cache, full, 0, max_back=4)
    play.step([(0, 0, 10)])
    past, allocations = 10, math.ceil(10 / 16)
    while past < 100:
        play.step([(0, past, 5)])
        past += 2
        allocations = max(allocations, math.ceil((past + 3) / 16))
    assert play.num_rolled_back > 40
    assert counted.allocations == allocations


@each_growth
def test_bytes_are_as_claimed_and_nothing_stays(options: dict[str, Any]) -> None:
    config, cache = make(options, places=4)
    limit = ContiguousKVCache.bytes_per_block(config, CONTEXT, torch.float64, **options)
    assert cache.num_bytes == tensor_bytes(cache) == 0
    play = Play(config, cache, full, 7, max_back=CONTEXT)
    for _ in range(15):
        play.steps(1, places=4)
        assert cache.num_bytes == tensor_bytes(cache) > 0
        assert all(buffer.nbytes <= limit for buffer in cache.buffers.values())
    assert limit == CONTEXT * TOKEN_BYTES
    cache.free([0, 1, 2, 3])
    cache.free([0])
    assert cache.num_bytes == tensor_bytes(cache) == 0


@pytest.mark.parametrize("n", [1_024, 20_000, 1_000_000])
def test_the_best_number_of_rows_minimises_the_model(n: int) -> None:
    def total(r: int) -> float:
        return n * n / (2 * r) * COPY_COST + n * r / 2 * PADDING_COST + n / r * ALLOCATION_COST

    assert best_rows(n) == pytest.approx(min(range(1, 2000), key=total), abs=1)


def test_the_best_number_of_rows_holds_a_round_of_drafts_and_never_exceeds_the_context() -> None:
    assert best_rows(100) == 16
    assert best_rows(9) == 9
    assert make({"growth": "every"})[1].rows_per_growth == best_rows(CONTEXT)
