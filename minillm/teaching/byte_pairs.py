"""Byte-pair encoding in a few lines, as lesson 1 shows it: the pair that was learned first is merged first."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise

from minillm.tokenizer import Tokenizer


class BytePairs:
    """The merges of a vocabulary, in the order in which they were learned (BPE, Sennrich et al. 2016)."""

    def __init__(self, merges: Sequence[Sequence[str]]) -> None:
        self.ranks = {tuple(pair): number for number, pair in enumerate(merges)}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> BytePairs:
        """The merges of a byte-level BPE tokenizer."""
        return cls(json.loads(tokenizer.backend.to_str())["model"]["merges"])

    def steps(self, word: str) -> list[list[str]]:
        """The parts of `word` after each merge, from single characters to its tokens.

        `word` is spelled in the vocabulary's alphabet, where a space is Ġ.
        """
        steps = [list(word)]
        while (pair := self._learned_first(steps[-1])) is not None:
            steps.append(_merged(steps[-1], pair))
        return steps

    def _learned_first(self, parts: list[str]) -> tuple[str, str] | None:
        pair = min(pairwise(parts), key=lambda p: self.ranks.get(p, math.inf), default=None)
        return pair if pair in self.ranks else None


def num_same_splits(tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """How many of `texts` get the same tokens from `BytePairs.steps` as from the tokenizer."""
    pairs = BytePairs.from_tokenizer(tokenizer)
    same = 0
    for text in texts:
        words = [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]
        same += [part for word in words for part in pairs.steps(word)[-1]] == tokenizer.backend.encode(text).tokens
    return same


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Every occurrence of `pair` joined, from left to right."""
    merged: list[str] = []
    i = 0
    while i < len(parts):
        fits = tuple(parts[i : i + 2]) == pair
        merged.append("".join(pair) if fits else parts[i])
        i += 2 if fits else 1
    return merged
