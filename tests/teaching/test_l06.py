"""Lesson 06: the references do what the engine does, and together they keep the books and the contents right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.batch import Batch
from minillm.cache.block_pool import BlockPool
from minillm.cache.prefix import extend_block_hashes, hash_block_tokens, root_hash
from minillm.ops.paged_attention import paged_attention
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises._l06_reference import attention
from minillm.teaching.exercises.l06_paged_blocks import (
    allocate,
    find_prefix,
    gather_attention,
    own_block,
    release,
    slot_mapping,
)


@settings(max_examples=30)
@given(
    block_size=st.integers(1, 5),
    seq_len=st.integers(1, 17),
    num_new=st.integers(1, 17),
    seed=st.integers(0, 99),
)
def test_gathered_attention_is_the_engines(block_size: int, seq_len: int, num_new: int, seed: int):
    num_new = min(num_new, seq_len)
    torch.manual_seed(seed)
    num_blocks = -(-seq_len // block_size)
    table = torch.randperm(num_blocks + 2)[:num_blocks].tolist()
    keys, values = torch.randn(2, (num_blocks + 2) * block_size, 2, 4, dtype=torch.float64)
    q = torch.randn(num_new, 4, 4, dtype=torch.float64)
    start = seq_len - num_new
    batch = Batch(
        token_ids=torch.zeros(num_new, dtype=torch.int64),
        positions=torch.arange(start, seq_len),
        slot_mapping=torch.tensor(slot_mapping(table, start, num_new, block_size)),
        block_tables=torch.tensor([table]),
        query_start=[0, num_new],
        seq_lens=[seq_len],
        block_size=block_size,
    )
    mine = gather_attention(q, keys, values, table, seq_len, block_size)
    torch.testing.assert_close(mine, paged_attention(q, keys, values, batch), rtol=1e-12, atol=1e-12)


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=14), known=st.lists(st.integers(0, 3), max_size=14))
def test_found_blocks_hold_the_same_beginning_and_leave_the_last_token(tokens: list[int], known: list[int]):
    names = extend_block_hashes([], known, 2)
    found = find_prefix(tokens, {name: i for i, name in enumerate(names)}, 2, "")
    assert found == list(range(len(found)))
    assert tokens[: 2 * len(found)] == known[: 2 * len(found)]
    assert 2 * len(found) < len(tokens)
    further = 2 * len(found) + 2
    assert further >= len(tokens) or further > len(known) or tokens[:further] != known[:further]


@settings(max_examples=50)
@given(moves=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=30))
def test_books_balance_whatever_is_allocated_and_released(moves: list[tuple[int, int]]):
    pool = BlockPool(9, 4)
    free, counts = list(range(9)), [0] * 9
    tables: list[list[int]] = []
    for kind, count in moves:
        if kind == 0 and (taken := allocate(free, counts, count)) is not None:
            tables.append(taken)
        elif kind == 1 and tables:
            release(free, counts, tables.pop(count % len(tables)))
        elif kind == 2 and tables:  # a fork, which then writes into its last block
            fork = list(tables[count % len(tables)])
            for block in fork:
                counts[block] += 1
            if free:
                own_block(fork, len(fork) - 1, free, counts, torch.zeros(36), torch.zeros(36), 4)
            tables.append(fork)
    pool._empty, pool._ref_counts = free, counts
    pool.check_integrity(tables)


@pytest.mark.parametrize("name", ["free", "ref_counts"])
def test_a_list_that_is_made_anew_and_not_changed_is_named(name: str):
    def takes(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
        if count > len(free):
            return None
        taken, left = free[len(free) - count :], free[: len(free) - count]  # in the wrong order
        if name == "free":
            free = left
            for block in taken:
                ref_counts[block] = 1
        else:
            free[:] = left
            ref_counts = [1 if block in taken else owners for block, owners in enumerate(ref_counts)]
        return taken

    cause = check_function("l06.allocate", takes).counterexample.cause
    assert cause.startswith(f"{name} must be changed in place, and is not")


def test_a_copy_is_written_without_touching_the_original():
    keys = torch.arange(8.0)
    values = -keys
    table, free, counts = [1], [3], [0, 2, 0, 0]
    own_block(table, 0, free, counts, keys, values, 2)
    keys[slot_mapping(table, 1, 1, 2)] = 99
    assert keys.tolist() == [0, 1, 2, 3, 4, 5, 2, 99] and values.tolist() == [-0.0, -1, -2, -3, -4, -5, -2, -3]


def _releases_a_set(free, ref_counts, block_ids):
    release(free, ref_counts, list(set(block_ids)))


def _releases_sorted(free, ref_counts, block_ids):
    release(free, ref_counts, sorted(block_ids))


def _reads_whole_blocks_and_masks(q, keys, values, block_table, seq_len, block_size):
    slots = torch.tensor(slot_mapping(block_table, 0, len(block_table) * block_size, block_size))
    mask = torch.arange(len(slots))[None, :] <= torch.arange(seq_len - len(q), seq_len)[:, None]
    return attention(q, keys[slots], values[slots], mask)


def _finds_one_token_less(token_ids, known, block_size, salt):
    return find_prefix(token_ids[:-1], known, block_size, salt)


def _block_zero_is_no_block(token_ids, known, block_size, salt):
    return find_prefix(token_ids, {name: block for name, block in known.items() if block}, block_size, salt)


def _copies_one_slot_too_many(block_table, index, free, ref_counts, keys, values, block_size):
    old = block_table[index]
    own_block(block_table, index, free, ref_counts, keys, values, block_size)
    new = block_table[index]
    if new != old:
        for pool in (keys, values):
            pool[(new + 1) * block_size] = pool[(old + 1) * block_size]


def _finds_two_blocks(token_ids, known, block_size, salt):
    return find_prefix(token_ids, known, block_size, salt)[:2]


def _hashes_after_the_first_block(token_ids, known, block_size, salt):
    found, parents = [], [root_hash(salt)]
    for start in range(0, len(token_ids) - block_size, block_size):
        parents.append(hash_block_tokens(parents[:2][-1], token_ids[start : start + block_size]))
        if parents[-1] not in known:
            break
        found.append(known[parents[-1]])
    return found


def _blocks_of_four(token_ids, known, block_size, salt):
    return find_prefix(token_ids, known, 4, salt)


def _empties_the_index(token_ids, known, block_size, salt):
    found = find_prefix(token_ids, known, block_size, salt)
    for block in found:
        known.pop(next(name for name, owner in known.items() if owner == block))
    return found


def _writes_into_a_temporary_tensor(block_table, index, free, ref_counts, keys, values, block_size):
    old = block_table[index]
    own_block(block_table, index, free, ref_counts, keys.clone(), values.clone(), block_size)
    source, target = (slice(block * block_size, (block + 1) * block_size) for block in (old, block_table[index]))
    for pool in (keys, values):
        pool.flatten(1)[target] = pool.flatten(1)[source].clone()


def _views_blocks_of_flat_slots(block_table, index, free, ref_counts, keys, values, block_size):
    old = block_table[index]
    own_block(block_table, index, free, ref_counts, keys.clone(), values.clone(), block_size)
    for pool in (keys, values):
        blocks = pool.view(len(pool) // block_size, -1)
        blocks[block_table[index]] = blocks[old]


def _takes_the_first_free_block(block_table, index, free, ref_counts, keys, values, block_size):
    free.reverse()
    own_block(block_table, index, free, ref_counts, keys, values, block_size)
    free.reverse()


def _copies_both_ends(block_table, index, free, ref_counts, keys, values, block_size):
    old, pools = block_table[index], (keys.clone(), values.clone())
    own_block(block_table, index, free, ref_counts, *pools, block_size)
    for slot in (0, block_size - 1):
        for pool in (keys, values):
            pool[block_table[index] * block_size + slot] = pool[old * block_size + slot]


def _copies_with_an_index_per_axis(block_table, index, free, ref_counts, keys, values, block_size):
    old = block_table[index]
    own_block(block_table, index, free, ref_counts, keys.clone(), values.clone(), block_size)
    source, target = (slice(block * block_size, (block + 1) * block_size) for block in (old, block_table[index]))
    for pool in (keys, values):
        pool[target, :, :] = pool[source, :, :].clone()


def _copies_in_a_view_of_blocks(block_table, index, free, ref_counts, keys, values, block_size):
    old = block_table[index]
    own_block(block_table, index, free, ref_counts, keys.clone(), values.clone(), block_size)
    for pool in (keys, values):
        blocks = pool.reshape(-1, block_size, *pool.shape[1:])  # a view: the slots are divided, and nothing is joined
        blocks[block_table[index]] = blocks[old]


@pytest.mark.parametrize("answer", [_copies_with_an_index_per_axis, _copies_in_a_view_of_blocks])
def test_a_copy_may_index_every_axis_of_the_slots_or_divide_them_into_blocks(answer):
    assert check_function("l06.own_block", answer).passed


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("release", _releases_a_set, "sorts the blocks (a set does, too)"),
        ("release", _releases_sorted, "sorts the blocks"),
        ("gather_attention", _reads_whole_blocks_and_masks, "reads unwritten slots and masks them"),
        ("find_prefix", _finds_one_token_less, "leaves a block out when exactly one token comes after it"),
        ("find_prefix", _block_zero_is_no_block, "treats block 0 as no block"),
        ("find_prefix", _finds_two_blocks, "never finds more than two blocks"),
        ("find_prefix", _hashes_after_the_first_block, "gives every later block the hash of the first block"),
        ("find_prefix", _blocks_of_four, "takes blocks of 4 tokens"),
        ("find_prefix", _empties_the_index, "takes the blocks it finds out of known"),
        ("own_block", _writes_into_a_temporary_tensor, "or only into a temporary tensor"),
        ("own_block", _views_blocks_of_flat_slots, ""),
        ("own_block", _copies_one_slot_too_many, "copies one slot too many"),
        ("own_block", _takes_the_first_free_block, "takes the new block from the front of the free list"),
        ("own_block", _copies_both_ends, "copies only the first and the last slot"),
    ],
)
def test_answers_that_once_passed_are_caught_and_named(name: str, answer, cause: str):
    result = check_function(f"l06.{name}", answer)
    assert not result.passed
    assert cause in result.counterexample.cause
