"""The paged INT4 layout: five bits a number, bounded errors, and otherwise everything that the paged layout does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.errors import ConfigError, UnknownOptionError, UnsupportedError
from tests.cache import paged_checks as check
from tests.cache.engines import mean_kl_to_float32
from tests.cache.steps import CPU, small_config, tensor_bytes
from tests.conftest import TinyPair

INT4: dict[str, Any] = {"kv_cache_dtype": "int4"}
FINER: dict[str, Any] = {"kv_cache_dtype": "int4", "kv_cache_config": {"group_size": 8}}


@pytest.mark.parametrize(("group_size", "bits"), [(64, 4.5), (32, 5), (16, 6), (8, 8)])
def test_bytes_are_those_of_all_tensors_scales_and_zero_points_included(group_size: int, bits: float) -> None:
    config = small_config(head_dim=64)
    cache = PagedInt4KVCache(config, 6, 4, torch.float32, CPU, group_size=group_size)
    assert cache.num_bytes == tensor_bytes(cache)
    assert cache.num_bytes == 6 * cache.bytes_per_block(config, 4, torch.float32, group_size=group_size)
    assert cache.num_bytes / (6 * PagedKVCache.bytes_per_block(config, 4, torch.float16)) == bits / 16


def test_groups_of_32_are_the_default() -> None:
    config = small_config(head_dim=64)
    default = PagedInt4KVCache.bytes_per_block(config, 4, torch.float32)
    assert default == PagedInt4KVCache.bytes_per_block(config, 4, torch.float32, group_size=32)


def test_what_cannot_be_packed_or_grouped_is_refused(tiny: TinyPair) -> None:
    with pytest.raises(UnsupportedError, match="head size 15 must be even"):
        PagedInt4KVCache(small_config(head_dim=15), 6, 4, torch.float32, CPU)
    for group_size in (24, 0, 2.5):
        with pytest.raises(ConfigError, match=f"group_size={group_size}"):
            LLM("minicoder", kv_cache_dtype="int4", kv_cache_config={"group_size": group_size})
    with pytest.raises(UnknownOptionError, match="group_sizes"):
        LLM(str(tiny.target), kv_cache_dtype="int4", kv_cache_config={"group_sizes": 8})


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("query_lens", [[1], [40], [1, 40, 5, 17, 1]], ids=str)
@pytest.mark.parametrize("group_size", [32, 4])
def test_attention_is_the_textbook_over_what_is_stored(
    query_lens: list[int], window: int | None, group_size: int
) -> None:
    check.attention_is_the_textbook_over_what_is_stored(PagedInt4KVCache, query_lens, window, group_size=group_size)


def test_a_slot_that_is_used_again_forgets_its_old_scale() -> None:
    check.a_slot_used_again_forgets_its_scale(PagedInt4KVCache)


def test_a_copied_block_takes_its_scales_with_it() -> None:
    check.copied_blocks_take_everything_with_them(PagedInt4KVCache)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return check.together(INT4)


def test_one_by_one_is_together(expected: list[list[int]]) -> None:
    assert check.one_by_one(INT4) == expected


def test_chunked_prefill_is_whole_prefill(expected: list[list[int]]) -> None:
    assert check.in_small_chunks(INT4) == expected


def test_preempted_is_not_preempted(expected: list[list[int]]) -> None:
    assert check.preempted(INT4, block_size=4) == expected


def test_drafted_is_not_drafted(expected: list[list[int]]) -> None:
    assert check.drafted(INT4) == expected


def test_a_shared_prefix_is_a_prefix_of_ones_own() -> None:
    check.a_shared_prefix_gives_what_ones_own_gives(INT4)


def test_forks_go_their_own_ways() -> None:
    check.completions_that_fork_write_into_copies(INT4)


def test_the_loss_is_bounded_and_smaller_groups_lose_less() -> None:
    """Mean KL to float32 over 2 held-out texts, every later chunk reading codes."""
    loss, finer = mean_kl_to_float32(INT4), mean_kl_to_float32(FINER)
    assert finer < 0.7 * loss and loss < 0.03
