"""What the README shows is there, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("def fib(n):")
    assert (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_pictures_and_linked_files_exist(name):
    assert (ROOT / name).is_file()


def test_course_table_promises_the_lessons_there_are():
    here = re.findall(r"^\| (\d\d) \|.*\|$", README, re.MULTILINE)
    assert here == sorted(lesson.name[:2] for lesson in (ROOT / "lessons").glob("*.ipynb"))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`minillm/([\w/.]+)`", README))))
def test_files_on_the_reading_list_exist(path):
    assert (ROOT / "minillm" / path).exists()


@pytest.mark.parametrize("tier", ["An afternoon", "The mechanism"])
def test_the_reading_path_is_as_long_as_it_says(tier: str) -> None:
    """To the nearest hundred lines."""
    [(stated, section)] = re.findall(rf"^### {tier}: ([\d,]+) lines.*?$(.*?)^###", README, re.MULTILINE | re.DOTALL)
    files = re.findall(r"`(minillm/[\w/]+\.py)`", section)
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert len(files) == len(set(files)) and stated == f"{round(lines, -2):,}"
