"""`make` in a new clone, until the packages are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="this system has no make")


def made(folder: Path, version: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run `make` with a Python that says it is of this version, and whose `-m` only prints its arguments."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && echo "$@" && exit 9\n'
        f"exec {sys.executable} -c 'import sys; sys.version_info = {version}; exec(sys.argv[1])' \"$2\"\n"
    )
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", *(f"{name}={value}" for name, value in variables.items())]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_old_python_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = made(tmp_path, "(3, 9, 6)", VENV=tmp_path / "new")
    assert done.returncode != 0 and not (tmp_path / "new").exists() and "-m venv" not in done.stdout
    said = f"minillm needs Python 3.10 or newer; {tmp_path}/python is 3.9. Name another: make PYTHON=python3.12"
    assert done.stderr.splitlines()[0] == said


def test_an_environment_of_another_python_that_was_not_finished_is_made_anew(tmp_path: Path) -> None:
    unfinished, finished = tmp_path / "unfinished", tmp_path / "finished"
    unfinished.mkdir()
    finished.mkdir()
    (finished / ".installed").touch()
    assert f"-m venv --clear {unfinished}\n" in made(tmp_path, "(3, 10, 0)", VENV=unfinished).stdout
    os.utime(finished / ".installed", (0, 0))  # older than what is to be installed
    assert f"-m venv {finished}\n" in made(tmp_path, "(3, 10, 0)", VENV=finished).stdout
