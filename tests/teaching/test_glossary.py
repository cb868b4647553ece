"""The glossary: what an entry is, how lessons link to it, and what a link to nothing gets."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from minillm.errors import LessonError
from minillm.teaching.build import build
from minillm.teaching.glossary import FILE, page, terms
from minillm.teaching.lint import cited_but_absent, refuse_dead_links
from minillm.teaching.notebook import for_learner, read_source

ROOT = Path(__file__).parents[2]
SOURCE = "# %% [markdown]\n# # 92. Links\n# A [panel](glossary.md#panel) and [lesson 2](02_kv_cache.ipynb).\n"


def notebook(text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])


def test_words_that_readers_stumbled_over_have_an_entry():
    known = {term.name for term in terms()}
    assert {"panel", "tile", "LSE", "cached", "slot mapping", "bonus token", "KV cache"} <= known
    assert len(known) >= 60


def test_every_entry_is_one_or_two_sentences_with_an_anchor_of_its_own():
    for term in terms():
        assert term.meaning.endswith("."), term.name
        assert term.meaning.count(". ") <= 2, term.name
    assert len({term.anchor for term in terms()}) == len(terms())


def test_entry_names_its_lesson_only_if_there_is_one():
    made = page({15: "15_under_100_ms.ipynb"})
    assert '### <a id="panel"></a>panel' in made
    assert "in order. ([lesson 15](15_under_100_ms.ipynb))" in made
    assert '<a id="kv-cache"></a>KV cache' in made
    assert "lesson 2" not in made


def test_lessons_of_the_glossary_exist():
    numbers = {int(path.stem[:2]) for path in (ROOT / "solutions").glob("[0-9]*.py")}
    assert {term.lesson for term in terms()} - {None} <= numbers


@pytest.mark.parametrize("source", sorted((ROOT / "solutions").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_lesson_links_its_important_words_each_once(source):
    linked = re.findall(rf"\]\({FILE}#([\w-]+)\)", source.read_text(encoding="utf-8"))
    assert len(linked) >= 5
    assert len(set(linked)) == len(linked)


def test_link_leads_to_the_page_from_the_lesson_and_from_the_solution(tmp_path):
    (tmp_path / "92_links.py").write_text(SOURCE)
    (tmp_path / "02_kv_cache.py").touch()
    solution = read_source(tmp_path / "92_links.py")
    assert "[panel](../lessons/glossary.md#panel)" in solution.cells[0].source
    assert "[panel](glossary.md#panel)" in for_learner(solution).cells[0].source


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("glossary.md#pannel", "no term 'pannel'; did you mean 'panel'"),
        ("glossary.md#Panel", "no term 'Panel'; did you mean 'panel'"),
        ("11_speed.ipynb", "'11_speed.ipynb' points to nothing"),
        ("notes.txt", "'notes.txt' points to nothing"),
    ],
)
def test_link_to_nothing_is_refused(tmp_path, link, says):
    with pytest.raises(LessonError, match=f"91_sample, cell 3: .*{says}"):
        refuse_dead_links(f"See [this]({link}).", "91_sample, cell 3", tmp_path)


def test_addresses_and_places_on_the_page_and_code_are_left_alone(tmp_path):
    refuse_dead_links("[a](https://x.org) [b](#here)\n```\n[c](nothing)\n```", "cell 1", tmp_path)


def test_lesson_that_is_cited_but_does_not_exist_is_found():
    text = "Lesson 2 and lessons 4, 6 and 13 say why; lessons 3 to 5 too.\n\nIn Lesson 10, or `lesson 99`."
    found = cited_but_absent(notebook(text), {2, 3, 4, 5, 6})
    assert found == [f"cell 1 cites lesson {n}, which does not exist" for n in (10, 13, 99)]


def test_check_reports_a_cited_lesson_that_does_not_exist(course, no_kernel):
    source = course / "solutions" / "90_sample.py"
    source.write_text(source.read_text().replace("Everything the build", "As lesson 91 tells. Everything the build"))
    build(course)
    [stale] = build(course, check=True)
    assert stale.path == Path("solutions/90_sample.py")
    assert stale.reason == "cell 1 cites lesson 91, which does not exist"


def test_check_reports_a_glossary_edited_by_hand(course):
    place = course / "lessons" / "glossary.md"
    place.write_text(place.read_text() + "more")
    [stale] = build(course, check=True)
    assert (str(stale.path), stale.fix) == ("lessons/glossary.md", "minillm build")
