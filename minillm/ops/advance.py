"""Advance every request by one drafted token without the host: compute the slot of its next token.

The next token of a request with n cached tokens has position n and slot `table[n // block_size] · block_size + n %
block_size`; afterwards n + 1 tokens are cached. So the positions of the next step are the lengths before it.
"""

from __future__ import annotations

from torch import Tensor


def advance(seq_lens: Tensor, block_tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return each request's next slot and its length including that token: two tensors `[requests]`.

    `seq_lens`: `[requests]`, cached tokens; `block_tables`: `[requests, blocks]`, with room for one more token. Both
    have the same integer dtype, and so have the results. A request of length 0 is padding: it gets slot -1 and stays
    at length 0.
    """
    live = seq_lens > 0
    blocks = block_tables.gather(1, (seq_lens // block_size).long().unsqueeze(1)).squeeze(1)
    slots = blocks * block_size + seq_lens % block_size
    return slots.masked_fill(~live, -1), seq_lens + live
