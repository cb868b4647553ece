"""Packages are tried where what they leave behind, or break, does no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.doctor import import_probe
from minillm.doctor.import_probe import MARK, Answer, ask


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that notes the process which imports it."""
    (tmp_path / "noting.py").write_text(
        f"import os\nopen({str(tmp_path / 'notes')!r}, 'a').write(f'{{os.getpid()}} ')\nprint('noise', end='')\n"
        "def seven():\n    return 7\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "noting"


def test_a_package_is_imported_once_and_elsewhere(package: str, tmp_path: Path) -> None:
    for _ in range(2):
        found = ask(package, f"{package}:seven", "no_such_module")
        assert (found[package].problem, found[f"{package}:seven"].value) == ("", 7)
        assert found["no_such_module"].problem == "not installed"
    [process] = (tmp_path / "notes").read_text().split()
    assert int(process) != os.getpid() and package not in sys.modules


def test_a_path_that_python_skips_is_left_out(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("src"), *sys.path])
    assert ask(package)[package].problem == ""


def test_only_the_package_that_ends_the_process_is_broken(package: str, tmp_path: Path) -> None:
    (tmp_path / "fatal.py").write_text("import os; os.abort()")
    found = ask(package, "fatal", "json")
    assert found[package].problem == found["json"].problem == ""
    assert "ends the process" in found["fatal"].problem


def test_where_there_are_no_processes_it_is_imported_here(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(subprocess, "run", refuse)
    assert ask(f"{package}:seven")[f"{package}:seven"].value == 7
    del sys.modules[package]


def test_a_package_that_never_ends_is_told(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("while True:\n    pass")
    monkeypatch.setattr(import_probe, "SECONDS", 0.5)
    assert ask("endless")["endless"].problem == "broken: importing it took more than 0.5 seconds"


def test_only_the_package_that_never_ends_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[bytes]:
        said = b""
        for question in json.loads(command[-1])[1]:
            if question == "endless":
                raise subprocess.TimeoutExpired(command, timeout, said or None)
            said += f"\n{MARK}{json.dumps([question, '', 7])}\n".encode()
        return subprocess.CompletedProcess(command, 0, said)

    monkeypatch.setattr(subprocess, "run", run)
    late, good = Answer("broken: importing it took more than 120 seconds"), Answer("", 7)
    assert ask("before", "endless", "after") == {"before": good, "endless": late, "after": good}


def test_a_package_that_lacks_another_is_broken_and_not_missing(package: str, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text("import no_such_module")
    found = ask("lacking", "no_such_module.part", "json.no_such_part")
    assert found["lacking"].problem == "broken: it needs no_such_module, which is not installed"
    assert found["no_such_module.part"].problem == found["json.no_such_part"].problem == "not installed"
