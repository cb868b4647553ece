"""Lesson 06, planted mistakes, each one edit of the reference, so that a check can name them."""

from __future__ import annotations

from minillm.teaching.exercises._l06_reference import (
    allocate,
    find_prefix,
    gather_attention,
    own_block,
    release,
    slot_mapping,
)
from minillm.teaching.source import wrong_versions

ALLOCATE = wrong_versions(
    allocate,
    {
        "returns None when enough blocks are free, and allocates when too few are": (
            "count > len(free)",
            "count <= len(free)",
        ),
        "always returns None": ("count > len(free)", "True"),
        "takes one block too many": ("range(count)", "range(count + 1)"),
        "takes one block too few": ("range(count)", "range(count - 1)"),
        "gives each block two owners": ("] = 1", "] = 2"),
        "sets the reference count of the first block only": ("in taken:", "in taken[:1]:"),
    },
)

RELEASE = wrong_versions(
    release,
    {
        "never lowers a reference count, so that none reaches 0": ("-= 1", "-= 0"),
        "raises the reference count instead of lowering it": ("-= 1", "+= 1"),
        "sets the reference count to 1 instead of lowering it by 1": ("-= 1", "= 1"),
        "removes two owners from each block": ("-= 1", "-= 2"),
        "frees blocks that still have owners, and not those without": ("== 0", "!= 0"),
        "frees a block when one owner is left, not when none is left": ("== 0", "== 1"),
    },
)

SLOTS = wrong_versions(
    slot_mapping,
    {
        "subtracts the offset from the block's first slot instead of adding it": (
            "+ position %",
            "- position %",
        ),
        "leaves out the block: it returns offsets within a block": (
            "block_table[position // block_size] * block_size + ",
            "",
        ),
        "puts all tokens into block 1: it does not read the block table": (
            "block_table[position // block_size] * block_size",
            "block_size",
        ),
        "adds the index of the logical block instead of the offset within it": (
            "+ position % block_size",
            "+ position // block_size",
        ),
        "adds the whole position instead of the offset within the block": ("+ position % block_size", "+ position"),
        "has an empty range, so that it returns no slots": ("start + num_tokens", "start"),
    },
)

ATTENTION = wrong_versions(
    gather_attention,
    {
        "starts one token before the first, so that the last one is left out": ("block_table, 0,", "block_table, -1,"),
        "inverts the mask: it hides visible keys and shows hidden ones": ("<= positions", "> positions"),
        "has a mask of 0 and 1, which are added to the scores; it must hold True and False": (
            "values[slots], mask)",
            "values[slots], mask.float())",
        ),
        "has a mask without rows: the query positions need a column, [:, None]": (
            "positions[:, None]",
            "positions[None, :]",
        ),
    },
)

PREFIX = wrong_versions(
    find_prefix,
    {
        "looks up the first block only, even if it holds the last token": (
            "range(0, len(token_ids) - block_size, block_size)",
            "range(0, block_size, block_size)",
        ),
    },
)

OWN = wrong_versions(
    own_block,
    {
        "copies a block with one owner, and not a shared one": ("== 1", "!= 1"),
        "does nothing for a block with two owners, and copies a block with one": ("== 1", "== 2"),
        "takes the new block from the front of the free list, not from the end": (
            "[new] = allocate(free, ref_counts, 1)",
            "new = free.pop(0)\n    ref_counts[new] = 1",
        ),
        "leaves out the first slot of the old block": (
            "pool[old * block_size : (old + 1) * block_size]",
            "pool[old * block_size + 1 : (old + 1) * block_size]",
        ),
    },
)
