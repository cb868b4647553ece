"""How a case of lesson 06 uses the learner's `find_prefix` and `own_block`."""

from __future__ import annotations

import torch

from minillm.cache.prefix import hash_block_tokens, root_hash
from minillm.teaching.exercise import Function

TEXT = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34]
"""Three blocks of four tokens."""
LONG_TEXT = [*TEXT, 41, 42, 43, 44, 51]
"""Four blocks of four tokens, and one token after them."""


def full_block_hashes(token_ids: list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    """Return the block hashes of the full blocks of `token_ids`."""
    chain = [root_hash(salt)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        chain.append(hash_block_tokens(chain[-1], token_ids[start : start + block_size]))
    return chain[1:]


def use_find(find: Function, known: dict[str, int], token_ids: list[int], salt: str, block_size: int = 4) -> object:
    """Call `find` with block hashes for the keys of `known`, which describe contents in words.

    If `find` changes its dictionary, `known` is changed in the same way.
    """
    hash_of = {
        "tokens 11 to 14": full_block_hashes(TEXT)[0],
        "tokens 21 to 24 after those": full_block_hashes(TEXT)[1],
        "tokens 31 to 34 after those": full_block_hashes(TEXT)[2],
        "tokens 41 to 44 after those": full_block_hashes(LONG_TEXT)[3],
        "tokens 31 to 34 after tokens 11 to 14": full_block_hashes([*TEXT[:4], *TEXT[8:]])[1],
        "tokens 21 to 24 at the start of a text": full_block_hashes(TEXT[4:])[0],
        "tokens 11 to 14 of alice": full_block_hashes(TEXT, salt="alice")[0],
        "tokens 11 and 12": full_block_hashes(TEXT, 2)[0],
        "tokens 13 and 14 after those": full_block_hashes(TEXT, 2)[1],
    }
    by_hash = {hash_of[words]: block for words, block in known.items()}
    found = find(token_ids, by_hash, block_size, salt)
    words_of = {block_hash: words for words, block_hash in hash_of.items()}
    known.clear()
    known.update({words_of.get(block_hash, "another hash"): block for block_hash, block in by_hash.items()})
    return found


def use_own(own: Function, block_table: list[int], index: int, ref_counts: list[int]) -> dict[str, object]:
    """Call `own` on seven blocks of three slots, of which 6 and 3 are free.

    Both channels of both layers of slot i hold i + 1 in `keys` and 10 · (i + 1) in `values`. The slots are views of
    caches `[layers, slots, channels]`, as in the engine, so that flattening or reshaping them makes a temporary tensor.
    """
    table, counts, free = list(block_table), list(ref_counts), [6, 3]
    keys = torch.arange(1.0, 22.0)[None, :, None].repeat(2, 1, 2).transpose(0, 1)
    values = 10 * keys
    own(table, index, free, counts, keys, values, 3)
    return {
        "block_table": table,
        "ref_counts": counts,
        "free": free,
        "keys": keys.flatten(1).int().tolist(),
        "values": values.flatten(1).int().tolist(),
    }
