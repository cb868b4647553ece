"""Lesson 02: the references do what the lesson says of them, and its facts about PyTorch are facts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l02_kv_cache import (
    LLAMA_2_70B,
    append_kv,
    best_r,
    kv_bytes_per_token,
    next_capacity,
    offset_mask,
)
from minillm.training.recipes import TARGET

CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


@settings(max_examples=40)
@given(chunks=CHUNKS)
def test_a_text_in_pieces_attends_as_the_whole_text_does(chunks: list[int]):
    total = sum(chunks)
    torch.manual_seed(total)
    q, k, v = (torch.randn(total, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = attend(q, k, v, offset_mask(total, 0))
    cache_k, cache_v = torch.full((2, total, 2, 8), torch.nan, dtype=torch.float64)
    past, pieces = 0, []
    for num_new in chunks:
        new = slice(past, past + num_new)
        keys, values = append_kv(cache_k, cache_v, past, k[new], v[new])
        pieces.append(attend(q[new], keys, values, offset_mask(num_new, past)))
        past += num_new
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-12)


@given(chunks=CHUNKS)
def test_masks_of_the_pieces_are_rows_of_the_causal_mask(chunks: list[int]):
    total = sum(chunks)
    causal, past = torch.ones(total, total, dtype=torch.bool).tril(), 0
    for num_new in chunks:
        assert torch.equal(offset_mask(num_new, past), causal[past : past + num_new, : past + num_new])
        past += num_new


def test_causal_flag_of_pytorch_starts_in_the_top_left_corner():
    q, k, v = torch.randn(1, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    flag = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    top_left = torch.ones(2, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(flag, F.scaled_dot_product_attention(q, k, v, attn_mask=top_left))
    right = F.scaled_dot_product_attention(q, k, v, attn_mask=offset_mask(2, 3))
    assert (flag - right).abs().max() > 1e-2


def test_one_row_past_the_end_vanishes_without_an_error_in_pytorch():
    table = torch.zeros(4, 1)
    table[4:5] = torch.ones(1, 1)
    assert table.sum() == 0
    with pytest.raises(ValueError, match="5 rows do not fit into a cache of 4"):
        append_kv(torch.zeros(4, 1, 1), torch.zeros(4, 1, 1), 4, torch.ones(1, 1, 1), torch.ones(1, 1, 1))


def test_bytes_are_those_of_the_tensors():
    rows = torch.zeros(2, TARGET.num_layers, TARGET.num_kv_heads, TARGET.head_dim)
    assert kv_bytes_per_token(TARGET, 4) == rows.numel() * rows.element_size() == 8192


def test_llama_2_70b_needs_80_gib_only_for_64_texts():
    one = 4096 * kv_bytes_per_token(LLAMA_2_70B, 2)
    assert one == 1.25 * 2**30
    assert 64 * one == 80 * 2**30


@given(chunks=CHUNKS, every=st.integers(1, 40))
def test_growing_always_makes_room_and_copies_only_what_was_written(chunks: list[int], every: int):
    capacity = past = 0
    for num_new in chunks:
        grown, copied = next_capacity(capacity, past, num_new, every)
        assert grown >= past + num_new
        assert grown % every == 0
        assert grown - every < max(past + num_new, capacity)
        assert copied == (past if grown != capacity else 0)
        capacity, past = grown, past + num_new


@pytest.mark.parametrize(("every", "copied"), [(1, 20 * 19 // 2), (8, 8 + 16), (20, 0)])
def test_total_copies_of_twenty_tokens(every: int, copied: int):
    capacity = total = 0
    for past in range(20):
        capacity, moved = next_capacity(capacity, past, 1, every)
        total += moved
    assert total == copied


@given(
    num_tokens=st.integers(2, 5000),
    copy=st.floats(0.0, 10.0),
    pad=st.floats(0.001, 10.0),
    allocation=st.floats(0.0, 1000.0),
)
def test_no_r_beats_the_best_r(num_tokens: int, copy: float, pad: float, allocation: float):
    def cost(r: float) -> float:
        return num_tokens**2 / (2 * r) * copy + num_tokens * r / 2 * pad + num_tokens / r * allocation

    r = best_r(num_tokens, copy, pad, allocation)
    assert 1 <= r <= num_tokens
    rivals = [1 + (num_tokens - 1) * i / 50 for i in range(51)]
    assert cost(r) <= min(map(cost, rivals)) * (1 + 1e-9)


def test_free_padding_means_preallocate():
    assert best_r(384, 1.0, 0.0, 0.0) == 384


def test_counterexample_of_append_is_short_enough_to_redo_by_hand():
    report = str(check_function("l02.append_kv", lambda k, v, past, new_k, new_v: (k, v)))
    assert "the first token" in report
    assert "at ['keys']: [1]" in report
    assert "at ['keys']: [-1, -1, -1]" in report
    assert len(report) < 900


def test_an_answer_of_the_wrong_shape_is_reported_not_swallowed():
    def flat(k: Tensor, v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = append_kv(k, v, past, new_k, new_v)
        return keys.flatten(1), values.flatten(1)

    report = str(check_function("l02.append_kv", flat))
    assert "FAIL" in report
    assert "tensor" in report


@pytest.mark.parametrize("returned", [lambda pair: None, lambda pair: (*pair, 1), lambda pair: pair[0]])
def test_anything_but_two_views_is_named(returned):
    report = str(check_function("l02.append_kv", lambda *given: returned(append_kv(*given))))
    assert "does not return a view of the cache of keys and then a view of the cache of values" in report
    assert "raised" not in report


def _index_error(k: Tensor, v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    if past + len(new_k) > len(k):
        raise IndexError("full")
    return append_kv(k, v, past, new_k, new_v)


def _assertion(k: Tensor, v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    assert past + len(new_k) <= len(k)
    return append_kv(k, v, past, new_k, new_v)


@pytest.mark.parametrize(("answer", "kind"), [(_index_error, "IndexError"), (_assertion, "AssertionError")])
def test_an_exception_of_another_type_is_named(answer, kind: str):
    result = check_function("l02.append_kv", answer)
    assert not result.passed
    assert result.counterexample.cause == f"your function raises {kind} here, but should raise ValueError"


@pytest.mark.parametrize("changed", [lambda new: new[:, :1], lambda new: new[..., :1], lambda new: new.flip(1)])
def test_every_head_and_channel_has_its_own_number(changed):
    def mixed_up(k: Tensor, v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
        return append_kv(k, v, past, changed(new_k).expand_as(new_k), new_v)

    shown = check_function("l02.append_kv", mixed_up).counterexample
    assert "each head and channel keeps its place" in shown.cause
    assert "other numbers" in shown.got


def test_a_check_after_the_writing_is_told_to_be_too_late():
    def checks_last(k: Tensor, v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
        end = past + len(new_k)
        k[past:end], v[past:end] = new_k, new_v
        if end > len(k):
            raise ValueError("full")
        return k[:end], v[:end]

    assert "it checks too late" in check_function("l02.append_kv", checks_last).counterexample.cause


class CacheFull(ValueError):
    """A learner's own error."""


def test_a_learners_own_kind_of_value_error_passes():
    def refuses(k: Tensor, v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
        if past + len(new_k) > len(k):
            raise CacheFull("full")
        return append_kv(k, v, past, new_k, new_v)

    assert check_function("l02.append_kv", refuses).passed


def test_two_views_in_a_list_pass():
    assert check_function("l02.append_kv", lambda *given: list(append_kv(*given))).passed


def test_a_value_error_by_mistake_is_told_with_its_line():
    def unpacks_two(k: Tensor, v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
        _num_new, _heads = new_k.shape
        return append_kv(k, v, past, new_k, new_v)

    report = str(check_function("l02.append_kv", unpacks_two))
    assert "more values are unpacked than the 2 names on the left" in report
    assert "_num_new, _heads = new_k.shape" in report
