"""A page per technique, made from the tables of names and the docstrings of the files that implement them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import getmodule
from pathlib import Path

from minillm.book.source_pages import SourcePages
from minillm.cache.layouts import LAYOUTS
from minillm.quantization.schemes import SCHEMES
from minillm.speculative.methods import METHODS

PACKAGE = Path(__file__).resolve().parents[1]
CACHE, WEIGHTS, DRAFTS, REUSE, BESIDE = (
    "Cache layouts",
    "Weight formats",
    "Drafters",
    "Reusing a cache",
    "Beside inference",
)


@dataclass(frozen=True)
class Technique:
    """A technique, and the file that implements it."""

    name: str
    """As in the option that selects it, or the name of the file."""
    shelf: str
    path: str
    """`minillm/cache/kivi.py`."""
    use: str = ""
    """Code that selects it; "" for a library function."""

    @property
    def docstring(self) -> str:
        """The docstring of its file."""
        return ast.get_docstring(ast.parse((PACKAGE.parent / self.path).read_text(encoding="utf-8"))) or ""

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring, as one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())

    @property
    def page(self) -> str:
        """The name of its page: `cache-kivi`."""
        return f"{Path(self.path).parent.name}-{self.name}".replace("_", "-")


DRAFTS_WITH = {
    **dict.fromkeys(("draft_model", "draft_tree", "staged"), "minicoder-draft"),
    **{method: f"my-drafters/minicoder-{method}" for method in ("spire", "long")},
}
"""The option `model` of the methods that need one and have none bundled; `minillm train` writes the last two."""


def techniques() -> list[Technique]:
    """All of them, shelf by shelf, in the order of their tables. Each file is listed once."""
    found: dict[str, Technique] = {}

    def add(technique: Technique) -> None:
        found.setdefault(technique.path, technique)

    for (layout, dtype), kind in LAYOUTS.items():
        config = {} if layout == "paged" else {"kv_cache_config": {"layout": layout}}
        config |= {} if dtype == "auto" else {"kv_cache_dtype": dtype}
        arguments = "".join(f", {key}={value!r}" for key, value in config.items())
        name = layout if dtype == "auto" else f"{layout}_{dtype}"
        add(Technique(name, CACHE, _path(kind), f'LLM("minicoder"{arguments})'))
    for method, scheme in SCHEMES.items():
        use = f"minillm quantize minicoder --scheme {method} --out minicoder-{method}"
        add(Technique(method, WEIGHTS, _path(scheme), use))
    for method, drafter in METHODS.items():
        config = {"method": method, "num_speculative_tokens": 4}
        config |= {"model": DRAFTS_WITH[method]} if method in DRAFTS_WITH else {}
        add(Technique(method, DRAFTS, _path(drafter), f'LLM("minicoder", speculative_config={config!r})'))
    for shelf, folder in ((REUSE, "reuse"), (BESIDE, "beside")):
        for file in sorted((PACKAGE / folder).glob("[a-z]*.py")):
            add(Technique(file.stem, shelf, file.relative_to(PACKAGE.parent).as_posix()))
    return list(found.values())


def write_techniques(folder: Path, source_pages: SourcePages) -> list[Technique]:
    """Write a page for each technique and a page that lists them; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    every = techniques()
    for technique in every:
        (folder / f"{technique.page}.md").write_text(_page(technique, source_pages), encoding="utf-8")
    (folder / "index.md").write_text(_index(every), encoding="utf-8")
    return every


def markdown(docstring: str) -> str:
    """A docstring as markdown: indented parts are code, and outside backquotes no character has a meaning."""
    lines, in_code = [], False
    for line in docstring.splitlines():
        indented = line.startswith("    ")
        if indented and not in_code:
            lines += ["", "```text"]
        if in_code and line.strip() and not indented:
            while lines and not lines[-1]:
                lines.pop()
            lines += ["```", ""]
        in_code = indented or (in_code and not line.strip())
        lines.append(line[4:] if in_code else _escaped(line))
    if in_code:
        lines.append("```")
    return "\n".join(lines)


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    escaped = [part if i % 2 else re.sub(r"([\\*_<>\[\]$#|~])", r"\\\1", part) for i, part in enumerate(parts)]
    return "".join(escaped)


def _path(kind: type) -> str:
    return Path(getmodule(kind).__file__).relative_to(PACKAGE.parent).as_posix()


def _page(technique: Technique, source_pages: SourcePages) -> str:
    language = "bash" if technique.use.startswith("minillm ") else "python"
    use = f"```{language}\n{technique.use}\n```\n\n" if technique.use else ""
    text = source_pages.linked_text(markdown(technique.docstring), depth=1)
    return f"# {technique.name}\n\n{use}{text}\n\nThe code: {source_pages.link(technique.path, depth=1)}\n"


def _index(every: Iterable[Technique]) -> str:
    parts = [
        "# Techniques\n\nEach is one file of the engine or of the laboratory. Its page is the file's own docstring.\n"
    ]
    every = list(every)
    for shelf in dict.fromkeys(technique.shelf for technique in every):
        own = [technique for technique in every if technique.shelf == shelf]
        rows = [f"| [`{t.name}`]({t.page}.md) | {_escaped(t.summary)} |" for t in own]
        parts.append("\n".join([f"## {shelf}\n", "| name | what it is |", "|---|---|", *rows, ""]))
        pages = "\n".join(t.page for t in own)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {shelf}\n\n{pages}\n```\n")
    return "\n".join(parts)
