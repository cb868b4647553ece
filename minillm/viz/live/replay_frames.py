"""Pack the frames of a replay: they share most of their elements, so each distinct element is stored once.

parts   <svg …>  <rect A/>  <rect B/>  </svg>  <rect C/>
frames  parts 0 to 3                    as [[0, 4]]
        parts 0 and 1, then 4, then 3   as [[0, 2], [4, 1], [3, 1]]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_FRAMES = 240
"""The most frames that are drawn."""
MAX_SECONDS = 5.0
"""After the first pass, no more frames are drawn if that would take longer than this in all."""
STRIDES = (32, 16, 8, 4, 2, 1)
"""First every 32nd frame is drawn, then those halfway between, and so on: they are evenly spaced whenever it ends."""
MAX_BYTES = 500_000
"""Limit for all packed frames: they are sent to the browser at once, so that scrubbing needs no kernel."""
MAX_TEXT = 2_000
"""Limit in characters for the text of a step, if the packed texts of all steps exceed `MAX_BYTES`."""

Runs = list[tuple[int, int]]
"""(first part, number of parts) of each run of neighbours."""


@dataclass(frozen=True)
class Packed:
    """Texts as runs of `parts`."""

    parts: list[str]
    frames: list[Runs]

    @property
    def num_bytes(self) -> int:
        """The approximate size as JSON."""
        return sum(len(part.encode()) + 3 for part in self.parts) + sum(8 * len(runs) for runs in self.frames)


def pack(texts: Sequence[str]) -> Packed:
    """Split `texts` between tags and after line ends, and store every distinct part once."""
    numbers: dict[str, int] = {}
    frames = []
    for text in texts:
        runs: Runs = []
        for part in re.split(r"(?<=>)(?=<)|(?<=\n)", text):
            number = numbers.setdefault(part, len(numbers))
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        frames.append(runs)
    return Packed(list(numbers), frames)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` (2 or more) of `steps`, evenly spaced, including the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
