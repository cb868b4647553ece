"""The repository for a class has no solutions, and its workflow is red exactly where an exercise is not solved."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from minillm.cli import main
from minillm.errors import ConfigError, LessonError
from minillm.teaching.classroom import WHEEL, write_classroom
from minillm.teaching.course import choose
from minillm.teaching.notebook import BEGIN, END

ROOT = Path(__file__).parents[2]
REGION = re.compile(rf"{BEGIN}\n(.*?)\s*{END}", re.DOTALL)


def workflow(folder: Path) -> dict:
    return yaml.safe_load((folder / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8"))


def red_cells(folder: Path, lesson: str) -> list[int]:
    """The cells that the workflow's last step finds red in a lesson; its command and environment are taken from it."""
    step = workflow(folder)["jobs"]["check"]["steps"][-1]
    command = step["run"].replace("${{ matrix.lesson }}", lesson)
    assert "{{" not in command and command.startswith("python -m pytest --nbval-lax ")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200", **step["env"]}
    run = subprocess.run(
        [sys.executable, *command.split()[1:], "-q", "-c", os.devnull, f"--rootdir={folder}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return sorted(int(number) for number in re.findall(r"^FAILED \S+::Cell (\d+)", run.stdout, re.MULTILINE))


def checks(notebook: nbformat.NotebookNode) -> list[int]:
    """The cells that call `check`, counted as nbval does."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [number for number, cell in enumerate(code) if re.search(r"^check\(", cell.source, re.MULTILINE)]


def solve(folder: Path, source: Path) -> None:
    """Replace each stub by the solution of its source."""
    path = folder / "lessons" / f"{source.stem}.ipynb"
    notebook, regions = nbformat.read(path, as_version=4), REGION.findall(source.read_text(encoding="utf-8"))
    for cell in notebook.cells:
        while cell.cell_type == "code" and (
            stub := re.search(r"^ *raise NotImplementedError\(.*\)$", cell.source, re.M)
        ):
            cell.source = cell.source.replace(stub[0], regions.pop(0), 1)
    assert not regions
    nbformat.write(notebook, path)


def test_no_lesson_holds_a_line_of_a_solution(tmp_path, capsys) -> None:
    assert main(["build", "--root", str(ROOT), "--classroom", str(tmp_path)]) == 0
    names = [lesson.name for lesson in choose(ROOT)]
    assert capsys.readouterr().out.count(".ipynb") == len(names)
    assert workflow(tmp_path)["jobs"]["check"]["strategy"]["matrix"]["lesson"] == names
    for lesson in choose(ROOT):
        text = (tmp_path / "lessons" / f"{lesson.name}.ipynb").read_text(encoding="utf-8")
        sources = "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells)
        regions = REGION.findall(lesson.source.read_text(encoding="utf-8"))
        assert BEGIN not in text and sources.count("raise NotImplementedError(") >= len(regions)
        assert [region for region in regions if region.strip() in sources] == []
    assert not list(tmp_path.rglob("*.py")) and not list(tmp_path.rglob("solutions"))


def test_the_workflow_can_only_read_and_runs_under_strict(tmp_path) -> None:
    write_classroom(ROOT, ["02", "06"], tmp_path)
    made = workflow(tmp_path)
    assert made["permissions"] == {"contents": "read"}
    assert made["jobs"]["check"]["steps"][-1]["env"]["MINILLM_STRICT"] == "1"
    assert {"push", "pull_request"} <= set(made[True])  # YAML 1.1 reads the key `on` as true
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "(lessons/06_paged_blocks.ipynb)" in readme and "lessons/03" not in readme
    assert "](03_roofline.ipynb)" not in (tmp_path / "lessons" / "glossary.md").read_text(encoding="utf-8")


def test_the_package_comes_from_the_repository_or_from_a_wheel(course) -> None:
    folder = course / "class"
    write_classroom(course, None, folder)
    assert f"\n./{WHEEL}\n" in (folder / "requirements.txt").read_text()
    assert not (folder / WHEEL).exists()
    (course / "dist").mkdir()
    (course / "dist" / WHEEL).write_bytes(b"wheel")
    assert folder / WHEEL in write_classroom(course, None, folder)
    table = '[tool.minillm]\nrepository = "https://example.org/llm"\ntag = "v7"\n'
    (course / "pyproject.toml").write_text(table)
    write_classroom(course, None, folder)
    assert "\nminillm-lessons @ git+https://example.org/llm@v7\n" in (folder / "requirements.txt").read_text()


def test_work_in_the_folder_is_kept(course) -> None:
    folder = course / "class"
    write_classroom(course, None, folder)
    notebook = folder / "lessons" / "90_sample.ipynb"
    notebook.write_text("my work")
    (folder / "README.md").write_text("old")
    written = write_classroom(course, None, folder)
    assert notebook.read_text() == "my work" and notebook not in written
    assert (folder / "README.md").read_text() != "old"


def test_a_lesson_that_is_added_leaves_the_others_in_the_workflow(tmp_path) -> None:
    write_classroom(ROOT, ["06"], tmp_path)
    write_classroom(ROOT, ["02"], tmp_path)
    both = ["02_kv_cache", "06_paged_blocks"]
    assert workflow(tmp_path)["jobs"]["check"]["strategy"]["matrix"]["lesson"] == both
    for page in ("README.md", "lessons/glossary.md"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert all(f"{name}.ipynb)" in text for name in both) and "03_roofline.ipynb)" not in text


@pytest.mark.parametrize("name", ["README.md", ".gitignore", "LICENSE", ".github/workflows/check.yml"])
@pytest.mark.parametrize("place", [".", "another project"])
def test_files_of_another_project_are_never_overwritten(course, name: str, place: str) -> None:
    """Also not those of the clone itself."""
    (course / "LICENSE").write_text("of the clone")
    file = course / place / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("as it was")
    before = sorted((course / place).rglob("*"))
    with pytest.raises(ConfigError, match="would be overwritten; --classroom needs a new folder"):
        write_classroom(course, None, course / place)
    assert file.read_text() == "as it was" and sorted((course / place).rglob("*")) == before


def test_an_empty_repository_of_git_becomes_the_one_of_the_class(course) -> None:
    (course / "class" / ".git").mkdir(parents=True)
    assert course / "class" / "README.md" in write_classroom(course, None, course / "class")


def test_bad_input_says_what_is_wrong(course) -> None:
    (course / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; --classroom needs"):
        write_classroom(course, None, course / "file")
    with pytest.raises(LessonError, match="no lesson is called '12'"):
        write_classroom(course, ["12"], course / "class")
    (course / "lessons" / "90_sample.ipynb").unlink()
    with pytest.raises(LessonError, match="run: minillm build 90"):
        write_classroom(course, None, course / "class")
    (course / "solutions" / "90_sample.py").unlink()
    with pytest.raises(LessonError, match="solutions has no lesson"):
        write_classroom(course, None, course / "class")


def red_and_green(root: Path, name: str, folder: Path) -> tuple[list[int], list[int], list[int]]:
    """Red cells of a fresh copy and of a solved one, and the cells that check an exercise."""
    lesson = choose(root, [name])[0]
    write_classroom(root, [name], folder)
    before = red_cells(folder, lesson.name)
    solve(folder, lesson.source)
    return before, red_cells(folder, lesson.name), checks(nbformat.read(lesson.lesson, as_version=4))


def test_the_workflow_is_red_where_an_exercise_is_not_solved_and_green_where_all_are(course) -> None:
    before, after, exercises = red_and_green(course, "90", course / "class")
    assert before == exercises and len(exercises) == 1 and after == []


@pytest.mark.long
def test_so_it_is_for_a_whole_lesson(tmp_path) -> None:
    before, after, exercises = red_and_green(ROOT, "02", tmp_path / "class")
    assert before == exercises and len(exercises) == 5 and after == []
    shutil.rmtree(tmp_path / "class")
