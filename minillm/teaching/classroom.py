"""A repository for a class: unsolved notebooks, requirements, and a workflow in which nbval grades every push.

The workflow runs `MINILLM_STRICT=1 pytest --nbval-lax` on each notebook. Under strict an unsolved exercise is a red
cell, so a push shows which exercises are right. Grades that count come from `minillm grade`, which hides its cases.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from minillm.errors import ConfigError, LessonError
from minillm.teaching import glossary
from minillm.teaching.course import Lesson, choose
from minillm.teaching.publication import Home, read_home
from minillm.version import __version__

WHEEL = f"minillm_lessons-{__version__}-py3-none-any.whl"
CHECK = "pytest --nbval-lax --nbval-cell-timeout=300 -p no:cacheprovider"
"""What the workflow runs on a notebook, with MINILLM_STRICT=1. The time is in seconds."""
CHECK_FILE = ".github/workflows/check.yml"
WORKFLOW = """\
# Every exercise of every notebook is a red or a green cell. A notebook is red until all of its exercises are solved.
name: check
on:
  push:
  pull_request:
  workflow_dispatch:
permissions:
  contents: read
concurrency:
  group: check-${{{{ github.ref }}}}
  cancel-in-progress: true
jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    strategy:
      fail-fast: false
      matrix:
        lesson: [{lessons}]
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
          cache: pip
      - name: Install
        run: python -m pip install -r requirements.txt
      - name: Check
        env:
          MINILLM_STRICT: "1"
          OMP_NUM_THREADS: "2"
        run: python -m {check} lessons/${{{{ matrix.lesson }}}}.ipynb
"""
REQUIREMENTS = """\
# PyTorch's build for CPUs is a tenth of the size of the one with CUDA. Remove the line to use a GPU.
--extra-index-url https://download.pytorch.org/whl/cpu
{package}
ipykernel>=6.29
jupyterlab>=4.2
nbval>=0.11
pytest>=8.2
"""
PUBLISHED = "minillm-lessons @ git+{repository}@{tag}"
UNPUBLISHED = """\
# The lessons are not published: put the wheel that `make dist` writes beside this file, and commit it.
./{wheel}"""
README = """\
# Lessons

    python3 -m venv .venv                              # Windows: py -m venv .venv
    .venv/bin/pip install -r requirements.txt          # Windows: .venv\\Scripts\\pip
    .venv/bin/jupyter lab lessons                      # Windows: .venv\\Scripts\\jupyter

{table}

Each lesson runs from top to bottom as it is: an exercise that is not solved uses the reference and says so. Solve an
exercise in its cell, run its `check`, and read what it says; `hint("l02.append_kv", 1)` helps. Keep the name of the
function; you may add, split and move cells.

Commit and push. GitHub runs every notebook with `MINILLM_STRICT=1`, where a check that does not pass is an error; the
*Actions* page shows the first cells that are red. The same here, for one notebook:

    MINILLM_STRICT=1 .venv/bin/python -m {check} lessons/{first}.ipynb

On Windows (PowerShell) write `$env:MINILLM_STRICT = 1` in a line of its own first, and `.venv\\Scripts\\python`.
"""
IGNORED = ".venv/\n.ipynb_checkpoints/\n__pycache__/\n.pytest_cache/\n"


def write_classroom(root: Path, names: list[str] | None, target: Path) -> list[Path]:
    """Write the repository of a class with these lessons (None: all) of the clone `root` into the folder `target`.

    Lessons that are already in `target` stay in its workflow and its README, and their notebooks stay as they are,
    because students may have worked in them. If the clone is not published (`[tool.minillm]`), the requirements name a
    wheel; it is copied if `make dist` has written it.

    Raises:
        LessonError: an unknown lesson, or one that is not built.
        ConfigError: `target` is a file, or has files of another project that would be overwritten.
    """
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; --classroom needs the name of a folder")
    lessons, home = _with_those_in(target, choose(root, names), choose(root)), read_home(root)
    if missing := [lesson for lesson in lessons if not lesson.lesson.exists()]:
        raise LessonError(f"{missing[0].lesson} does not exist; run: minillm build {missing[0].number:02}")
    files = {
        CHECK_FILE: WORKFLOW.format(lessons=", ".join(one.name for one in lessons), check=CHECK),
        ".gitignore": IGNORED,
        "README.md": README.format(table=_table(lessons), check=CHECK, first=lessons[0].name),
        "requirements.txt": REQUIREMENTS.format(package=_package(home)),
        "lessons/glossary.md": glossary.page({lesson.number: lesson.lesson.name for lesson in lessons}),
    }
    copied = {"LICENSE": root / "LICENSE"}
    if not home.repository:
        copied[WHEEL] = root / "dist" / WHEEL
    taken = [target / name for name in (*files, *copied) if (target / name).exists()]
    if taken and not _is_classroom(target):
        raise ConfigError(
            f"{taken[0]} would be overwritten; --classroom needs a new folder, or one that it has written"
        )
    written = []
    for name, text in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    for lesson in lessons:
        path = target / "lessons" / lesson.lesson.name
        if not path.exists():
            shutil.copyfile(lesson.lesson, path)
            written.append(path)
    written += [Path(shutil.copyfile(path, target / name)) for name, path in copied.items() if path.exists()]
    return written


def _with_those_in(target: Path, chosen: Sequence[Lesson], every: Sequence[Lesson]) -> list[Lesson]:
    """Of all lessons those that are chosen, and those whose notebook is in `target` already."""
    return [one for one in every if one in chosen or (target / "lessons" / one.lesson.name).exists()]


def _is_classroom(folder: Path) -> bool:
    """Whether `write_classroom` has written this folder: its workflow is there, which is written first."""
    check = folder / CHECK_FILE
    first_line = WORKFLOW.partition("\n")[0]
    return check.is_file() and check.read_text(encoding="utf-8", errors="replace").startswith(first_line)


def _package(home: Home) -> str:
    if home.repository:
        return PUBLISHED.format(repository=home.repository, tag=home.tag)
    return UNPUBLISHED.format(wheel=WHEEL)


def _table(lessons: Sequence[Lesson]) -> str:
    rows = [f"| [{lesson.name}](lessons/{lesson.lesson.name}) |" for lesson in lessons]
    return "\n".join(["| lesson |", "|---|", *rows])
