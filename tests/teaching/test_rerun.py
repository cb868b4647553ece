"""A fresh run is compared with what was recorded: text, pictures, charts; measured cells only in what they draw."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import nbformat
import pytest

import minillm.teaching.rerun
from minillm import cli
from minillm.errors import LessonError
from minillm.teaching.build import build
from minillm.teaching.compare_outputs import difference, parts_of
from minillm.teaching.course import read_notebook
from minillm.teaching.notebook import for_learner, to_text
from minillm.teaching.rerun import rerun

SOLUTION = Path("solutions/90_sample.ipynb")
SOURCE = Path("solutions/90_sample.py")
CARD = '<svg data-testid="card"><title>Rounds</title><g data-state="{state}"><text>{text}</text></g></svg>'
CHART = "application/vnd.plotly.v1+json"


def shown(**data: object) -> list[nbformat.NotebookNode]:
    """The outputs of a cell that displays these kinds of data."""
    kinds = {"svg": "image/svg+xml", "html": "text/html", "plain": "text/plain", "chart": CHART}
    return [nbformat.v4.new_output("display_data", {kinds[kind]: value for kind, value in data.items()})]


def card(text: str = "2.42 tokens per forward", state: str = "accepted") -> list[nbformat.NotebookNode]:
    return shown(svg=CARD.format(text=text, state=state))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_fresh_solution_gives_what_was_recorded(course, no_kernel):
    assert rerun(course) == []


def test_stale_number_in_a_live_picture_is_found_although_the_quick_check_and_nbval_pass(course, no_kernel):
    """The bytes of the lesson agree with the recorded picture, and nbval looks at no frame after the first."""
    change(course / SOLUTION, "Bars of [2, 6]", "Bars of [2, 7]")
    lesson = course / "lessons" / "90_sample.ipynb"
    lesson.write_text(to_text(for_learner(read_notebook(course / SOLUTION))))
    assert build(course, check=True) == []
    [stale] = rerun(course, ["90"])
    assert str(stale) == (
        "solutions/90_sample.ipynb: cell 7, run again: 'Bars of [2, 7]' is recorded, 'Bars of [2, 6]' is computed. "
        "Run: minillm build 90_sample"
    )


def test_stale_print_is_found_and_the_command_fails(course, no_kernel, capsys):
    change(course / SOLUTION, "loading 100%\\n", "loading 99%\\n")
    assert cli.main(["build", "--check", "--root", str(course)]) == 0
    assert cli.main(["build", "--check", "--run", "--jobs", "2", "--root", str(course)]) == 1
    assert "cell 8, run again: 'loading 99%' is recorded, 'loading 100%' is computed" in capsys.readouterr().err


def test_lessons_run_side_by_side_and_are_told_in_order(course, no_kernel, monkeypatch):
    """The first lesson ends after the second has: run one after the other, they would never end."""
    for suffix in (".py", ".ipynb"):
        shutil.copy(course / SOURCE.with_suffix(suffix), course / "solutions" / f"91_late{suffix}")
    for name in ("90_sample", "91_late"):
        change(course / "solutions" / f"{name}.ipynb", "loading 100%", f"loading {name}")
    run, second_is_done = minillm.teaching.rerun.execute, threading.Event()

    def in_reverse(source: nbformat.NotebookNode, *args: object, **kwargs: object) -> nbformat.NotebookNode:
        if source.metadata.minillm.lesson == "91_late":
            second_is_done.set()
        assert second_is_done.wait(60)
        return run(source, *args, **kwargs)

    monkeypatch.setattr("minillm.teaching.rerun.execute", in_reverse)
    assert [stale.reason for stale in rerun(course, jobs=2)] == [
        "cell 8, run again: 'loading 90_sample' is recorded, 'loading 100%' is computed",
        "cell 8, run again: 'loading 91_late' is recorded, 'loading 100%' is computed",
    ]


def test_lesson_that_no_longer_runs_is_told_like_a_stale_one(course, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise LessonError("lesson 90_sample, cell 3: ImportError")

    monkeypatch.setattr("minillm.teaching.rerun.execute", broken)
    [stale] = rerun(course)
    assert stale.reason == "it does not run: lesson 90_sample, cell 3: ImportError"


def test_measured_claim_may_fail_while_comparing_but_not_while_recording(course):
    claims = 'from minillm.teaching import claim\nclaim("It is fast.", False, measured=True)\nmeasured = '
    change(course / SOURCE, "measured = ", claims)
    with pytest.raises(LessonError, match="It is fast"):
        build(course)
    assert "it does not run" not in " ".join(stale.reason for stale in rerun(course))


@pytest.mark.parametrize("option", [["--run"], ["--check", "--run", "--jobs", "0"]])
def test_run_without_check_or_without_a_job_is_refused(course, capsys, option):
    assert cli.main(["build", *option, "--root", str(course)]) == 2
    assert option[-2 if "--jobs" in option else -1] in capsys.readouterr().err


def test_number_in_a_picture_is_compared():
    assert difference(card(), card(), measured=False) == ""
    said = difference(card(), card("2.35 tokens per forward"), measured=False)
    assert said == "'2.42 tokens per forward' is recorded, '2.35 tokens per forward' is computed"


@pytest.mark.parametrize(
    ("recorded", "computed", "same"),
    [
        ("KL 1.1 at 4 bits", "KL 1.2 at 4 bits", True),
        ("KL 1.1 at 4 bits", "KL 1.3 at 4 bits", False),
        ("KL 1.1 at 4 bits", "KL 1.1 at 5 bits", False),
        ("KL 1.1 at 4 bits", "KL 1.10 at 4 bits", False),
        ("0.99 of 12", "1.00 of 12", True),
        ("2.42 tokens per forward", "2.35 tokens per forward", False),
    ],
)
def test_last_digit_of_a_decimal_may_round_the_other_way_but_counts_are_equal(recorded, computed, same):
    assert (not difference(card(recorded), card(computed), measured=False)) == same


def test_state_of_a_token_is_compared():
    assert "data-state=rejected" in difference(card(), card(state="rejected"), measured=False)


def test_part_that_came_or_went_is_told():
    assert "computed and not recorded" in difference([], card(), measured=False)
    assert "recorded and not computed" in difference(card(), [], measured=False)


def test_place_and_colour_and_script_of_a_picture_are_not_compared():
    plain = shown(html='<svg><text x="1" fill="#fff">4 pages</text></svg>')
    moved = shown(html="<style>a{b:1}</style><script>let n=7</script><svg><text y='9' id='t-7'>4  pages</text></svg>")
    assert difference(plain, moved, measured=False) == ""


def test_values_of_a_chart_are_compared_up_to_the_last_digits():
    def chart(y: float) -> list[nbformat.NotebookNode]:
        return shown(chart={"data": [{"name": "measured", "x": [0, 1], "y": [1, y], "line": {"width": y}}]})

    assert difference(chart(2.42), chart(2.42001), measured=False) == ""
    assert difference(chart(2.42), chart(2.35), measured=False) == "2.42 is recorded, 2.35 is computed"


def test_rounded_values_of_a_chart_may_round_the_other_way() -> None:
    def chart(value: float) -> list[nbformat.NotebookNode]:
        return shown(chart={"data": [{"x": [4], "y": [value]}]})

    assert not difference(chart(0.00099), chart(0.00098), measured=False)
    assert difference(chart(0.00099), chart(0.00097), measured=False)
    assert difference(chart(2.0), chart(3.0), measured=False)


@pytest.mark.parametrize("part", ["saved", "lost"])
def test_what_was_saved_or_lost_is_drawn_only_where_the_time_changed(part: str) -> None:
    bar, by_time = '<rect data-testid="bar"/>', f'<rect data-testid="{part}"/>'
    assert not difference(shown(svg=bar + by_time), shown(svg=bar), measured=True)
    assert difference(shown(svg=bar), shown(svg=""), measured=True)


def test_long_description_is_cut_to_where_it_differs():
    before, after = ("word " * 100 + f"{n} of 4 " + "word " * 100 for n in (2, 3))
    said = difference(card(before), card(after), measured=False)
    assert "2 of 4" in said
    assert "3 of 4" in said
    assert len(said) < 300


def test_measured_cell_may_print_and_draw_other_numbers_but_not_other_things():
    def measured(series: str, milliseconds: int) -> list[nbformat.NotebookNode]:
        lines = f'<text>{milliseconds} ms</text><g data-series="{series}"/>'
        return shown(svg=f"<svg data-testid='chart'>{lines}</svg>", plain=f"{milliseconds} ms")

    assert difference(measured("batch 8", 31), measured("batch 8", 35), measured=True) == ""
    assert "data-series=draft" in difference(measured("draft", 31), measured("target", 35), measured=True)


def test_parts_are_words_and_data_in_the_order_of_the_document():
    assert parts_of(CARD.format(text="a &lt; b", state="free")) == [
        "data-testid=card",
        "Rounds",
        "data-state=free",
        "a < b",
    ]
