"""The held-out prompts that ship with minillm, split into calibration and evaluation prompts.

Everything that is fitted to text (quantisation, sparse attention, codebooks) is fitted on `calibration_prompts` and
evaluated on `evaluation_prompts`. No source file is in both. Speed benchmarks fit nothing and may use all prompts.
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
    """Return the first `count` prompts (by default all 128). They have 4 to 256 tokens and are in mixed order.

    Ten of them are from six files with a near-copy among the training files: `httpcore/_synchronization.py`,
    `mypy/plugins/functools.py`, `torch/_appdirs.py`, and three of transformers (`bert_generation`, `megatron_bert`,
    `siglip`). The card's figures are of other files, none of which is similar to a training file
    (`training.near_duplicates.SIMILAR_TO_HELD_OUT`).
    """
    path = Path(__file__).with_name("held_out_prompts.jsonl")
    rows = [HeldOutPrompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if count is not None and not 1 <= count <= len(rows):
        raise ConfigError(f"count={count} held-out prompts; it must be from 1 to {len(rows)}")
    return rows[:count]


def calibration_prompts() -> list[HeldOutPrompt]:
    """Return the 69 prompts for fitting: those of every second source file, in order of first appearance."""
    return _of_every_second_file(0)


def evaluation_prompts() -> list[HeldOutPrompt]:
    """Return the 59 prompts for measuring quality: those of the remaining source files."""
    return _of_every_second_file(1)


def _of_every_second_file(first: int) -> list[HeldOutPrompt]:
    prompts = held_out_prompts()
    chosen = set(list(dict.fromkeys(prompt.source for prompt in prompts))[first::2])
    return [prompt for prompt in prompts if prompt.source in chosen]
