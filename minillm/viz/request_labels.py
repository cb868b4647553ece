"""Short names of requests by their prompts, told apart where prompts begin alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from minillm.viz.glyphs import ELLIPSIS

BEGINNING = 16
"""Characters of a prompt that a picture shows at least: prompts that differ further on need another name."""


def told_apart(prompts: Sequence[str]) -> list[str]:
    """A name for each prompt: itself, or from where it differs, `…of the others`; equal ones are numbered, `#2 …`."""
    begin = Counter(prompt[:BEGINNING] for prompt in prompts)
    names = []
    for number, prompt in enumerate(prompts):
        alike = {other for other in prompts if other[:BEGINNING] == prompt[:BEGINNING]}
        if begin[prompt[:BEGINNING]] == 1:
            names.append(prompt)
            continue
        columns = zip(*alike, strict=False)  # as far as the shortest goes
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) if len(alike) > 1 else 0
        rest = ELLIPSIS + prompt[shared:].lstrip() if shared else prompt
        copies = prompts[:number].count(prompt)
        names.append(f"#{copies + 1} {rest}" if prompts.count(prompt) > 1 else rest)
    return names
