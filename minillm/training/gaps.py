"""Filling gaps on held-out code: how often the rest of a line is written exactly, with and without what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.errors import TrainingError
from minillm.llm import LLM
from minillm.sampling_params import SamplingParams

BEFORE, AFTER = 1500, 750
"""Most characters of a file that stand before and after a gap."""
SHORTEST = 4
"""Fewest characters of a gap."""
MOST_TOKENS = 96
"""Most tokens of an answer."""
LONGEST = 64
"""Most characters of a gap."""


@dataclass(frozen=True)
class Gap:
    """A file cut into what comes before the rest of one line, that rest, and what comes after it."""

    prefix: str
    rest: str
    suffix: str


@dataclass(frozen=True)
class Filled:
    """The shares of `gaps` gaps whose rest was written exactly, greedily."""

    gaps: int
    with_suffix: float
    without_suffix: float


def line_gaps(files: Sequence[str], count: int, seed: int = 0) -> list[Gap]:
    """`count` gaps in `files`, each from the inside of a line to its end, the files in turn.

    Raises `TrainingError` if no file has a line that is long enough.
    """
    rng = np.random.default_rng(seed)
    usable = [lines for lines in (_lines(file) for file in files) if lines[1]]
    if not usable:
        raise TrainingError(f"no held-out file has a line of {2 * SHORTEST} characters with text on both sides")
    return [_gap(*usable[number % len(usable)], rng) for number in range(count)]


def fill(llm: LLM, gaps: Sequence[Gap]) -> Filled:
    """Let `llm` write every rest, once knowing what follows and once not. Raises what `LLM.fim_prompt` raises."""
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, stop=["\n"])
    shares = []
    for prompts in ([llm.fim_prompt(gap.prefix, gap.suffix) for gap in gaps], [gap.prefix for gap in gaps]):
        outputs = llm.generate(prompts, params)
        right = [
            output.outputs[0].text.rstrip() == gap.rest.rstrip() for output, gap in zip(outputs, gaps, strict=True)
        ]
        shares.append(sum(right) / len(right))
    return Filled(len(gaps), *shares)


def _lines(file: str) -> tuple[str, list[tuple[int, int]]]:
    """A file, and where the text of each of its lines that may have a gap begins and ends."""
    found, at = [], 0
    for line in file.splitlines(keepends=True):
        begin, end = at + len(line) - len(line.lstrip()), at + len(line.rstrip())
        at += len(line)
        if begin > 0 and end - begin >= 2 * SHORTEST and at < len(file):
            found.append((begin, end))
    return file, found


def _gap(file: str, lines: list[tuple[int, int]], rng: np.random.Generator) -> Gap:
    begin, end = lines[rng.integers(len(lines))]
    cut = int(rng.integers(max(begin + SHORTEST, end - LONGEST), end - SHORTEST + 1))
    return Gap(file[max(0, cut - BEFORE) : cut], file[cut:end], file[end : end + AFTER])
