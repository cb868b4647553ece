"""The two-level layout: one nibble is the INT4 cache, both are within a sixteenth of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_two_level import PagedTwoLevelKVCache
from tests.cache import paged_checks as check
from tests.cache.engines import fill_with_rubbish
from tests.cache.steps import CPU, small_config, tensor_bytes


def a_cache(group_size: int = 32, head_dim: int = 64) -> PagedTwoLevelKVCache:
    return PagedTwoLevelKVCache(small_config(head_dim=head_dim), 6, 4, torch.float32, CPU, group_size=group_size)


def hard_numbers() -> Tensor:
    """Rows of very different sizes; some constant, zero, of one sign, or far from zero and close together."""
    torch.manual_seed(0)
    x = torch.randn(400, 2, 64) * 10.0 ** torch.randint(-3, 4, (400, 1, 1))
    x[0], x[1], x[2] = 0.0, 3.25, x[2].abs()
    x[3] = 1000 + x[3].clamp(-1, 1)
    return x


def steps_of(cache: PagedTwoLevelKVCache, x: Tensor) -> Tensor:
    """The step s of each number."""
    return cache.encode(x)[1].float().repeat_interleave(cache.group, dim=-1)


@pytest.mark.parametrize(("group_size", "bits"), [(64, 8.5), (32, 9), (16, 10)])
def test_bytes_are_those_of_both_levels(group_size: int, bits: float) -> None:
    cache = a_cache(group_size)
    config = small_config(head_dim=64)
    assert cache.num_bytes == tensor_bytes(cache)
    assert cache.num_bytes == 6 * cache.bytes_per_block(config, 4, torch.float32, group_size=group_size)
    assert cache.num_bytes / (6 * PagedKVCache.bytes_per_block(config, 4, torch.float16)) == bits / 16


@pytest.mark.parametrize("group_size", [64, 16])
def test_both_levels_are_within_a_sixteenth_of_a_step_and_one_within_half(group_size: int) -> None:
    cache, x = a_cache(group_size), hard_numbers()
    stored, step = cache.encode(x), steps_of(a_cache(group_size), x)
    exact = x.abs() * 2.0**-22  # rounding of float32
    both = (cache.decode(*stored) - x).abs()
    upper = (cache.draft_view().decode(*stored[:3]) - x).abs()
    assert (both <= step / 16 * (1 + 1e-4) + exact).all()
    assert (upper <= step / 2 * (1 + 1e-4) + exact).all()
    # The bound is that of the largest code: the others are within half a step of the lower level.
    largest = (step / 32 * (1 + 1e-4) + exact) < both
    assert 0 < largest.sum() < 0.05 * x.numel()
    assert both.mean() < upper.mean() / 12


def test_a_bound_that_is_too_tight_or_a_level_that_is_ignored_is_seen() -> None:
    cache, x = a_cache(), hard_numbers()
    upper, scale, zero, lower = cache.encode(x)
    bound = steps_of(cache, x) / 16 * (1 + 1e-4) + x.abs() * 2.0**-22
    nothing, signless = torch.full_like(lower, 0x88), lower ^ 0x88
    for wrong in (nothing, signless, lower.roll(1, dims=-1)):
        assert ((cache.decode(upper, scale, zero, wrong) - x).abs() > bound).float().mean() > 0.3
    assert ((cache.decode(upper, scale, zero, lower) - x).abs() > bound / 2).any()


def test_the_upper_nibbles_are_the_int4_cache() -> None:
    x = hard_numbers()
    cache, int4 = a_cache(), PagedInt4KVCache(small_config(head_dim=64), 6, 4, torch.float32, CPU)
    for mine, right in zip(cache.encode(x)[:3], int4.encode(x), strict=True):
        assert torch.equal(mine, right)
    view = cache.draft_view()
    assert view.stored_rows().format == "int4"
    assert [pool.data_ptr() for pool in view.keys] == [pool.data_ptr() for pool in cache.keys[:3]]


def test_a_draft_reads_what_the_target_stored_and_the_target_what_it_stored_again() -> None:
    """A draft stores a key, the target stores its own in the same slot: nothing of the draft's is left."""
    cache = a_cache(head_dim=16)
    fill_with_rubbish([*cache.keys, *cache.values])
    view, fresh = cache.draft_view(), a_cache(head_dim=16)
    torch.manual_seed(0)
    k, v, other = torch.randn(6, 2, 16), torch.randn(6, 2, 16), torch.randn(1, 2, 16) * 9
    q = torch.randn(6, 4, 16)

    def step(start: int, end: int) -> Batch:
        slots = torch.arange(12 + start, 12 + end)
        return Batch(slots, slots, slots, torch.tensor([[3, 4]]), [0, end - start], [end], 4)

    cache.attend(0, q[:5], k[:5], v[:5], step(0, 5))
    drafted = view.attend(0, q[5:], other, other, step(5, 6))
    assert torch.isfinite(drafted).all()
    got = cache.attend(0, q[5:], k[5:], v[5:], step(5, 6))
    fresh.attend(0, q[:5], k[:5], v[:5], step(0, 5))
    assert torch.equal(got, fresh.attend(0, q[5:], k[5:], v[5:], step(5, 6)))
    assert not torch.allclose(got, drafted, atol=1e-2)


@pytest.mark.parametrize("query_lens", [[1], [1, 40, 5, 17, 1]], ids=str)
@pytest.mark.parametrize("group_size", [32, 4])
def test_attention_is_the_textbook_over_what_is_stored(query_lens: list[int], group_size: int) -> None:
    check.attention_is_the_textbook_over_what_is_stored(PagedTwoLevelKVCache, query_lens, 7, group_size=group_size)


def test_a_slot_that_is_used_again_forgets_its_old_scale() -> None:
    check.a_slot_used_again_forgets_its_scale(PagedTwoLevelKVCache)


def test_a_copied_block_takes_both_levels_with_it() -> None:
    check.copied_blocks_take_everything_with_them(PagedTwoLevelKVCache)
