"""Lesson 06, the references: the allocator, slots, attention through a table, shared prefixes, copy on write."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.prefix import hash_block_tokens, root_hash


def allocate(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    """Take `count` blocks from the end of `free`, each with one owner. None, and no change, if too few are free."""
    if count > len(free):
        return None
    taken = [free.pop() for _ in range(count)]
    for block in taken:
        ref_counts[block] = 1
    return taken


def release(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    """Remove one owner from each block, in order; append a block without owners to `free`."""
    for block in block_ids:
        ref_counts[block] -= 1
        if ref_counts[block] == 0:
            free.append(block)


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """Return the slots of tokens `start … start + num_tokens - 1`: block id · block size + offset in the block."""
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, start + num_tokens)
    ]


def gather_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    """Causal attention of a request's newest tokens over all its tokens, which are read through the block table.

    `q`: `[num_new, num_heads, head_dim]`, the last `num_new` of `seq_len` tokens; `keys`, `values`:
    `[num_slots, num_kv_heads, head_dim]`, of all requests. Returns `[num_new, num_heads, head_dim]`.
    """
    slots = torch.tensor(slot_mapping(block_table, 0, seq_len, block_size))
    positions = torch.arange(seq_len - len(q), seq_len)
    mask = torch.arange(seq_len)[None, :] <= positions[:, None]
    return attention(q, keys[slots], values[slots], mask)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·k/√d)·v with GQA. q, k, v: `[tokens, heads, head_dim]`; mask: `[queries, keys]`, True: visible."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def find_prefix(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    """Return the blocks that already hold the beginning of `token_ids`, in order; never one with the last token in it.

    `known`: block hash → block id. The hash of a full block is `hash_block_tokens(hash of the block before, its
    tokens)`; before the first block it is `root_hash(salt)`. So it covers the block's tokens and all before them.
    """
    found = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = hash_block_tokens(parent, token_ids[start : start + block_size])
        if parent not in known:
            break
        found.append(known[parent])
    return found


def own_block(
    block_table: list[int],
    index: int,
    free: list[int],
    ref_counts: list[int],
    keys: Tensor,
    values: Tensor,
    block_size: int,
) -> None:
    """Copy on write: make the request the only owner of entry `index` of its block table, before it writes there.

    `keys`, `values`: `[num_slots, ...]`. A block with one owner stays as it is. Otherwise a free block gets a copy of
    the contents and replaces the old block in the table, and the old block loses one owner.
    """
    old = block_table[index]
    if ref_counts[old] == 1:
        return
    [new] = allocate(free, ref_counts, 1)
    for pool in (keys, values):
        pool[new * block_size : (new + 1) * block_size] = pool[old * block_size : (old + 1) * block_size]
    block_table[index] = new
    release(free, ref_counts, [old])
