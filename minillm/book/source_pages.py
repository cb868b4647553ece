"""Pages that show files of the package, and links to them from other pages."""

from __future__ import annotations

import re
from pathlib import Path

_CODE = re.compile(r"`(minillm/[\w./-]+)`")


class SourcePages:
    """The pages of source files. A page is written when it is first linked to."""

    def __init__(self, root: Path, pages: Path) -> None:
        self.root, self.pages = root, pages
        self.linked: set[str] = set()

    def link(self, path: str, depth: int) -> str:
        """A link to the page of the file `path` (`minillm/batch.py`), from a page `depth` folders deep."""
        self._write(path)
        return f"[`{path}`]({'../' * depth}source/{_page(path)}.md)"

    def linked_text(self, text: str, depth: int) -> str:
        """`text` with every file of the package that stands in backquotes as a link to its page."""
        return _CODE.sub(lambda m: self.link(m[1], depth) if self._is_file(m[1]) else m[0], text)

    def write_index(self) -> None:
        """Write the list of all pages of source files. Call it last."""
        rows = [f"{_page(path)}" for path in sorted(self.linked)]
        listing = "\n".join(rows)
        text = f"# Source files\n\n```{{toctree}}\n:maxdepth: 1\n\n{listing}\n```\n"
        (self.pages / "source").mkdir(exist_ok=True)
        (self.pages / "source" / "index.md").write_text(text, encoding="utf-8")

    def _is_file(self, path: str) -> bool:
        return path.endswith(".py") and (self.root / path).is_file()

    def _write(self, path: str) -> None:
        if path in self.linked:
            return
        self.linked.add(path)
        folder = self.pages / "source"
        folder.mkdir(exist_ok=True)
        code = (self.root / path).read_text(encoding="utf-8")
        fence = "`" * (2 + max((len(run) for run in re.findall(r"`+", code)), default=1))
        text = f"# {path}\n\n{fence}{{code-block}} python\n:linenos:\n\n{code.rstrip()}\n{fence}\n"
        (folder / f"{_page(path)}.md").write_text(text, encoding="utf-8")


def _page(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
