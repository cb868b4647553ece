"""Hashes of block contents, so that equal prefixes can be found (vLLM's automatic prefix caching).

    hash of block i = H(hash of block i - 1, tokens of block i),    hash of block -1 = H(salt)

A hash covers everything from the first token on, because keys and values depend on all tokens before them. Two
requests whose blocks have equal hashes may read the same block. The salt keeps tenants apart: without it, the time to
the first token would reveal whether another tenant has sent the same prompt before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root_hash(salt: str = "") -> bytes:
    """The parent of the first block of every request with this salt. 32 bytes."""
    return sha256(b"minillm prefix " + salt.encode("utf-8", "surrogatepass")).digest()


def hash_block_tokens(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that holds `token_ids` and follows the block with hash `parent`. 32 bytes."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Append the hashes of those full blocks of `token_ids` that `hashes` does not have yet; returns `hashes`."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root_hash(salt)
        hashes.append(hash_block_tokens(parent, token_ids[start : start + block_size]))
    return hashes
