"""`minillm progress` says what is done, and where to go on."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from minillm.cli import main
from minillm.commands import lab, progress

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="functions are run in sandboxed processes of Linux")
def test_it_counts_what_passes_and_names_the_next_exercise(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shutil.copy(ROOT / "solutions" / "03_roofline.ipynb", tmp_path / "03_roofline.ipynb")
    shutil.copy(ROOT / "lessons" / "02_kv_cache.ipynb", tmp_path)
    shutil.copy(ROOT / "lessons" / "00_tour.ipynb", tmp_path)
    (tmp_path / "04_kv_quantisation.ipynb").write_text('{"cells": [')
    assert main(["progress", str(tmp_path)]) == 0
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any("02_kv_cache │ 0 of 5 │ l02.append_kv (not attempted)" in line for line in told)
    assert any("03_roofline │ 6 of 6 │" in line for line in told)
    assert any("04_kv_quantisation │ ? │ cannot be read: not JSON" in line for line in told)
    assert not any("00_tour" in line for line in told)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["progress", "."], "minillm progress runs your functions in a sandbox, which needs Linux (on a Mac"),
        (["grade", "submissions", "--out", "report"], "submissions are graded on Linux only"),
    ],
)
def test_another_system_is_refused_before_anything_is_written(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "submissions" / "kim").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "submissions" / "kim"):
        shutil.copy(ROOT / "lessons" / "02_kv_cache.ipynb", folder)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"minillm: {said}")
    assert not (tmp_path / "report").exists()


def test_the_lessons_are_those_that_lab_opens(tmp_path, monkeypatch):
    copies = tmp_path / lab.COPIES
    copies.mkdir()
    shutil.copy(ROOT / "lessons" / "00_tour.ipynb", copies)
    monkeypatch.chdir(tmp_path)
    assert [file.resolve() for file in progress.notebooks(None)] == [copies.resolve() / "00_tour.ipynb"]
    opened = lab.lessons_folder(None)  # copies the others
    assert {file.resolve().parent for file in progress.notebooks(None)} == {opened}
    assert len(progress.notebooks(None)) == len(list((ROOT / "lessons").glob("*.ipynb")))


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert main(["lab", "--no-open", "--dir=~/course"]) == 0
    assert (tmp_path / "course" / "00_tour.ipynb").exists()
    (tmp_path / "none").mkdir()
    assert main(["progress", "~/none"]) == 2
    assert f"{tmp_path / 'none'} has no notebook of a lesson" in capsys.readouterr().err
    assert lab.user_path("~no-such-user/x") == Path("~no-such-user/x")


def test_an_empty_folder_is_an_error(tmp_path, capsys):
    assert main(["progress", str(tmp_path)]) == 2
    assert "no notebook of a lesson" in capsys.readouterr().err
