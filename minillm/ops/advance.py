"""From one drafted token to the next without the host: where the next token of each request goes.

A request with n tokens in the cache has its next one at position n, in slot `table[n // block_size] · block_size + n %
block_size`; afterwards it has n + 1. So the positions of the next step are the lengths before it.
"""

from __future__ import annotations

from torch import Tensor


def advance(seq_lens: Tensor, block_tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The slot of each request's next token, and its length with that: two tensors `[requests]` of the tables' dtype.

    `seq_lens`: `[requests]`, tokens in the cache; `block_tables`: `[requests, blocks]`, with room for one token more.
    Both are whole numbers of one dtype. A request of length 0 only fills up the batch: it gets slot -1 and stays empty.
    """
    live = seq_lens > 0
    blocks = block_tables.gather(1, (seq_lens // block_size).long().unsqueeze(1)).squeeze(1)
    slots = blocks * block_size + seq_lens % block_size
    return slots.masked_fill(~live, -1), seq_lens + live
