"""What someone gets who only pip-installs."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from minillm.commands.lab import copy_new
from minillm.teaching.publication import Home

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [file] = folder.glob("minillm_lessons-*.whl")
    return zipfile.ZipFile(file).namelist()


@pytest.mark.parametrize("model", ["minicoder", "minicoder-draft"])
@pytest.mark.parametrize("part", ["config.json", "model.safetensors", "tokenizer.json"])
def test_wheel_carries_the_bundled_models(wheel, model, part):
    assert f"minillm/models/weights/{model}/{part}" in wheel


def test_wheel_carries_every_lesson(wheel):
    lessons = {f"minillm/_lessons/{lesson.name}" for lesson in (ROOT / "lessons").glob("*.ipynb")}
    assert lessons
    assert lessons <= set(wheel)


def test_wheel_carries_the_glossary_beside_the_lessons_that_link_to_it(wheel):
    assert "minillm/_lessons/glossary.md" in wheel
    assert "minillm/teaching/glossary.toml" in wheel


def test_lab_copies_the_glossary_with_the_lessons(tmp_path):
    copy_new(ROOT / "lessons", tmp_path)
    assert (tmp_path / "glossary.md").exists()


def test_make_dist_writes_the_wheel_that_the_first_cell_asks_for(wheel):
    """The fixture runs the command of the target."""
    makefile = (ROOT / "Makefile").read_text()
    assert "python -m hatchling build -d dist" in makefile
    assert Home().first_cell.count("minillm_lessons-*.whl") == 2


def test_wheel_carries_the_solved_lessons_apart_from_the_others(wheel):
    assert "minillm/_solutions/02_kv_cache.ipynb" in wheel
    assert not [name for name in wheel if "_solutions" in name and not name.endswith(".ipynb")]


def test_the_check_of_a_release_finds_a_solution_in_a_lesson():
    from release.check_dist import leaks, solution_lines

    lines = solution_lines(ROOT)
    assert len(lines) > 100
    lessons = {path.name: path.read_bytes() for path in (ROOT / "lessons").glob("*.ipynb")}
    assert list(leaks(lessons, lines)) == []
    solved = (ROOT / "solutions" / "02_kv_cache.ipynb").read_bytes()
    assert len(list(leaks({"02_kv_cache.ipynb": solved}, lines))) >= 3


@pytest.mark.parametrize("name", [".import_linter_cache/x", "a/.pytest_cache/x", ".git/x", "a/.env", "x.pyc"])
def test_the_check_of_a_release_finds_what_does_not_belong_there(name, tmp_path):
    from release.check_dist import sdist_problems

    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        for inside in (name, "minillm/cache/base.py", "solutions/02_kv_cache.py"):
            archive.addfile(tarfile.TarInfo(f"minillm_lessons-0.1.0/{inside}"))
    found = [problem for problem in sdist_problems(tmp_path / "x.tar.gz") if "lacks" not in problem]
    assert found == [f"the sdist has {name}"]


@pytest.mark.parametrize(
    "folder", [".import_linter_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".venv", ".edges", "dist"]
)
def test_the_source_distribution_takes_no_folder_that_a_tool_has_made(folder):
    from hatchling.builders.sdist import SdistBuilder

    config = SdistBuilder(str(ROOT)).config
    assert config.include_path("minillm/cache/base.py")
    assert not config.include_path(f"{folder}/a.json")


def test_wheel_carries_every_module_and_nothing_but_the_package(wheel):
    modules = {str(f.relative_to(ROOT)) for f in (ROOT / "minillm").rglob("*.py")}
    assert modules <= set(wheel)
    top = {"minillm", "minillm_lessons-0.1.0.dist-info", "minillm_lessons-0.1.0.data"}
    assert {name.split("/")[0] for name in wheel} <= top
    assert not [name for name in wheel if "__pycache__" in name]


def test_wheel_puts_code_completion_where_jupyter_looks(wheel):
    data = {name.partition(".data/data/")[2] for name in wheel if ".data/data/" in name}
    front_end = ROOT / "minillm" / "complete" / "labextension" / "@minillm" / "complete"
    files = [file.relative_to(front_end).as_posix() for file in front_end.rglob("*.*")]
    built = {f"share/jupyter/labextensions/@minillm/complete/{file}" for file in files}
    assert len(built) > 3
    assert data == built | {"etc/jupyter/jupyter_server_config.d/minillm.json"}
    assert any(name.startswith("minillm/complete/labextension/") for name in wheel), "`minillm lab --complete` names it"
