"""`minillm lab`: open JupyterLab on the first lesson."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from minillm.commands.command import Command
from minillm.errors import ConfigError, UnsupportedError

EXAMPLES = """\
  minillm lab
  minillm lab 02                    open lesson 02
  minillm lab --dir ~/course        copy the lessons to ~/course
  minillm lab --solutions           also copy the solved lessons, for teachers
  minillm lab --complete            complete code with the models of the lessons
  minillm lab --no-open             only copy the lessons and print their folder
  minillm lab --jupyter=--no-browser --jupyter=--port=9000
"""
PACKAGE = Path(__file__).resolve().parents[1]
COPIES = Path("minillm-lessons")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("lesson", nargs="?", default="", help="number or name of the lesson (default: the first)")
    where = f"copy the lessons to DIR (default: ./{COPIES})"
    parser.add_argument("--dir", type=user_path, help=where)
    solutions = "also copy the solved lessons, to the folder 'solutions' in DIR"
    parser.add_argument("--solutions", action="store_true", help=solutions)
    complete = "complete code as you type, with the models of the lessons (off otherwise: a learner writes the answers)"
    parser.add_argument("--complete", action="store_true", help=complete)
    parser.add_argument("--no-open", action="store_true", help="do not start JupyterLab")
    parser.add_argument("--jupyter", action="append", default=[], metavar="OPTION", help="pass OPTION to JupyterLab")


def run(args: argparse.Namespace) -> int:
    """Copy the lessons that are not there yet, then run JupyterLab until it is stopped."""
    if args.no_open:
        for name, given in (("--jupyter", args.jupyter), ("--complete", args.complete)):
            if given:
                raise ConfigError(f"{name} is for JupyterLab, which --no-open does not start; leave one of them out")
    folder = lessons_folder(args.dir, lesson=args.lesson)
    notebook = find_lesson(folder, args.lesson)
    if args.solutions:
        print(f"The solved lessons are in {solutions_folder(folder)}", flush=True)
    print(f"The lessons are in {folder}", flush=True)
    if args.no_open:
        return 0
    if importlib.util.find_spec("jupyterlab") is None:
        raise UnsupportedError(
            'JupyterLab is not installed; run: pip install "minillm-lessons[lab]", or open '
            f"{notebook} in another notebook program"
        )
    from jupyterlab.labapp import LabApp

    completion = completion_options() if args.complete else []
    LabApp.launch_instance([str(notebook), f"--ServerApp.root_dir={folder}", *completion, *args.jupyter])
    return 0


def user_path(name: str) -> Path:
    """The path with `~` expanded, which not every shell does, and none in `--dir=~/course`."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - `Path.expanduser` raises for a user without a home


def completion_options() -> list[str]:
    """JupyterLab's options that turn code completion on, however minillm is installed.

    A wheel puts the extension where JupyterLab looks for it, and an editable install does not.
    """
    from minillm.complete import EXTENSION, FRONT_END, ON

    os.environ[ON] = "1"
    return [f"--ServerApp.jpserver_extensions={EXTENSION}=True", f"--LabApp.extra_labextensions_path={FRONT_END}"]


def clone_folder(name: str, package: Path = PACKAGE) -> Path | None:
    """The folder `name` of the clone that `package` belongs to; None if it is installed."""
    folder = package.parent / name
    return folder if folder.is_dir() and (package.parent / "pyproject.toml").exists() else None


def lessons_folder(copies: Path | None, package: Path = PACKAGE, lesson: str = "") -> Path:
    """The folder of lessons to open: `copies`, or if that is None, `COPIES`. Lessons that it lacks are copied there.

    Raises `UnsupportedError` if there are no lessons to copy, `ConfigError` if they cannot be copied there, or if none
    of them, nor of the notebooks that are there, is `lesson` (see `find_lesson`); then nothing is copied.
    """
    source = clone_folder("lessons", package) or package / "_lessons"
    if not source.is_dir():
        raise UnsupportedError(f"{source} does not exist: this copy of minillm carries no lessons; install it again")
    target = copies or COPIES
    try:
        if not _matching(target, lesson):
            find_lesson(source, lesson)
        copied, kept = copy_new(source, target)
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"the lessons cannot be copied to {target} ({reason}); name another with --dir") from None
    if copied:
        print(f"Copied {copied} files.")
    if kept:
        print(f"Left {kept} files as they were; rename one and run this again to get a fresh copy of it.")
    return target.resolve()


def solutions_folder(lessons: Path, package: Path = PACKAGE) -> Path:
    """The folder of solved lessons: copies in `lessons/solutions`, which JupyterLab trusts. In a notebook that it does
    not trust it shows the words of a picture, without the picture.

    Raises `UnsupportedError` if there are none to copy, `ConfigError` if they cannot be copied there.
    """
    source, target = clone_folder("solutions", package) or package / "_solutions", lessons / "solutions"
    if not source.is_dir():
        raise UnsupportedError(f"{source} does not exist: this copy of minillm carries no solved lessons")
    try:
        copy_new(source, target, "*.ipynb", _beside_lessons)
    except OSError as problem:
        raise ConfigError(f"the solved lessons cannot be copied to {target} ({problem.strerror or problem})") from None
    trust_copies(source, target)
    return target


def _beside_lessons(notebook: bytes) -> bytes:
    """A solved lesson for a folder inside that of the lessons."""
    return notebook.replace(b"../lessons/glossary", b"../glossary")


def trust_copies(source: Path, target: Path) -> None:
    """Let JupyterLab trust the solved lessons of `target`, but none that was changed since it was copied."""
    if importlib.util.find_spec("nbformat") is None:
        return  # neither is JupyterLab installed
    import nbformat
    from nbformat.sign import NotebookNotary

    try:
        notary = NotebookNotary()
        with closing(notary.store):
            for file in source.glob("*.ipynb"):
                copy = (target / file.name).read_bytes()
                if copy == _beside_lessons(file.read_bytes()):
                    notary.sign(nbformat.reads(copy.decode(), as_version=nbformat.NO_CONVERT))
    except (OSError, sqlite3.Error) as problem:  # no place for Jupyter's data
        print(f"JupyterLab shows the pictures of solved lessons only after File, Trust Notebook: {problem}")


def copy_new(
    source: Path, target: Path, pattern: str = "*", change: Callable[[bytes], bytes] = bytes
) -> tuple[int, int]:
    """Copy the files of `source` that `target` lacks, but none of its folders. Returns how many were copied, and how
    many existed already.

    `pattern`: of their names; `change`: what to make of their bytes.

    Each file is opened with mode "x", which fails if it exists, so a learner's files are never overwritten. A file that
    could not be written to its end is deleted, because the next run would take it for a learner's.
    """
    target.mkdir(parents=True, exist_ok=True)
    copied = kept = 0
    for file in sorted(f for f in source.glob(pattern) if f.is_file()):
        place = target / file.name
        data = change(file.read_bytes())
        try:
            fresh = place.open("xb")
        except FileExistsError:
            kept += 1
            continue
        try:
            with fresh:
                fresh.write(data)
        except BaseException:
            place.unlink()
            raise
        copied += 1
    return copied, kept


def find_lesson(folder: Path, name: str) -> Path:
    """The notebook of `folder` with the number `name`, or the first whose file name starts with `name`.

    Raises `ConfigError` if there is none."""
    if found := _matching(folder, name):
        return found[0]
    there = ", ".join(notebook.stem for notebook in _matching(folder, "")) or "none"
    raise ConfigError(f"no lesson {name[:60]!r} in {folder}; there is: {there}")


def _matching(folder: Path, name: str) -> list[Path]:
    """The notebooks of `folder` with the number `name`, or whose file names start with `name`."""
    start = f"{name.zfill(2)}_" if name.isdecimal() else name
    return sorted(file for file in folder.glob("*.ipynb") if file.name.startswith(start))


COMMAND = Command(
    "lab",
    "Open JupyterLab on copies of the lessons, which are never overwritten.",
    EXAMPLES,
    options,
    run,
)
