"""What every quantised layout must do, as checks that the tests of each call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minillm import SamplingParams
from minillm.batch import Batch
from minillm.cache.paged_quantized import PagedQuantizedKVCache
from minillm.trace import BlockCopied, DraftProposed, RequestPreempted, TokensCommitted
from tests.cache.engines import DRAFT, engine, fill_with_rubbish, prompts, tokens
from tests.cache.runs import PreemptingScheduler
from tests.cache.steps import CONTEXT, CPU, small_config
from tests.ops.test_paged_attention import random_step, textbook

COUNT, NEW_TOKENS = 4, 16


def one_place(place: int, past: int, count: int) -> Batch:
    """A step of one request of a layout that keeps requests in one piece."""
    nothing = torch.empty(0)
    return Batch(nothing, nothing, nothing, torch.tensor([[place]]), [0, count], [past + count], CONTEXT)


def stored(cache: PagedQuantizedKVCache, layer: int = 0) -> tuple[Tensor, Tensor]:
    """All keys and values as attention reads them, `[num_slots, num_kv_heads, head_dim]` each."""
    keys, values = (cache.decode(*(pool[layer] for pool in pools)) for pools in (cache.keys, cache.values))
    return keys, values


def half_step(cache: PagedQuantizedKVCache, pools: list[Tensor], slots: Tensor) -> Tensor:
    """Half a step of every number in these slots; the second pool holds the scales, one per group."""
    scale = pools[1][0, slots].float()
    scale = scale.unsqueeze(-1) if scale.ndim == 2 else scale
    return scale.repeat_interleave(cache.shape[2] // scale.shape[-1], dim=-1) / 2 * (1 + 1e-5)


def attention_is_the_textbook_over_what_is_stored(
    layout: type[PagedQuantizedKVCache], query_lens: list[int], window: int | None, **options: Any
) -> None:
    """Blocks scattered in a pool full of rubbish: what is stored is within half a step, and that is what is read."""
    q, keys, _, batch, dense = random_step(len(query_lens), 4, (4, 2), 16, query_lens)
    config = small_config(head_dim=16, num_layers=1, sliding_window=window)
    cache = layout(config, len(keys) // 4, 4, torch.float32, CPU, **options)
    fill_with_rubbish([*cache.keys, *cache.values])
    new = []
    for r, (k, v) in enumerate(dense):
        past = len(k) - batch.query_lens[r]
        slots = batch.key_slots[r, : len(k)]
        for pools, x in ((cache.keys, k), (cache.values, v)):
            for pool, part in zip(pools, cache.encode(x[:past]), strict=True):
                pool[0, slots[:past]] = part
        new.append((slots[past:], k[past:], v[past:]))
    slots, k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
    out = cache.attend(0, q, k, v, replace(batch, slot_mapping=slots, plans={}))
    assert torch.isfinite(out).all()
    k_hat, v_hat = stored(cache)
    for r, (k, v) in enumerate(dense):
        own = batch.key_slots[r, : len(k)]
        assert ((k_hat[own] - k).abs() <= half_step(cache, cache.keys, own)).all()
        assert ((v_hat[own] - v).abs() <= half_step(cache, cache.values, own)).all()
        for i in range(batch.query_lens[r]):
            row, position = batch.query_start[r] + i, len(k) - batch.query_lens[r] + i
            expected = textbook(q[row], k_hat[own], v_hat[own], position, window)
            torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


def a_slot_used_again_forgets_its_scale(layout: type[PagedQuantizedKVCache]) -> None:
    """A quiet token after a loud one in the same slot: with the loud scale it would come back as zeros."""
    config = small_config(num_layers=1)
    cache = layout(config, 6, 4, torch.float32, CPU)
    torch.manual_seed(0)
    for size in (1000.0, 0.001):
        k = torch.randn(1, config.num_kv_heads, config.head_dim) * size
        q = torch.randn(1, config.num_heads, config.head_dim)
        batch = Batch(q, q, torch.tensor([13]), torch.tensor([[3]]), [0, 1], [2], 4)
        cache.attend(0, q, k, k * 2, batch)
        for got, exact in zip(stored(cache), (k, k * 2), strict=True):
            assert ((got[13] - exact).abs() <= exact.abs().amax() / 14).all()


def copied_blocks_take_everything_with_them(layout: type[PagedQuantizedKVCache]) -> None:
    """In order: a block that was copied to can be copied on."""
    cache = layout(small_config(), 5, 4, torch.float32, CPU)
    fill_with_rubbish([*cache.keys, *cache.values])
    torch.manual_seed(0)
    for pools in (cache.keys, cache.values):
        for pool, part in zip(pools, cache.encode(torch.randn(8, 2, 8) * 50), strict=True):
            pool[:, :8] = part
    cache.copy_blocks([(0, 3), (1, 2), (3, 4)])
    for layer in range(2):
        for x in stored(cache, layer):
            assert torch.isfinite(x).all()
            assert torch.equal(x[12:16], x[:4]) and torch.equal(x[8:12], x[4:8]) and torch.equal(x[16:], x[:4])


# --- through the engine, in float64 (see `engines`) ------------------------------------------------------------------


def together(options: dict[str, Any]) -> list[list[int]]:
    """What all the others must give."""
    return tokens(engine(options), prompts(COUNT), NEW_TOKENS)


def one_by_one(options: dict[str, Any]) -> list[list[int]]:
    llm = engine(options)
    return [tokens(llm, [prompt], NEW_TOKENS)[0] for prompt in prompts(COUNT)]


def in_small_chunks(options: dict[str, Any]) -> list[list[int]]:
    return tokens(engine(options, max_num_seqs=3, max_num_batched_tokens=19), prompts(COUNT), NEW_TOKENS)


def preempted(options: dict[str, Any], **more: Any) -> list[list[int]]:
    llm = engine(options, scheduler_cls=PreemptingScheduler, **more)
    with llm.trace() as trace:
        got = tokens(llm, prompts(COUNT), NEW_TOKENS)
    assert trace.of(RequestPreempted)
    return got


def drafted(options: dict[str, Any]) -> list[list[int]]:
    """With rounds that keep no draft and rounds that keep all."""
    llm = engine(options, speculative_config=DRAFT)
    with llm.trace() as trace:
        got = tokens(llm, prompts(COUNT), NEW_TOKENS)
    assert trace.of(DraftProposed)
    assert {0, 4} <= {event.num_accepted for event in trace.of(TokensCommitted) if event.num_drafts}
    return got


def a_shared_prefix_gives_what_ones_own_gives(options: dict[str, Any]) -> None:
    """A long prompt, the same again, and its first half with another end."""
    long = max(prompts(COUNT), key=len)
    texts = [long, long, long[: len(long) // 2] + "\n    return"]
    shared, alone = (engine(options, enable_prefix_caching=share) for share in (True, False))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = [shared.generate(text, params, use_tqdm=False)[0] for text in texts]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, True, True]
    assert [o.outputs[0].token_ids for o in outputs] == [tokens(alone, [text], NEW_TOKENS)[0] for text in texts]


def completions_that_fork_write_into_copies(options: dict[str, Any]) -> None:
    """Three samples of one prompt share its blocks, and copy the last one when they go apart."""
    prompt = max(prompts(COUNT), key=len)
    params = SamplingParams(n=3, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
    together = engine(options)
    with together.trace() as trace:
        outputs = together.generate(prompt, params, use_tqdm=False)[0].outputs
    assert len(trace.of(BlockCopied)) == 2
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    alone = engine(options, max_num_seqs=1, enable_prefix_caching=False)
    for output, one in zip(outputs, alone.generate(prompt, params, use_tqdm=False)[0].outputs, strict=True):
        assert output.token_ids == one.token_ids
