"""The glossary as a page, and the anchors that lessons link to: `[panel](glossary.md#panel)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; jupytext, which builds the lessons, brings it there
    import tomli as tomllib

SOURCE = Path(__file__).with_name("glossary.toml")
FILE = "glossary.md"
HEAD = """\
<!-- Made from minillm/teaching/glossary.toml by `minillm build`. -->
# Glossary

The words of the field as the lessons and the engine use them, and the lesson, if any, in which each is built or first
seen.
"""


@dataclass(frozen=True)
class Term:
    """One entry."""

    name: str
    """The term as it is written in running text."""
    meaning: str
    """One or two sentences."""
    lesson: int | None = None
    """The lesson that builds it, or that shows it first if none builds it; None if no lesson does either."""

    @property
    def anchor(self) -> str:
        """The anchor that GitHub makes of its heading: lower case, spaces as hyphens, no other punctuation."""
        return re.sub(r"[^\w -]", "", self.name.lower()).replace(" ", "-")


@lru_cache(maxsize=1)
def terms() -> tuple[Term, ...]:
    """All entries in alphabetical order."""
    table = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return tuple(Term(name, **entry) for name, entry in sorted(table.items(), key=lambda pair: pair[0].lower()))


def page(lessons: Mapping[int, str]) -> str:
    """The page in markdown. `lessons` gives the file name of each lesson by its number."""
    return "\n".join([HEAD, *(_entry(term, lessons) for term in terms())])


def _entry(term: Term, lessons: Mapping[int, str]) -> str:
    # JupyterLab keeps capital letters in the anchors that it generates, so each entry has an explicit one.
    where = f" ([lesson {term.lesson}]({lessons[term.lesson]}))" if term.lesson in lessons else ""
    return f'### <a id="{term.anchor}"></a>{term.name}\n\n{term.meaning}{where}\n'
