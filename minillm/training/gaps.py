"""Fill-in-the-middle accuracy on held-out code: exact matches of the rest of a line, with and without the suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.errors import TrainingError
from minillm.llm import LLM
from minillm.sampling.params import SamplingParams
from minillm.training.slice_prompts import lines_of

BEFORE, AFTER = 1500, 750
"""Maximum characters of the prefix and of the suffix."""
SHORTEST = 4
"""Minimum characters of a gap."""
MOST_TOKENS = 96
"""Maximum tokens of a completion."""
LONGEST = 64
"""Maximum characters of a gap."""


@dataclass(frozen=True)
class Gap:
    """A file cut into three parts: a prefix that ends inside a line, the rest of that line, and the suffix."""

    prefix: str
    rest: str
    suffix: str


@dataclass(frozen=True)
class Filled:
    """The shares of `gaps` gaps whose greedy completion matches the rest of the line exactly."""

    gaps: int
    with_suffix: float
    without_suffix: float


def line_gaps(files: Sequence[str], count: int, before: int = BEFORE, after: int = AFTER) -> list[Gap]:
    """`count` gaps, each from inside a line to its end, from `files` in turn, with at most `before` characters in front
    and `after` behind.

    Raises `TrainingError` if no file has a line that is long enough.
    """
    rng = np.random.default_rng(0)
    usable = [lines for lines in (_lines(file) for file in files) if lines[1]]
    if not usable:
        raise TrainingError(f"no held-out file has a line of {2 * SHORTEST} characters with text on both sides")
    return [_gap(*usable[number % len(usable)], before, after, rng) for number in range(count)]


def fill(llm: LLM, gaps: Sequence[Gap]) -> Filled:
    """Complete every gap with `llm`, with and without the suffix. Raises the errors of `LLM.fim_prompt`."""
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, stop=["\n"])
    shares = []
    for prompts in ([llm.fim_prompt(gap.prefix, gap.suffix) for gap in gaps], [gap.prefix for gap in gaps]):
        outputs = llm.generate(prompts, params)
        matches = [
            output.outputs[0].text.rstrip() == gap.rest.rstrip() for output, gap in zip(outputs, gaps, strict=True)
        ]
        shares.append(sum(matches) / len(matches))
    return Filled(len(gaps), *shares)


def _lines(file: str) -> tuple[str, list[tuple[int, int]]]:
    """The file, and for each line that may have a gap the start and end of its text."""
    found, at = [], 0
    for line in lines_of(file):
        begin, end = at + len(line) - len(line.lstrip()), at + len(line.rstrip())
        at += len(line)
        if begin > 0 and end - begin >= 2 * SHORTEST and at < len(file):
            found.append((begin, end))
    return file, found


def _gap(file: str, lines: list[tuple[int, int]], before: int, after: int, rng: np.random.Generator) -> Gap:
    begin, end = lines[rng.integers(len(lines))]
    cut = int(rng.integers(max(begin + SHORTEST, end - LONGEST), end - SHORTEST + 1))
    return Gap(file[max(0, cut - before) : cut], file[cut:end], file[end : end + after])
