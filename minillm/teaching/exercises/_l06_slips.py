"""Lesson 06, slips in one place of the right answer, planted so that a check can name them."""

from __future__ import annotations

from minillm.teaching.exercises._l06_reference import (
    allocate,
    find_prefix,
    gather_attention,
    own_block,
    release,
    slot_mapping,
)
from minillm.teaching.source import slips

ALLOCATE = slips(
    allocate,
    {
        "refuses when there are enough blocks, and goes on when there are not": (
            "count > len(free)",
            "count <= len(free)",
        ),
        "refuses always": ("count > len(free)", "True"),
        "takes one block too many": ("range(count)", "range(count + 1)"),
        "takes one block too few": ("range(count)", "range(count - 1)"),
        "gives each block two owners": ("] = 1", "] = 2"),
        "gives an owner only to the first block that it takes": ("in taken:", "in taken[:1]:"),
    },
)

RELEASE = slips(
    release,
    {
        "never lowers a reference count, so that none comes to 0": ("-= 1", "-= 0"),
        "raises the reference count instead of lowering it": ("-= 1", "+= 1"),
        "sets the reference count to 1 instead of lowering it by 1": ("-= 1", "= 1"),
        "takes two owners from each block": ("-= 1", "-= 2"),
        "frees the blocks that still have owners, and keeps those that have none": ("== 0", "!= 0"),
        "frees a block when one owner is left, and not when none is": ("== 0", "== 1"),
    },
)

SLOTS = slips(
    slot_mapping,
    {
        "takes the place within the block off the block's first slot instead of adding it": (
            "+ position %",
            "- position %",
        ),
        "leaves out the block: it returns places within a block": (
            "block_table[position // block_size] * block_size + ",
            "",
        ),
        "puts all tokens into block 1: it does not look the block up in the table": (
            "block_table[position // block_size] * block_size",
            "block_size",
        ),
        "adds the number of the logical block instead of the place within it": (
            "+ position % block_size",
            "+ position // block_size",
        ),
        "adds the whole position instead of the place within the block": ("+ position % block_size", "+ position"),
        "has a range that ends where it begins, so that there are no slots": ("start + num_tokens", "start"),
    },
)

ATTENTION = slips(
    gather_attention,
    {
        "begins one token before the first, and so leaves the last one out": ("block_table, 0,", "block_table, -1,"),
        "hides what a token may see, and shows what it may not": ("<= positions", "> positions"),
        "has a mask without rows: the positions of the queries must run down, [:, None]": (
            "positions[:, None]",
            "positions[None, :]",
        ),
    },
)

PREFIX = slips(
    find_prefix,
    {
        "looks at the first block only, and at that even if it holds the last token": (
            "range(0, len(token_ids) - block_size, block_size)",
            "range(0, block_size, block_size)",
        ),
    },
)

OWN = slips(
    own_block,
    {
        "copies a block that nobody else owns, and not one that is shared": ("== 1", "!= 1"),
        "does nothing for a block that two own, and copies one that nobody else owns": ("== 1", "== 2"),
        "copies from one slot after the beginning of the old block on": (
            "pool[old * block_size : (old + 1) * block_size]",
            "pool[old * block_size + 1 : (old + 1) * block_size]",
        ),
    },
)
