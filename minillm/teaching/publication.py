"""The repository where the lessons are published, if any: the first cell that installs them on Colab, and the badges.

`[tool.minillm]` in pyproject.toml names a `repository` and the `tag` that notebooks install from and badges point at.
Both are empty until the lessons are published. Until then there are no badges, and on Colab the first cell says what to
do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; jupytext brings it there
    import tomli as tomllib

from minillm.errors import LessonError

FIRST_CELL = """\
# The same first cell in every lesson: on Colab install minillm, then see what this machine can do.
import sys
from importlib.util import find_spec

if "google.colab" in sys.modules and not find_spec("minillm"):
{install}

from minillm import doctor

doctor()"""
FROM_REPOSITORY = """\
    %pip install --quiet "minillm-lessons @ git+{repository}@{tag}\""""
FROM_WHEEL = """\
    print("If this fails: upload dist/minillm_lessons-*.whl, which `make dist` writes, and run this cell again.")
    %pip install --quiet minillm_lessons-*.whl"""
_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")


@dataclass(frozen=True)
class Home:
    """A published repository, or nothing."""

    repository: str = ""
    """`https://github.com/owner/name`, or another address that git can clone."""
    tag: str = ""
    """A tag, so that a notebook opened next year installs the code it was made with."""

    def __post_init__(self) -> None:
        if bool(self.repository) != bool(self.tag):
            raise LessonError(
                f"[tool.minillm] has repository = {self.repository!r} and tag = {self.tag!r}; set both, or neither"
            )
        if self.repository and not re.fullmatch(r"https://[^\s\"'@]+", self.repository):
            raise LessonError(f"[tool.minillm] repository = {self.repository!r} must be an address https://…")
        if not re.fullmatch(r"[\w./-]*", self.tag):
            raise LessonError(f"[tool.minillm] tag = {self.tag!r} must be letters, digits, '.', '-', '_' and '/'")

    @property
    def first_cell(self) -> str:
        """The generated first code cell. On Colab it installs minillm if it is not installed yet."""
        install = FROM_REPOSITORY.format(repository=self.repository, tag=self.tag) if self.repository else FROM_WHEEL
        return FIRST_CELL.format(install=install)

    def badges(self, lesson: str, binder: bool) -> str:
        """Markdown of the badges of a lesson (`"02_kv_cache"`): Colab, and with `binder` also Binder.

        Both open notebooks from GitHub only; for another host, or without a repository, the result is "".
        """
        found = _GITHUB.fullmatch(self.repository)
        if not found:
            return ""
        place, notebook = f"{found[1]}/blob/{self.tag}", f"lessons/{lesson}.ipynb"
        colab = "https://colab.research.google.com"
        made = [f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/github/{place}/{notebook})"]
        if binder:
            address = (
                f"https://mybinder.org/v2/gh/{found[1]}/{quote(self.tag, safe='')}?labpath={quote(notebook, safe='')}"
            )
            made.append(f"[![Open in Binder](https://mybinder.org/badge_logo.svg)]({address})")
        return " ".join(made)


def read_home(root: Path) -> Home:
    """The published repository that the clone `root` names in its pyproject.toml; an empty `Home` without such a table.

    Raises:
        LessonError: the table has an unknown key or a bad value.
    """
    file = root / "pyproject.toml"
    if not file.exists():
        return Home()
    table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("minillm", {})
    unknown = sorted(set(table) - {"repository", "tag"})
    if unknown:
        raise LessonError(f"[tool.minillm] has the unknown key {unknown[0]!r}; it may have: repository, tag")
    return Home(**table)
