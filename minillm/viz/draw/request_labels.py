"""Short names of requests from their prompts; prompts with the same beginning get different names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile

from minillm.viz.draw.glyphs import ELLIPSIS, one_line

BEGINNING = 16
"""A picture shows at least so many characters of a prompt: prompts that differ only later need other names."""
LONGEST = 200
"""Characters of a prompt that are read for a name; no picture has room for as many."""


def distinct_names(prompts: Sequence[str]) -> list[str]:
    """A name on one line for each prompt: its beginning, or what follows the beginning that it shares with others
    (`…rest`); equal ones get `#2 …`."""
    alike: dict[str, set[str]] = defaultdict(set)
    for prompt in prompts:
        alike[_beginning(prompt)].add(prompt)
    shared = {start: _num_shared(group) if len(group) > 1 else 0 for start, group in alike.items()}
    names = []
    for prompt in prompts:
        first = shared[_beginning(prompt)]
        rest = one_line(prompt[first : first + LONGEST])
        names.append(ELLIPSIS + rest if first and rest else one_line(prompt[:LONGEST]))
    return [f"#{names[:i].count(name) + 1} {name}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _num_shared(prompts: Collection[str]) -> int:
    """How many characters all of them begin with: the first and the last in order differ the soonest."""
    pairs = zip(min(prompts), max(prompts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _beginning(prompt: str) -> str:
    return one_line(prompt[:LONGEST])[:BEGINNING]
