"""Paged attention on the CPU against the reference, over ragged steps with NaN in every slot that must not be read."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from minillm.batch import Batch, Segment, tree_masks
from minillm.ops.cpu import attention
from minillm.ops.cpu.attention import KEY_BLOCK, NO_TREE, scratch_size
from minillm.ops.cpu.compiled import entry_point
from minillm.ops.cpu.team import Team, new_sync
from minillm.ops.paged_attention import paged_attention
from minillm.ops.tree_attention import tree_attention
from tests.ops.test_paged_attention import MIXES, random_step

attend = entry_point()(attention.attend.py_func)
"""Cached on disk, as a step is: compiling takes seconds."""


def run(q, keys, values, batch, window=None, threads: int = 1, tree=NO_TREE, bfloat: bool = False) -> torch.Tensor:
    """`attend` as `threads` threads, one after the other: tasks do not depend on each other. `bfloat`: the pools hold
    bfloat16s."""
    heads, dim = q.shape[1:]
    requests, table, tables = [], 0, []
    for r, seq_len in enumerate(batch.seq_lens):
        row = batch.block_tables[r, : -(-seq_len // batch.block_size)].tolist()
        requests.append((batch.query_start[r], batch.query_lens[r], seq_len, table))
        table, tables = table + len(row), tables + row
    floats = [torch.where(pool.abs() > 5e3, torch.nan, pool).reshape(-1) for pool in (keys, values)]  # unused slots
    pools = [(p.bfloat16().view(torch.uint16).numpy() if bfloat else p.numpy(),) for p in floats]
    out = np.full(q.numel(), np.nan, np.float32)
    for thread_id in range(threads):
        scratch = np.full(scratch_size(dim), np.nan, np.float32)
        attend(
            Team(thread_id, threads, new_sync()), q.numpy().reshape(-1), 0, heads * dim, heads, keys.shape[1], dim,
            window or 0, np.array(requests), np.array(tables), tree, batch.block_size, 0, *pools, out, 0, scratch, 0,
        )  # fmt: skip
    return torch.from_numpy(out).view_as(q)


HEADS = [((4, 2), 32), ((6, 1), 64), ((2, 2), 96), ((8, 2), 128)]
BLOCK_SIZES = [1, 7, 16, 64]


def every_pair(mixes: list[list[int]]) -> list[tuple[list[int], tuple[int, int], int, int]]:
    """Steps `(mix, heads, dim, block size)`: every mix with every block size, and every heads with all of both."""
    return [
        (mix, *HEADS[(m + b) % len(HEADS)], block_size)
        for m, mix in enumerate(mixes)
        for b, block_size in enumerate(BLOCK_SIZES)
    ]


@pytest.mark.parametrize(("mix", "heads", "dim", "block_size"), every_pair(MIXES), ids=str)
def test_every_ragged_step_matches_the_reference(mix, heads, dim: int, block_size: int) -> None:
    q, keys, values, batch, _ = random_step(sum(mix) + block_size, block_size, heads, dim, mix)
    for window in (None, 1, 9):
        batch.plans.clear()
        right = paged_attention(q, keys, values, batch, window)
        got = run(q, keys, values, batch, window)
        assert float((got - right).norm() / right.norm()) < 1e-6, window


BFLOAT_ERROR = 4e-3
"""Queries and softmax weights are off by up to 2^-9 of themselves, keys and values by nothing: they were rounded."""


@pytest.mark.parametrize(("mix", "heads", "dim", "block_size"), every_pair([*MIXES, [2 * KEY_BLOCK + 41, 1]]), ids=str)
def test_every_ragged_step_in_bfloat_matches_the_reference(mix, heads, dim: int, block_size: int) -> None:
    q, keys, values, batch, _ = random_step(sum(mix) + block_size, block_size, heads, dim, mix)
    keys, values = keys.bfloat16().float(), values.bfloat16().float()
    for window in (None, 9):
        batch.plans.clear()
        right = paged_attention(q, keys, values, batch, window)
        got = run(q, keys, values, batch, window, bfloat=True)
        assert float((got - right).norm() / right.norm()) < BFLOAT_ERROR, window
        assert torch.equal(run(q, keys, values, batch, window, threads=3, bfloat=True), got), window


def test_a_draft_tree_in_bfloat_matches_the_reference() -> None:
    mix = [3, 70, 64, 1]
    q, keys, values, batch, _ = random_step(1, 16, (6, 2), 64, mix)
    keys, values = keys.bfloat16().float(), values.bfloat16().float()
    masks = random_masks(random.Random(5), mix)
    right = tree_attention(q, keys, values, batch, torch.tensor(masks))
    tree = np.array([[0] * len(masks), masks], np.int64).T.copy()
    got = run(q, keys, values, batch, tree=tree, bfloat=True)
    assert float((got - right).norm() / right.norm()) < BFLOAT_ERROR


def random_masks(rng: random.Random, query_lens: list[int]) -> list[int]:
    """Masks of a random tree for every request of at most 64 tokens, with its first token as the root; -1 for the
    tokens of longer requests."""
    masks: list[int] = []
    for count in query_lens:
        parents = [rng.randrange(-1, node) for node in range(count - 1)]
        segment = Segment([0] * count, 0, [0], parents=parents if count <= 64 else None)
        masks += tree_masks([segment])
    return masks


@pytest.mark.parametrize("mix", [*MIXES, [64], [3, 70, 64, 1]], ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_draft_tree_matches_the_reference(mix: list[int], block_size: int, threads: int) -> None:
    q, keys, values, batch, _ = random_step(sum(mix), block_size, (6, 2), 64, mix)
    masks = random_masks(random.Random(len(mix)), mix)
    right = tree_attention(q, keys, values, batch, torch.tensor(masks))
    tree = np.array([[0] * len(masks), masks], np.int64).T.copy()
    got = run(q, keys, values, batch, None, threads, tree)
    assert float((got - right).norm() / right.norm()) < 1e-6
    if max(mix) > 2:
        assert float((got - run(q, keys, values, batch)).norm()) > 0.1  # a chain gives another result


def test_a_tree_that_is_a_chain_gives_the_bits_of_a_chain() -> None:
    q, keys, values, batch, _ = random_step(3, 16, (6, 2), 64, [5, 1, 64])
    for mask in ([-1] * 70, [(1 << i + 1) - 1 for count in (5, 1, 63) for i in range(count)] + [-1]):
        tree = np.array([[0] * 70, mask], np.int64).T.copy()
        assert torch.equal(run(q, keys, values, batch, tree=tree), run(q, keys, values, batch))


def test_a_row_is_the_same_to_the_last_bit_on_any_number_of_threads() -> None:
    q, keys, values, batch, _ = random_step(5, 16, (6, 2), 64, [1, 40, 5])
    whole = run(q, keys, values, batch)
    assert torch.equal(whole, run(q, keys, values, batch, threads=2))
    assert torch.equal(whole, run(q, keys, values, batch, threads=5))


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("block_size", [7, 16])
def test_a_row_is_the_same_to_the_last_bit_in_a_task_of_any_size(count: int, block_size: int) -> None:
    """Three rows for each new token; `attend_lanes` computes tasks of about sixteen rows, `_task` all others."""
    q, keys, values, batch, _ = random_step(count, block_size, (6, 2), 64, [2 * KEY_BLOCK + 37])
    batch = batch_of_last(batch, count)
    q = q[-count:] * torch.linspace(0.5, 3, count)[:, None, None]
    chain = NO_TREE
    tree = np.array([[0] * count, random_masks(random.Random(count), [count])], np.int64).T.copy()
    for window, draft in ((None, chain), (None, tree), (3, chain), (KEY_BLOCK, chain), (KEY_BLOCK + 35, chain)):
        together = run(q, keys, values, batch, window, 1, draft)
        if draft is chain:
            batch.plans.clear()
            right = paged_attention(q, keys, values, batch, window)
            assert float((together - right).norm() / right.norm()) < 1e-6, window
        assert torch.equal(run(q, keys, values, batch, window, 100, draft), together), window  # a row per task


def batch_of_last(batch: Batch, count: int) -> Batch:
    """The step of one request with only its last `count` tokens as new ones."""
    return dataclasses.replace(batch, query_start=[0, count])


def test_large_scores_do_not_overflow() -> None:
    q, keys, values, batch, _ = random_step(6, 16, (4, 2), 32, [3, 1])
    right = paged_attention(q * 1000, keys, values, batch)
    got = run(q * 1000, keys, values, batch)
    assert float((got - right).norm() / right.norm()) < 1e-4  # the difference of scores near 1000 has fewer digits


def test_a_prompt_of_several_key_blocks_matches_the_reference_and_is_the_same_however_it_is_split() -> None:
    """A softmax that did not rescale its sums for a larger score would be wrong from the second key block on."""
    q, keys, values, batch, _ = random_step(7, 16, (6, 2), 64, [2 * KEY_BLOCK + 40])
    q = q * torch.linspace(0.5, 3, len(q))[:, None, None]
    for window in (None, KEY_BLOCK - 5, KEY_BLOCK + 9):
        batch.plans.clear()
        right = paged_attention(q, keys, values, batch, window)
        whole = run(q, keys, values, batch, window)
        assert float((whole - right).norm() / right.norm()) < 1e-6, window
        for threads in (3, 200):  # few rows per task, and one
            assert torch.equal(run(q, keys, values, batch, window, threads), whole), window


def test_a_later_token_that_is_nan_is_not_seen_by_earlier_blocks() -> None:
    q, keys, values, batch, _ = random_step(9, 16, (2, 1), 32, [2 * KEY_BLOCK])
    clean = run(q, keys, values, batch)
    last = batch.seq_lens[0] - 1
    keys[batch.block_tables[0, last // 16] * 16 + last % 16] = float("nan")
    got = run(q, keys, values, batch)
    assert torch.equal(got[: KEY_BLOCK // 2], clean[: KEY_BLOCK // 2]) and got[-1].isnan().all()
