"""The held-out prompts that ship with minillm."""

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
