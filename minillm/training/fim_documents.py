"""Training documents for fill in the middle: some files are cut into pieces, each with a gap.

Such a file is cut into pieces, so that both sides of a gap can be in one training row: each piece ends at the first
line end after 200 to 2,500 characters, the last one with the file. Some of the gaps end at the end of their line or a
few lines later, as in an editor; the others lie between two random characters. Half have the prefix first, half the
suffix (Bavarian et al. 2022, section 3). The text is cut before it is tokenised, so the tokens at the cuts are the same
as in a prompt.

Pretraining has both kinds of gaps in equal parts. Three of four of its rows are too short for most pieces, so the later
stages, whose rows are longer, have more gaps, and those of an editor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minillm.fill_in_the_middle import prefix_first, suffix_first
from minillm.training.train_tokenizer import END_OF_TEXT

SUFFIX_FIRST_RATE = 0.5
"""Share of the gaps whose suffix comes first."""
PIECE_CHARACTERS = (200, 2500)
"""Fewest and most characters after which a piece ends at the next line end; the distribution is log-uniform."""


@dataclass(frozen=True)
class GapShares:
    """How much of the text has gaps, and which."""

    files: float = 0.5
    """Share of the files that get gaps."""
    lines: float = 0.5
    """Share of the gaps that end with a line."""


PRETRAINING = GapShares()
LATER = GapShares(files=0.6, lines=0.9)
"""Of the decay and of the stage after it."""


def training_document(text: str, rng: np.random.Generator, shares: GapShares = PRETRAINING) -> list[str]:
    """`text` as a training document: whole, or in pieces with gaps. End of text follows each.

    The strings of the list are tokenised one by one, so that no token reaches across the start of a gap.
    """
    if rng.random() >= shares.files:
        return [text + END_OF_TEXT]
    return [part for piece in pieces(text, rng) for part in with_gap(piece, rng, shares.lines)]


def pieces(text: str, rng: np.random.Generator) -> Iterator[str]:
    """Cut `text` at line ends into pieces of random length."""
    low, high = np.log(PIECE_CHARACTERS)
    at = 0
    while at < len(text):
        end = text.find("\n", at + int(np.exp(rng.uniform(low, high)))) + 1
        end = end or len(text)
        yield text[at:end]
        at = end


def with_gap(piece: str, rng: np.random.Generator, lines: float = PRETRAINING.lines) -> tuple[str, str]:
    """`piece` with a random gap: the prompt, and the text of the gap with end of text. `lines`: see `GapShares`."""
    if rng.random() < lines:
        begin = int(rng.integers(len(piece) + 1))
        end = begin
        for _ in range(int(rng.geometric(0.6))):
            end = piece.find("\n", end) + 1 or len(piece)
        end -= piece[begin:end].endswith("\n")
    else:
        begin, end = sorted(int(i) for i in rng.integers(len(piece) + 1, size=2))
    order = suffix_first if rng.random() < SUFFIX_FIRST_RATE else prefix_first
    return order(piece[:begin], piece[end:]), piece[begin:end] + END_OF_TEXT
