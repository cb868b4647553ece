"""Lesson 06, paged blocks: allocate and release, map tokens to slots, attend through a table, share, copy on write."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.drives.l06 import LONG_TEXT, TEXT, use_find, use_own
from minillm.teaching.exercise import Case, Exercise
from minillm.teaching.exercises import _l06_slips as slips
from minillm.teaching.exercises._l06_mistakes import ALLOCATE, ATTENTION, OWN, PREFIX, RELEASE, SLOTS
from minillm.teaching.exercises._l06_reference import (
    allocate,
    find_prefix,
    gather_attention,
    own_block,
    release,
    slot_mapping,
)
from minillm.teaching.source import body_of

_ALLOCATE = Exercise(
    name="l06.allocate",
    reference=allocate,
    cases=[
        Case("two of three free blocks", ([2, 1, 0], [0, 0, 0], 2)),
        Case("all free blocks", ([4, 3], [1, 1, 2, 0, 0], 2)),
        Case("more than are free", ([1], [1, 0], 2)),
        Case("one of two", ([1, 0], [0, 0], 1)),
        Case("none", ([1, 0], [0, 0], 0)),
    ],
    hints=(
        "First check whether enough blocks are free. Change nothing if not: a partial allocation is worse than none.",
        "Compare count with len(free). Then call free.pop() count times: it removes the last id and returns it. Each "
        "block taken has one owner.",
        "if …: return None. Then taken = [… for _ in range(count)], and for each block of taken set its entry of "
        "ref_counts. What stands for the dots?",
        body_of(allocate),
    ),
    wrong=(*ALLOCATE, *slips.ALLOCATE),
    in_place=("free", "ref_counts"),
)

_RELEASE = Exercise(
    name="l06.release",
    reference=release,
    cases=[
        Case("two blocks with one owner each", ([0], [0, 1, 1], [1, 2])),
        Case("a block that two requests share", ([0], [0, 2, 1], [1, 2])),
        Case("the second owner of a shared block releases it", ([], [1, 1], [0])),
        Case("three blocks that are not in the order of their ids", ([0], [0, 1, 1, 1], [3, 1, 2])),
        Case("blocks in descending order, one of them shared", ([4], [1, 3, 1, 1, 0], [3, 1, 2, 0])),
        Case("nothing to release", ([1], [2, 0], [])),
    ],
    hints=(
        "A block may have several owners. Which of them may return it to the pool?",
        "Decrement the reference count first. If it is now zero, append the block to free.",
        "for block in block_ids: decrement ref_counts[block]; if …: free.append(block). What is the condition?",
        body_of(release),
    ),
    wrong=(*RELEASE, *slips.RELEASE),
    in_place=("free", "ref_counts"),
)

_SLOTS = Exercise(
    name="l06.slot_mapping",
    reference=slot_mapping,
    cases=[
        Case("the first token", ([5], 0, 1, 4)),
        Case("three tokens in the second block", ([5, 2], 4, 3, 4)),
        Case("a prompt over three scattered blocks", ([7, 0, 3], 0, 10, 4)),
        Case("two tokens across the boundary of two blocks", ([1, 9, 4], 7, 2, 4)),
        Case("blocks of three tokens, beginning inside the second", ([6, 1, 8], 4, 5, 3)),
        Case("blocks of one token", ([3, 1, 2], 1, 2, 1)),
    ],
    hints=(
        "A block holds 4 tokens. Which entry of the block table has token 9, and at which offset in the block?",
        "Position p is in logical block p // block_size, at offset p % block_size. The table maps the logical block to "
        "a physical block, and physical block b begins at slot b · block_size.",
        "[block_table[…] * block_size + … for position in range(start, start + num_tokens)]: two expressions are "
        "missing.",
        body_of(slot_mapping),
    ),
    wrong=(*SLOTS, *slips.SLOTS),
)


def _attention_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(6)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    keys, values = random(2, 16, 1, 2)
    written = torch.zeros(16, dtype=torch.bool)
    written[[4, 5, 12, 13, 14, 15]] = True  # six tokens in the blocks 3 and 1
    unwritten = ~written[:, None, None]
    two_heads = random(2, 16, 2, 2)
    holes = [x.masked_fill(unwritten, float("nan")) for x in (keys, values)]
    return [
        Case("one new token, two scattered blocks", (random(1, 1, 2), keys, values, [3, 1], 6, 4)),
        Case("a prompt of three tokens", (random(3, 1, 2), keys, values, [2], 3, 4)),
        Case("two new tokens after five", (random(2, 1, 2), keys, values, [1, 0], 7, 4)),
        Case("two query heads share one KV head", (random(1, 2, 2), keys, values, [2, 3], 7, 4)),
        Case("unwritten slots hold NaN", (random(2, 1, 2), *holes, [3, 1], 6, 4)),
        Case(
            "four query heads, two KV heads: the first two read the first",
            (random(2, 4, 2), *two_heads, [1, 3], 6, 4),
        ),
    ]


_ATTENTION = Exercise(
    name="l06.gather_attention",
    reference=gather_attention,
    cases=_attention_cases,
    hints=(
        "Gather the request's keys and values in the order of its text; the rest is the attention of lesson 2.",
        "slots = your slot mapping of tokens 0 … seq_len - 1; keys[slots] are the keys in order. The new tokens are "
        "the last len(q) of them, so the mask needs lesson 2's offset.",
        "slots = torch.tensor(slot_mapping(…)). New token i has position seq_len - len(q) + i and may see key j "
        "if j <= that position: mask is [num_new, seq_len]. Then attention(q, keys[slots], values[slots], mask).",
        "The whole of it (if you have skipped slot_mapping, call my_slots instead):" + body_of(gather_attention),
    ),
    wrong=(*ATTENTION, *slips.ATTENTION),
)


_FIRST, _SECOND, _THIRD = "tokens 11 to 14", "tokens 21 to 24 after those", "tokens 31 to 34 after those"
_FOUR = {_FIRST: 7, _SECOND: 2, _THIRD: 5, "tokens 41 to 44 after those": 9}
_OF_TWO = {"tokens 11 and 12": 3, "tokens 13 and 14 after those": 8}

_PREFIX = Exercise(
    name="l06.find_prefix",
    reference=find_prefix,
    cases=[
        Case("no block known", ({}, TEXT, "")),
        Case("the first block known", ({_FIRST: 7}, TEXT, "")),
        Case("two blocks known, a third that is not full", ({_FIRST: 7, _SECOND: 2}, [*TEXT[:8], 31, 32], "")),
        Case("two blocks known, and one token after them", ({_FIRST: 7, _SECOND: 2}, [*TEXT[:8], 31], "")),
        Case("one block known, and one token after it", ({_FIRST: 7}, [*TEXT[:4], 21], "")),
        Case("the first block is block 0 of the pool", ({_FIRST: 0, _SECOND: 5}, TEXT, "")),
        Case("a text shorter than a block", ({_FIRST: 7}, TEXT[:3], "")),
        Case("a text of exactly one block, which is known", ({_FIRST: 7}, TEXT[:4], "")),
        Case(
            "all blocks known: the last token must still be computed",
            ({_FIRST: 7, _SECOND: 2, _THIRD: 5}, TEXT, ""),
        ),
        Case("four blocks known, and one token after them", (_FOUR, LONG_TEXT, "")),
        Case(
            "the third block is known only as the block after the first",
            ({_FIRST: 7, _SECOND: 2, "tokens 31 to 34 after tokens 11 to 14": 4}, LONG_TEXT, ""),
        ),
        Case("blocks of two tokens", (_OF_TWO, TEXT[:5], "", 2)),
        Case(
            "a block with the same tokens after another prefix",
            ({_FIRST: 7, "tokens 21 to 24 at the start of a text": 4}, TEXT, ""),
        ),
        Case("a gap: the first block unknown, the second known", ({_SECOND: 2}, [*TEXT, 9], "")),
        Case("bob must not find a block without his salt", ({_FIRST: 7}, TEXT, "bob")),
        Case("alice finds her own block", ({"tokens 11 to 14 of alice": 3}, TEXT, "alice")),
    ],
    hints=(
        "Keys and values of a token depend on every token before it. What must be equal for two blocks to be equal?",
        "Start with parent = root_hash(salt). For each full block: parent = hash_block_tokens(parent, its tokens); "
        "stop at the first hash that is not in known. Leave out a block that would contain the last token.",
        "for start in range(0, …, block_size): parent = hash_block_tokens(parent, …); break if it is not known; else "
        "append known[parent]. The range must end before the block with the last token.",
        body_of(find_prefix),
    ),
    wrong=(*PREFIX, *slips.PREFIX),
    run_case=use_find,
)


_OWN = Exercise(
    name="l06.own_block",
    reference=own_block,
    cases=[
        Case("the block has one owner: nothing to do", ([0], 0, [1, 0, 0, 0, 1, 1, 0])),
        Case("the last block is shared by two", ([0, 1], 1, [2, 2, 0, 0, 1, 1, 0])),
        Case("the first block is shared by three", ([0, 1], 0, [3, 1, 0, 0, 1, 1, 0])),
        Case("the second entry has one owner, the first is shared", ([1, 2], 1, [0, 2, 1, 0, 1, 1, 0])),
    ],
    hints=(
        "When may a request write into a block directly, and when must it copy the block first?",
        "If ref_counts[old] is 1, return. Otherwise allocate one, copy the old block's slots of keys and of values, "
        "put the new block into the table, release the old one.",
        "old = block_table[index]; return if …; [new] = allocate(free, ref_counts, 1); copy slots … of keys and of "
        "values; block_table[index] = new; release(…). Block b covers slots b · block_size … (b + 1) · block_size - 1.",
        "The whole of it (if you have skipped allocate or release, call my_allocate or my_release instead):"
        + body_of(own_block),
    ),
    wrong=(*OWN, *slips.OWN),
    run_case=use_own,
)

EXERCISES = [_ALLOCATE, _RELEASE, _SLOTS, _ATTENTION, _PREFIX, _OWN]
