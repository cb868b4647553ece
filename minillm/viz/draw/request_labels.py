"""Short names of requests from their prompts; prompts with the same beginning get different names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from minillm.viz.draw.glyphs import ELLIPSIS

BEGINNING = 16
"""A picture shows at least so many characters of a prompt: prompts that differ only later need other names."""


def distinct_names(prompts: Sequence[str]) -> list[str]:
    """A name for each prompt: the prompt, or its part after the shared beginning (`…rest`); equal ones get `#2 …`."""
    beginnings = Counter(prompt[:BEGINNING] for prompt in prompts)
    names = []
    for number, prompt in enumerate(prompts):
        alike = {other for other in prompts if other[:BEGINNING] == prompt[:BEGINNING]}
        if beginnings[prompt[:BEGINNING]] == 1:
            names.append(prompt)
            continue
        columns = zip(*alike, strict=False)  # up to the end of the shortest
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) if len(alike) > 1 else 0
        rest = ELLIPSIS + prompt[shared:].lstrip() if shared else prompt
        copies = prompts[:number].count(prompt)
        names.append(f"#{copies + 1} {rest}" if prompts.count(prompt) > 1 else rest)
    return names
