"""How a case of lesson 06 uses the learner's `find_prefix` and `own_block`."""

from __future__ import annotations

import torch

from minillm.cache.prefix import hash_block_tokens, root_hash
from minillm.teaching.exercise import Function

TEXT = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34]
"""Three blocks of four tokens."""


def full_block_hashes(token_ids: list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    """Return the block hashes of the full blocks of `token_ids`."""
    chain = [root_hash(salt)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        chain.append(hash_block_tokens(chain[-1], token_ids[start : start + block_size]))
    return chain[1:]


def use_find(find: Function, known: dict[str, int], token_ids: list[int], salt: str) -> object:
    """Call `find` with block hashes for the keys of `known`, which describe contents in words."""
    hash_of = {
        "tokens 11 to 14": full_block_hashes(TEXT)[0],
        "tokens 21 to 24 after those": full_block_hashes(TEXT)[1],
        "tokens 31 to 34 after those": full_block_hashes(TEXT)[2],
        "tokens 21 to 24 at the start of a text": full_block_hashes(TEXT[4:])[0],
        "tokens 11 to 14 of alice": full_block_hashes(TEXT, salt="alice")[0],
    }
    found = find(token_ids, {hash_of[words]: block for words, block in known.items()}, 4, salt)
    return found


def use_own(own: Function, block_table: list[int], index: int, ref_counts: list[int]) -> dict[str, object]:
    """Call `own` on six blocks of two slots: slot i has the key i + 1, the value 10 · (i + 1). Block 3 is free."""
    table, counts, free = list(block_table), list(ref_counts), [3]
    keys = torch.arange(1.0, 13.0)
    values = 10 * keys
    own(table, index, free, counts, keys, values, 2)
    return {
        "block_table": table,
        "ref_counts": counts,
        "free": free,
        "keys": [int(x) for x in keys],
        "values": [int(x) for x in values],
    }
