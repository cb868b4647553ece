"""One source gives two notebooks, the same bytes every time."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

from minillm.errors import LessonError
from minillm.teaching.build import build
from minillm.teaching.notebook import for_learner, read_source, without_solutions
from minillm.teaching.publication import Home, read_home
from minillm.whole_file import write_whole_file

SOURCE = Path("solutions/90_sample.py")
SOLUTION = Path("solutions/90_sample.ipynb")
LESSON = Path("lessons/90_sample.ipynb")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def outputs_of(notebook: nbformat.NotebookNode, source_part: str) -> list:
    return next(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and source_part in cell.source)


def test_lesson_has_stubs_and_no_outputs(course):
    lesson = read(course / LESSON)
    text = "\n".join(cell.source for cell in lesson.cells)
    stub = "write double in place of each NotImplementedError, then run its check"
    assert f'    raise NotImplementedError("{stub}")' in text
    assert "return [2 * n for n in numbers]\n    ###" not in text
    assert "SOLUTION" not in text
    assert "Twice each number" in text
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_first_code_cell_is_the_same_everywhere_and_keeps_nothing_about_this_machine(course):
    for path in (LESSON, SOLUTION):
        notebook = read(course / path)
        assert notebook.cells[0].cell_type == "markdown"
        assert notebook.cells[1].source == Home().first_cell
        assert notebook.cells[1].outputs == []


def test_expected_picture_stands_under_its_cell_with_alt_text(course):
    cells = read(course / LESSON).cells
    index = next(i for i, cell in enumerate(cells) if "expected-picture" in cell.metadata.get("tags", []))
    assert 'display_id="live"' in cells[index - 1].source
    alt, data = re.search(r'<img alt="(.*?)" src="data:image/svg\+xml;base64,(.*?)">', cells[index].source).groups()
    assert alt == "A bar of length 2, then one of length 6"
    picture = base64.b64decode(data).decode()
    assert picture.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "first frame" not in picture
    assert 'width="60"' in picture


def test_solution_keeps_outputs_of_its_last_frame_only(course):
    solution = read(course / SOLUTION)
    [frame] = outputs_of(solution, 'display_id="live"')
    assert "first frame" not in frame.data["text/html"]
    assert outputs_of(solution, "check(EXERCISE)")[0].data["text/plain"] == "PASS 2/2  l90.double"
    assert [cell.execution_count for cell in solution.cells if cell.cell_type == "code"] == list(range(1, 10))


def test_solution_holds_nothing_that_changes_from_run_to_run(course):
    text = (course / SOLUTION).read_text()
    for trace in ("widget-view", "widget-state", '"name": "stderr"', "iopub", '"version"', str(course)):
        assert trace not in text
    widget, printed, page = outputs_of(read(course / SOLUTION), "IntSlider")
    assert widget.data == {"text/plain": "IntSlider(value=3)"}
    assert printed.text == "loading 100%\n"
    assert page.data["text/html"] == '<div id="00000000-0000-4000-8000-000000000000">chart</div>'
    assert {cell.id for cell in read(course / SOLUTION).cells} == {f"90_sample-{n:03d}" for n in range(10)}


def test_building_again_gives_the_same_bytes_even_for_measured_cells(course):
    before = {path: (course / path).read_bytes() for path in (LESSON, SOLUTION)}
    build(course)
    assert before == {path: (course / path).read_bytes() for path in (LESSON, SOLUTION)}
    build(course, remeasure=True)
    old, new = json.loads(before[SOLUTION]), json.loads((course / SOLUTION).read_text())
    assert [i for i, pair in enumerate(zip(old["cells"], new["cells"], strict=True)) if pair[0] != pair[1]] == [8]


def test_an_interrupted_build_leaves_no_half_of_a_notebook(tmp_path, monkeypatch):
    def stop(descriptor: int) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "90_sample.ipynb"
    write_whole_file(file, "the whole text")
    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole_file(file, "another text")
    assert file.read_text() == "the whole text"


def test_new_prose_does_not_replace_measurements(course, no_kernel):
    [before] = outputs_of(read(course / SOLUTION), "print(measured)")
    for old, new in (
        ("Everything the build", "Hello. Everything the build"),
        ("Twice each number", "Two times each number"),
        ("A bar of length 2", "One bar of length 2"),
        ("print(measured)", "print(measured)  # again"),
    ):
        edit(course / SOURCE, old, new)
    build(course)
    assert [before] == outputs_of(read(course / SOLUTION), "print(measured)")
    assert "Hello" in read(course / LESSON).cells[0].source


def test_new_code_replaces_measurements(course, no_kernel):
    [before] = outputs_of(read(course / SOLUTION), "print(measured)")
    edit(course / SOURCE, "return [2 * n for n in numbers]\n    ###", "return [n * 2 for n in numbers]\n    ###")
    build(course)
    assert [before] != outputs_of(read(course / SOLUTION), "print(measured)")


def test_fresh_notebooks_pass_the_check(course):
    assert build(course, check=True) == []


def test_check_names_the_cell_that_was_edited_in_the_source_and_the_command(course):
    edit(course / SOURCE, "return [2 * n for n in numbers]\n    ###", "return [n * 2 for n in numbers]\n    ###")
    solution, lesson = build(course, check=True)
    assert str(solution) == ("solutions/90_sample.ipynb: cell 5 differs from its source. Run: minillm build 90_sample")
    assert lesson.path == LESSON


def test_check_notices_an_edit_that_changes_no_cell(course):
    edit(course / SOURCE, "# %% [markdown]", "# %%   [markdown]")
    assert "metadata differ" in build(course, check=True)[0].reason


def test_check_notices_a_lesson_edited_by_hand(course):
    edit(course / LESSON, "write double in place", "write it in place")
    [stale] = build(course, check=True)
    assert stale.path == LESSON


def test_check_notices_a_solution_saved_without_running(course):
    edit(course / SOLUTION, '"execution_count": 2,', '"execution_count": null,')
    assert "cell 3 was never executed" in build(course, check=True)[0].reason


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("{")], ids=["missing", "truncated"])
def test_check_reports_a_notebook_that_cannot_be_read(course, spoil):
    spoil(course / SOLUTION)
    assert build(course, check=True)[0].reason == "it is missing or unreadable"


def test_check_reports_notebooks_without_a_source(course):
    (course / LESSON).rename(course / "lessons" / "91_gone.ipynb")
    reasons = {str(stale.path): stale.fix for stale in build(course, check=True)}
    assert reasons == {
        "lessons/90_sample.ipynb": "minillm build 90_sample",
        "lessons/91_gone.ipynb": "delete lessons/91_gone.ipynb",
    }


def test_lessons_are_chosen_by_number_or_name(course):
    edit(course / LESSON, "write double in place", "write it in place")
    for name in ("90", "90_sample", "90_sample.py", "solutions/90_sample.py"):
        assert [stale.path for stale in build(course, [name], check=True)] == [LESSON]
    with pytest.raises(LessonError, match="no lesson is called '90_simple'; there are: 90_sample"):
        build(course, ["90_simple"])


def test_failing_cell_names_lesson_cell_and_error_and_leaves_the_notebooks_alone(course):
    before = (course / SOLUTION).read_bytes()
    edit(course / SOURCE, "return [2 * n for n in numbers]\n    ###", "return numbers\n    ###")
    with pytest.raises(
        LessonError, match=r"lesson 90_sample, cell 6 \('check\(EXERCISE\)'\): ExerciseFailed: FAIL 1/2"
    ):
        build(course)
    assert (course / SOLUTION).read_bytes() == before


def test_expected_picture_without_words_is_refused_before_anything_runs(course):
    edit(course / SOURCE, ' alt="A bar of length 2, then one of length 6"', "")
    with pytest.raises(LessonError, match=r'90_sample, cell 7: .* without alt="…"'):
        read_source(course / SOURCE)


@pytest.mark.parametrize(
    ("svg", "says"), [("", "shows no SVG"), (f"<svg>{'x' * 100_000}</svg>", r"100,\d+ bytes; the limit is 100,000")]
)
def test_expected_picture_that_is_missing_or_huge_is_refused(course, svg, says):
    solution = read(course / SOLUTION)
    outputs_of(solution, 'display_id="live"')[0].data["text/html"] = svg
    with pytest.raises(LessonError, match=says):
        for_learner(solution)


def test_source_without_a_title_is_refused(tmp_path):
    (tmp_path / "92_untitled.py").write_text("# %%\n1 + 1\n")
    with pytest.raises(LessonError, match="first cell must be markdown"):
        read_source(tmp_path / "92_untitled.py")


def test_solution_regions_become_stubs_at_their_own_indentation():
    source = """class Pool:
    def allocate(self, n: int) -> list[int]:
        ### BEGIN SOLUTION
        if n:
            return list(range(n))
        ### END SOLUTION

    def free(self) -> None:
        ### BEGIN SOLUTION
        self.blocks.clear()
        ### END SOLUTION
"""
    assert without_solutions(source).splitlines() == [
        "class Pool:",
        "    def allocate(self, n: int) -> list[int]:",
        '        raise NotImplementedError("write allocate in place of each NotImplementedError, then run its check")',
        "",
        "    def free(self) -> None:",
        '        raise NotImplementedError("write free in place of each NotImplementedError, then run its check")',
    ]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "must be indented inside a function"),
        ("def f():\n    return 1\n### BEGIN SOLUTION\nx = f()\n### END SOLUTION", "must be indented inside a function"),
        ("def f():\n    ### BEGIN SOLUTION\n    return 1", "never closed"),
        ("def f():\n    return 1\n    ### END SOLUTION", "without '### BEGIN SOLUTION'"),
        ("def f():\n    ### BEGIN SOLUTION\n    ### BEGIN SOLUTION\n    ### END SOLUTION", "a second"),
        ("def f():\n    x = 1\n      ### BEGIN SOLUTION\n    ### END SOLUTION", "unexpected indent"),
    ],
)
def test_badly_placed_solution_regions_are_refused(source, says):
    with pytest.raises(LessonError, match=says):
        without_solutions(source, "cell 1")


PUBLISHED = """[tool.minillm]
repository = "https://github.com/someone/minillm.git"
tag = "v1.2"
"""


def test_unpublished_lessons_carry_no_badge_and_install_an_uploaded_wheel_on_colab_only(course):
    cells = read(course / LESSON).cells
    assert cells[0].source.startswith("# A sample lesson")
    first = cells[1].source
    assert first.count("%pip") == 1
    before, condition, after = first.partition('if "google.colab" in sys.modules and')
    assert condition
    assert "pip" not in before
    assert "    %pip install --quiet minillm_lessons-*.whl" in after.splitlines()
    assert "jupyterlab" not in first


def test_first_cell_installs_nothing_elsewhere_and_says_on_colab_what_to_upload(monkeypatch, capsys):
    code = Home().first_cell.replace("    %pip install", "    installed = True  # ")
    code = code.partition("from minillm import doctor")[0]
    exec(code, elsewhere := {})
    assert "installed" not in elsewhere
    monkeypatch.setitem(sys.modules, "google.colab", object())
    exec(code, already := {})
    assert "installed" not in already
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(code, on_colab := {})
    assert on_colab["installed"]
    assert "upload dist/minillm_lessons-*.whl, which `make dist` writes" in capsys.readouterr().out


def test_published_lessons_install_from_the_tag_and_carry_badges(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PUBLISHED)
    home = read_home(tmp_path)
    assert (
        '    %pip install --quiet "minillm-lessons @ git+https://github.com/someone/minillm.git@v1.2"'
        in home.first_cell
    )
    (tmp_path / "solutions").mkdir()
    (tmp_path / SOURCE).write_text("# %% [markdown]\n# # 90. Sample\n")
    address = "colab.research.google.com/github/someone/minillm/blob/v1.2/lessons/90_sample.ipynb"
    [title, _] = read_source(tmp_path / SOURCE).cells
    assert title.source.startswith("[![Open in Colab](")
    assert address in title.source
    assert "mybinder" not in title.source
    (tmp_path / "binder").mkdir()
    binder = "https://mybinder.org/v2/gh/someone/minillm/v1.2?labpath=lessons%2F90_sample.ipynb"
    assert binder in read_source(tmp_path / SOURCE).cells[0].source


def test_badges_are_for_github_only():
    assert Home("https://gitlab.com/someone/minillm", "v1").badges("90_sample", binder=True) == ""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('repository = "https://github.com/a/b"', "set both, or neither"),
        ('tag = "v1"', "set both, or neither"),
        ('repository = "git@github.com:a/b"\ntag = "v1"', "must be an address https://"),
        ('repository = "https://github.com/a/b"\ntag = "v1 beta"', "tag = 'v1 beta' must be"),
        ('branch = "main"', "unknown key 'branch'"),
    ],
)
def test_half_a_home_is_refused(tmp_path, settings, says):
    (tmp_path / "pyproject.toml").write_text(f"[tool.minillm]\n{settings}\n")
    with pytest.raises(LessonError, match=says):
        read_home(tmp_path)
