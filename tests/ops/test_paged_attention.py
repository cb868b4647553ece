"""Paged attention against the textbook formula, one request and one query at a time."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.bench.on_gpu.ragged_steps import Layout, step
from minillm.ops import paged_attention as op


def textbook(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None) -> Tensor:
    """One query `[heads, dim]` over one request's keys and values `[tokens, kv heads, dim]`, in fp64."""
    first = 0 if window is None else max(0, position - window + 1)
    k, v = k[first : position + 1].double(), v[first : position + 1].double()
    groups = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        scores = k[:, head // groups] @ q[head].double() / q.shape[1] ** 0.5
        out.append(scores.softmax(0) @ v[:, head // groups])
    return torch.stack(out)


def random_step(seed: int, block_size: int, heads: tuple[int, int], dim: int, query_lens: list[int]):
    """A pool with scattered blocks, NaN in unused slots, the batch that reads it, and each request's own tokens."""
    torch.manual_seed(seed)
    layout = Layout(torch.float32, 0, heads, dim, block_size, None)
    q, keys, values, batch = step(random.Random(seed), torch.device("cpu"), layout, query_lens, past=(0, 1, 5, 37))
    own = [
        [table[i // block_size] * block_size + i % block_size for i in range(length)]
        for table, length in zip(batch.block_tables.tolist(), batch.seq_lens, strict=True)
    ]
    return q, keys, values, batch, [(keys[slots], values[slots]) for slots in own]


MIXES = [[1], [5], [1, 1, 1], [1, 3, 5], [40], [1, 40, 5, 17, 1], [16, 17], [2, 1]]


@pytest.mark.parametrize("query_lens", MIXES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_ragged_batch_equals_the_textbook(query_lens: list[int], block_size: int, window: int | None) -> None:
    q, keys, values, batch, dense = random_step(len(query_lens), block_size, (6, 2), 32, query_lens)
    out = op.paged_attention(q, keys, values, batch, window)
    for r, (k, v) in enumerate(dense):
        for i in range(batch.query_lens[r]):
            row = batch.query_start[r] + i
            expected = textbook(q[row], k, v, batch.seq_lens[r] - batch.query_lens[r] + i, window)
            torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_head_layouts(heads: tuple[int, int], dim: int) -> None:
    q, keys, values, batch, dense = random_step(3, 8, heads, dim, [1, 6, 20])
    out = op.paged_attention(q, keys, values, batch)
    for r, (k, v) in enumerate(dense):
        row = batch.query_start[r + 1] - 1
        torch.testing.assert_close(
            out[row].double(), textbook(q[row], k, v, batch.seq_lens[r] - 1, None), rtol=1e-5, atol=1e-5
        )


def test_blocks_in_a_row_are_read_in_place_with_the_same_result() -> None:
    torch.manual_seed(0)
    keys, values, q = torch.randn(64, 2, 16), torch.randn(64, 2, 16), torch.randn(3, 4, 16)

    def run(table: list[int]) -> tuple[Tensor, Batch]:
        batch = Batch(q, q, q, torch.tensor([table]), [0, 3], [19], 8)
        return op.paged_attention(q, keys, values, batch), batch

    in_row, batch = run([2, 3, 4])
    assert isinstance(batch.plans[(op.AttentionPlan, None)].groups[0].slots, slice)
    for source in (keys, values):
        source[40:48], source[32:40] = source[32:40].clone(), source[40:48].clone()
    scattered, batch = run([2, 3, 5])
    assert not isinstance(batch.plans[(op.AttentionPlan, None)].groups[0].slots, slice)
    assert torch.equal(in_row, scattered)


def test_stale_rows_after_a_roll_back_are_never_seen() -> None:
    """Rows beyond a request's length are rejected drafts: whatever they hold must not reach the result."""
    torch.manual_seed(0)
    keys, values, q = torch.randn(16, 1, 16), torch.randn(16, 1, 16), torch.randn(3, 2, 16)

    def run() -> Tensor:
        return op.paged_attention(q, keys, values, Batch(q, q, q, torch.tensor([[2, 0], [1, 1]]), [0, 1, 3], [6, 3], 4))

    before = run()
    for stale in (2, 3, 7):  # block 0 holds two tokens of the first request, block 1 three of the second
        keys[stale], values[stale] = float("nan"), float("nan")
    assert torch.equal(before, run())
    keys[1] = float("nan")  # a row that is in use
    assert not torch.equal(before, run())


def test_requests_of_similar_length_share_a_group_and_no_other() -> None:
    seq_lens = [10, 300, 40, 290, 100, 60]
    tables = torch.arange(6 * 38).view(6, 38)
    batch = Batch(*[torch.empty(0)] * 3, tables, [0, 1, 2, 7, 8, 28, 29], seq_lens, 8)
    made = op.make_plan(batch, None, 2, torch.float32)
    assert [group.count for group in made.groups] == [1, 2, 3]  # the prefill of 20; 300 and 290; 60, 40 and 10
    assert [group.is_prefill for group in made.groups] == [True, False, False]
    gathered = sum(len(group.slots) for group in made.groups if isinstance(group.slots, Tensor))
    assert gathered == 2 * 300 + 3 * 60  # the prefill's blocks lie in a row: it is read where it is


def test_decoding_alike_requests_moves_no_query() -> None:
    tables = torch.tensor([[5, 1], [0, 4], [2, 3]])
    made = op.make_plan(Batch(*[torch.empty(0)] * 3, tables, [0, 1, 2, 3], [6, 8, 5], 4), None, 1, torch.float32)
    assert len(made.groups) == 1 and made.padded_queries is None and made.result_rows is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    q, keys, values, batch, dense = random_step(5, 8, (4, 2), 32, [1, 3, 1, 20])
    out = op.paged_attention(q.to(dtype), keys.to(dtype), values.to(dtype), batch)
    assert out.dtype == dtype
    bound = 1e-6 if dtype == torch.float64 else 3e-2
    for r, (k, v) in enumerate(dense):
        row = batch.query_start[r + 1] - 1
        expected = textbook(q[row], k, v, batch.seq_lens[r] - 1, None)
        torch.testing.assert_close(out[row].double(), expected, rtol=bound, atol=bound)


def test_a_plan_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values, batch, _ = random_step(1, 4, (2, 1), 16, [1, 2, 20])
    made = []
    real = op.make_plan
    monkeypatch.setattr(op, "make_plan", lambda *args: made.append(1) or real(*args))
    for _ in range(8):
        op.paged_attention(q, keys, values, batch)
    assert len(made) == 1
