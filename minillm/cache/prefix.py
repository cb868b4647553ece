"""Names for the contents of blocks, so that equal prefixes can be found (vLLM's automatic prefix caching).

    name of block i = H(name of block i - 1, tokens of block i),    name of block -1 = H(salt)

A name stands for everything from the first token on, because keys and values depend on all tokens before them. Two
requests with equal names for a block may read the same one. The salt keeps tenants apart: without it, how quickly a
prompt is answered would tell whether someone else has sent it before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root_name(salt: str = "") -> bytes:
    """What stands before the first block of every request with this salt."""
    return sha256(b"minillm prefix " + salt.encode("utf-8", "surrogatepass")).digest()


def block_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block that holds `token_ids` and follows the block named `parent`. 32 bytes."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_names(names: list[bytes], token_ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Append the names of the full blocks of `token_ids` that `names` does not have yet; returns `names`."""
    for start in range(len(names) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = names[-1] if names else root_name(salt)
        names.append(block_name(parent, token_ids[start : start + block_size]))
    return names
