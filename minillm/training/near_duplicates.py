"""Near-duplicates: files that share most of their lines with another file. MinHash over normalised lines (Broder 1997).

Packages copy from each other, so exact comparison misses many pairs. A copy in the training files wastes training time;
a copy of a held-out file makes its loss meaningless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from datasketch import MinHash, MinHashLSH
from tqdm import tqdm

PERMUTATIONS = 128
"""Number of hash functions. The estimate of a similarity J has the standard deviation sqrt(J (1 − J) / 128)."""
SIMILAR, SIMILAR_TO_HELD_OUT = 0.7, 0.5
"""Jaccard similarity of two files' sets of lines at which the later file is dropped."""
CANDIDATES = 0.3
"""The index is asked for pairs from about this similarity on, and those are compared: so it misses fewer than one in a
hundred of similarity 0.5. (Asked for 0.5, it would miss nearly half of those.)"""


def sketch(text: str) -> MinHash:
    """The MinHash of the set of stripped, lower-case lines of `text`. Lines of up to 3 characters are ignored."""
    lines = {line.strip().lower() for line in text.split("\n")}
    shingles = [line.encode() for line in lines if len(line) > 3]
    minhash = MinHash(num_perm=PERMUTATIONS, seed=1)
    minhash.update_batch(shingles)
    return minhash


def without_near_duplicates(texts: Sequence[str], held_out: Sequence[bool]) -> list[int]:
    """Which of `texts` to keep, as indices in order.

    Training files are compared first: of two similar ones the earlier is kept. A held-out file is kept only if it is
    not similar, with the stricter threshold, to any kept training file or earlier held-out file.
    """
    sketches = [sketch(text) for text in tqdm(texts, desc="looking for near-duplicates", unit=" files")]
    order = sorted(range(len(texts)), key=lambda i: (held_out[i], i))
    kept: set[int] = set()
    index = MinHashLSH(threshold=CANDIDATES, num_perm=PERMUTATIONS)
    for i in order:
        limit = SIMILAR_TO_HELD_OUT if held_out[i] else SIMILAR
        if not _has_match(sketches[i], (sketches[j] for j in index.query(sketches[i])), limit):
            index.insert(i, sketches[i])
            kept.add(i)
    return sorted(kept)


def _has_match(one: MinHash, others: Iterable[MinHash], limit: float) -> bool:
    return any(one.jaccard(other) >= limit for other in others)
