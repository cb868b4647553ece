"""The paged INT8 layout: half the bytes, bounded errors, and otherwise everything that the paged layout does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from tests.cache import paged_checks as check
from tests.cache.engines import mean_kl_to_float32
from tests.cache.steps import CPU, small_config, tensor_bytes

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}


def test_bytes_are_those_of_all_tensors_and_half_of_float16() -> None:
    config = small_config(head_dim=64)
    cache = PagedInt8KVCache(config, 6, 4, torch.float32, CPU)
    assert cache.num_bytes == tensor_bytes(cache) == 6 * cache.bytes_per_block(config, 4, torch.float32)
    ratio = cache.num_bytes / (6 * PagedKVCache.bytes_per_block(config, 4, torch.float16))
    assert ratio == (64 + 2) / 128 <= 0.53


def test_the_engine_gets_nearly_twice_the_blocks_of_float16_for_the_same_memory() -> None:
    budget: dict[str, Any] = {"kv_cache_memory_bytes": 4 * 2**20, "dtype": "float16", "device": "cpu"}
    plain, quantised = LLM("minicoder", **budget), LLM("minicoder", **budget, **INT8)
    assert quantised.engine.pool.num_blocks == 4 * 2**20 // (16 * 8 * 2 * 2 * 66)
    assert 1.9 < quantised.engine.pool.num_blocks / plain.engine.pool.num_blocks < 1.95
    assert quantised.engine.runner.cache.num_bytes == tensor_bytes(quantised.engine.runner.cache) <= 4 * 2**20


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("query_lens", [[1], [40], [1, 40, 5, 17, 1]], ids=str)
def test_attention_is_the_textbook_over_what_is_stored(query_lens: list[int], window: int | None) -> None:
    check.attention_is_the_textbook_over_what_is_stored(PagedInt8KVCache, query_lens, window)


def test_a_slot_that_is_used_again_forgets_its_old_scale() -> None:
    check.a_slot_used_again_forgets_its_scale(PagedInt8KVCache)


def test_a_copied_block_takes_its_scales_with_it() -> None:
    check.copied_blocks_take_everything_with_them(PagedInt8KVCache)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return check.together(INT8)


def test_one_by_one_is_together(expected: list[list[int]]) -> None:
    assert check.one_by_one(INT8) == expected


def test_chunked_prefill_is_whole_prefill(expected: list[list[int]]) -> None:
    assert check.in_small_chunks(INT8) == expected


def test_preempted_is_not_preempted(expected: list[list[int]]) -> None:
    assert check.preempted(INT8, block_size=4) == expected


def test_drafted_is_not_drafted(expected: list[list[int]]) -> None:
    assert check.drafted(INT8) == expected


def test_a_shared_prefix_is_a_prefix_of_ones_own() -> None:
    check.a_shared_prefix_gives_what_ones_own_gives(INT8)


def test_forks_go_their_own_ways() -> None:
    check.completions_that_fork_write_into_copies(INT8)


def test_the_loss_is_small() -> None:
    """Mean KL to float32 over 2 held-out texts, every later chunk reading codes. Measured: 1.0e-4."""
    assert mean_kl_to_float32(INT8) < 1e-3
