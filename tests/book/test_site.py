from __future__ import annotations

import ast
import os
import re
import shutil
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from minillm import __version__
from minillm.book import site
from minillm.book.replays import take_scripts
from minillm.book.site import build_book, write_pages
from minillm.book.techniques import markdown, techniques
from minillm.cache.layouts import LAYOUTS, find_layout
from minillm.commands.parser import parser
from minillm.config import CacheConfig, EngineArgs
from minillm.errors import ConfigError, LessonError
from minillm.quantization.schemes import SCHEMES
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.methods import METHODS
from minillm.teaching.course import choose

ROOT = Path(__file__).parents[2]


def test_every_lesson_and_every_technique_has_a_page(book: Path) -> None:
    assert {p.stem for p in (book / "lessons").glob("[0-9]*.html")} == {lesson.name for lesson in choose(ROOT)}
    paths = {technique.path for technique in techniques()}
    for kind in (*LAYOUTS.values(), *SCHEMES.values(), *METHODS.values()):
        assert kind.__module__.replace(".", "/") + ".py" in paths
    for technique in techniques():
        assert technique.summary
        assert (book / "techniques" / f"{technique.page}.html").exists()


def test_what_a_page_tells_to_type_is_accepted() -> None:
    shown = [technique.use for technique in techniques() if technique.use]
    assert len(shown) == len({kind.__module__ for kind in (*LAYOUTS.values(), *SCHEMES.values(), *METHODS.values())})
    for use in shown:
        if use.startswith("minillm "):
            parser().parse_args(use.split()[1:])
            continue
        call = ast.parse(use, mode="eval").body
        assert isinstance(call, ast.Call)
        options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        args = EngineArgs.from_options("minicoder", options)
        find_layout(CacheConfig.from_options(args.kv_cache_dtype, args.kv_cache_config))
        if args.speculative_config:
            SpeculativeConfig.from_dict(args.speculative_config)


def test_nothing_is_loaded_from_the_network(book: Path) -> None:
    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["'](https?:)?//""")
    for page in book.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page.name


def test_formulas_are_drawn_by_the_browser(book: Path) -> None:
    page = (book / "lessons" / "11_speculative_speed.html").read_text(encoding="utf-8")
    assert "<math" in page
    assert "\\frac" not in page


def test_a_link_to_the_glossary_leads_to_its_entry(book: Path) -> None:
    page = (book / "lessons" / "06_paged_blocks.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'href="\.\./glossary\.html#([\w-]+)"', page))
    assert "copy-on-write" in anchors
    glossary = (book / "glossary.html").read_text(encoding="utf-8")
    assert not {anchor for anchor in anchors if f'id="{anchor}"' not in glossary}


def test_a_file_of_the_reading_path_is_a_link_to_its_code(book: Path) -> None:
    assert 'href="source/minillm.engine.scheduler.html"' in (book / "engine.html").read_text(encoding="utf-8")
    assert "def schedule" in re.sub("<[^>]+>", "", (book / "source" / "minillm.engine.scheduler.html").read_text())


def test_a_book_is_replaced_and_other_folders_are_not(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "_sphinx", lambda pages, html, *_: html.mkdir() or [])
    kept = tmp_path / "notes"
    kept.mkdir()
    (kept / "diary.txt").write_text("dear diary")
    with pytest.raises(LessonError, match="not a book"):
        build_book(ROOT, kept)
    assert (kept / "diary.txt").exists()
    with pytest.raises(LessonError, match=r"diary\.txt is a file; --out needs the name of a folder"):
        build_book(ROOT, kept / "diary.txt")
    assert (kept / "diary.txt").read_text() == "dear diary"
    old = tmp_path / "old"
    shutil.copytree(book, old)
    build_book(ROOT, old, replays=())
    assert not (old / "index.html").exists()


def test_pages_are_kept_only_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "write_pages", lambda root, pages, *_: (pages / "page.md").write_text("new"))
    monkeypatch.setattr(site, "_sphinx", lambda pages, html, *_: html.mkdir() or [])
    clone, pages = tmp_path / "clone", tmp_path / "pages"
    clone.mkdir()
    (clone / "page.md").write_text("my answers")
    with pytest.raises(LessonError, match="clone is not empty and is not a book; name another folder with --sources"):
        build_book(ROOT, tmp_path / "site", sources=clone)
    with pytest.raises(LessonError, match=r"page\.md is a file; --sources needs the name of a folder"):
        build_book(ROOT, tmp_path / "site", sources=clone / "page.md")
    assert (clone / "page.md").read_text() == "my answers"
    assert not (tmp_path / "site").exists()
    for _ in range(2):
        build_book(ROOT, tmp_path / "site", sources=pages)
        assert {file.name for file in pages.iterdir()} == {"page.md", site.MARKER}
        assert (pages / "page.md").read_text() == "new"
        (pages / "lessons").mkdir()
        (pages / "lessons" / "00_an_old_name.ipynb").touch()


@pytest.mark.parametrize(("out", "sources"), [("x", "x"), ("x", "x/pages"), ("x/site", "x"), ("x", "link")])
def test_the_site_and_its_pages_are_in_two_folders(
    out: str, sources: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the site would delete the pages, or the pages hold the site."""
    monkeypatch.setattr(site, "write_pages", lambda root, pages, *_: (pages / "page.md").write_text("new"))
    monkeypatch.setattr(site, "_sphinx", lambda pages, html, *_: html.mkdir() or [])
    (tmp_path / "link").symlink_to("x")
    with pytest.raises(ConfigError, match=f"--sources .*{sources}: one is in the other; name two folders"):
        build_book(ROOT, tmp_path / out, sources=tmp_path / sources)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("step", ["rmtree", "copytree"])
def test_a_book_that_could_not_be_written_to_the_end_is_replaced(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sphinx(pages: Path, html: Path, *_: object) -> list[str]:
        html.mkdir()
        (html / "index.html").write_text("new")
        return []

    def cut_off(*folders: Path | str, **options: object) -> None:
        real(*folders, **options)
        if Path(folders[-1]).is_relative_to(out):  # others are temporary
            out.mkdir(exist_ok=True)
            (out / "half.html").write_text("half")
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(site, "write_pages", lambda *_: None)
    monkeypatch.setattr(site, "_sphinx", sphinx)
    real, out = getattr(shutil, step), tmp_path / "site"
    (out / "lessons").mkdir(parents=True)
    (out / site.MARKER).touch()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(shutil, step, cut_off)
        build_book(ROOT, out)
    build_book(ROOT, out)
    assert {file.name for file in out.iterdir()} == {"index.html", site.MARKER}


def test_a_link_in_a_book_is_removed_and_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "write_pages", lambda *_: None)
    monkeypatch.setattr(site, "_sphinx", lambda pages, html, *_: html.mkdir() or [])
    out, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    for folder in (out / "v1", elsewhere):
        folder.mkdir(parents=True)
        (folder / "page.html").touch()
    (out / site.MARKER).touch()
    (out / "latest").symlink_to(out / "v1")
    (out / "a").symlink_to(elsewhere)
    build_book(ROOT, out)
    assert [file.name for file in out.iterdir()] == [site.MARKER]
    assert (elsewhere / "page.html").exists()


def test_a_clone_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    assert site.settings("")["version"] == __version__


def test_a_folder_without_solved_lessons_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LessonError, match="no solved lessons"):
        build_book(tmp_path, tmp_path / "site")


def test_a_published_repository_gives_badges(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "solutions").mkdir(parents=True)
    for name in ("00_tour.py", "00_tour.ipynb"):
        shutil.copy(ROOT / "solutions" / name, clone / "solutions")
    for name in ("README.md", "minillm"):
        (clone / name).symlink_to(ROOT / name)
    (clone / "pyproject.toml").write_text('[tool.minillm]\nrepository = "https://github.com/a/b"\ntag = "v1"\n')
    write_pages(clone, tmp_path / "pages", replays=())
    page = (tmp_path / "pages" / "lessons" / "00_tour.ipynb").read_text(encoding="utf-8")
    assert "colab.research.google.com/github/a/b/blob/v1/lessons/00_tour.ipynb" in page
    assert "google.colab" not in page  # the cell that installs on Colab


def test_a_docstring_means_what_it_says() -> None:
    text = markdown("Two * three * four, a_b and `a_b` [x].\n\n    code * here\n\n    more\n\nEnd <b>.")
    assert text == (
        "Two \\* three \\* four, a\\_b and `a_b` \\[x\\].\n\n\n```text\ncode * here\n\nmore\n```\n\nEnd \\<b\\>."
    )


def test_a_replay_takes_the_place_of_its_still_and_nothing_else_changes() -> None:
    def notebook(*outputs: str) -> NotebookNode:
        cells = [
            nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", {"text/html": html})])
            for html in outputs
        ]
        return nbformat.v4.new_notebook(cells=cells)

    still, playing = '<div class="minillm-replay-place">', '<div class="minillm-replay-place"><script>go()</script>'
    saved = notebook("3 ms", still, still)
    take_scripts(saved, notebook("4 ms", playing, still))
    assert [cell.outputs[0].data["text/html"] for cell in saved.cells] == ["3 ms", playing, still]
