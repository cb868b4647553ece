"""The held-out prompts that ship with minillm, and which of them are for what.

Whatever is fitted to text (quantisation, sparse attention, codebooks) is fitted on `calibration_prompts` and judged on
`evaluation_prompts`. No source file is in both. Benchmarks of speed, which fit nothing, may use all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import ConfigError


@dataclass(frozen=True)
class HeldOutPrompt:
    """A piece of a source file that the bundled models were not trained on."""

    source: str
    """The file, as `package/path`."""
    prompt: str


def held_out_prompts(count: int | None = None) -> list[HeldOutPrompt]:
    """The first `count` prompts (all 128 by default), of 4 to 256 tokens in mixed order."""
    path = Path(__file__).with_name("held_out_prompts.jsonl")
    rows = [HeldOutPrompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if count is not None and not 1 <= count <= len(rows):
        raise ConfigError(f"{count} held-out prompts were asked for; there are 1 to {len(rows)}")
    return rows[:count]


def calibration_prompts() -> list[HeldOutPrompt]:
    """The 69 prompts that may be fitted to: those of every other source file, in order of first appearance."""
    return _of_files(0)


def evaluation_prompts() -> list[HeldOutPrompt]:
    """The 59 prompts that quality is measured on: those of the other source files."""
    return _of_files(1)


def _of_files(first: int) -> list[HeldOutPrompt]:
    prompts = held_out_prompts()
    chosen = set(list(dict.fromkeys(prompt.source for prompt in prompts))[first::2])
    return [prompt for prompt in prompts if prompt.source in chosen]
