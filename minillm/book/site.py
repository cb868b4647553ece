"""`minillm book`: the solved lessons, the techniques and the engine's code as a static site, built by Sphinx.

The pages are written as markdown and notebooks into a folder of sources (`chapters`, `techniques`, `source_pages`);
Sphinx with MyST-NB turns them into HTML. A page shows the outputs that its notebook recorded. Only the lessons that
show a replay run again, because the recording is not saved in the notebook. Replays play in the browser, without a
kernel. The site needs no network: formulas are MathML, and scripts and fonts are its own.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from minillm.book.chapters import read_chapters, write_chapters, write_glossary
from minillm.book.dark_theme import dark_css
from minillm.book.front import write_front
from minillm.book.readme_pages import write_readme_pages
from minillm.book.replays import add_replays
from minillm.book.source_pages import SourcePages
from minillm.book.techniques import write_techniques
from minillm.errors import ConfigError, LessonError
from minillm.teaching.course import choose
from minillm.teaching.publication import read_home
from minillm.version import __version__

STATIC = Path(__file__).with_name("static")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
MARKER = ".minillm-book"
"""A file that marks a folder as written by `minillm book`, so that it may be replaced."""


def build_book(
    root: Path, out: Path, replays: Collection[str] | None = None, jobs: int = 1, sources: Path | None = None
) -> list[str]:
    """Build the site of the clone `root` into the folder `out`. Returns Sphinx's warnings, one per line.

    `replays`: the lessons whose replays play (`["00_tour"]`); None: all; others show a still picture. `jobs`: how many
    lessons run at a time. `sources`: where to write the pages as markdown; default: a temporary folder.

    Raises `LessonError` if `root` has no solved lessons or `out` or `sources` is a file or holds something else than a
    book, `ConfigError` if one of these two is in the other.
    """
    if not (root / "solutions").is_dir():
        raise LessonError(f"{root.resolve()} has no solved lessons; run this in a clone, or name one with --root")
    _check_folder("--out", out)
    if sources is not None:
        _check_folder("--sources", sources)
        site, kept = out.resolve(), sources.resolve()
        if site in (kept, *kept.parents) or kept in site.parents:
            raise ConfigError(f"--out {out} and --sources {sources}: one is in the other; name two folders")
    with tempfile.TemporaryDirectory() as scratch:
        pages = sources or Path(scratch) / "pages"
        _empty(pages)
        write_pages(root, pages, replays, jobs)
        html = Path(scratch) / "html"
        warnings = _sphinx(pages, html, Path(scratch) / "doctrees", read_home(root).repository)
        _empty(out)
        shutil.copytree(html, out, dirs_exist_ok=True)
    return warnings


def _check_folder(option: str, folder: Path) -> None:
    """Raise `LessonError` for a file, or a folder that is neither empty nor written by `minillm book`."""
    if folder.exists() and not folder.is_dir():
        raise LessonError(f"{folder} is a file; {option} needs the name of a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise LessonError(f"{folder} is not empty and is not a book; name another folder with {option}, or empty it")


def _empty(folder: Path) -> None:
    """Make the folder, or delete all in it but the marker, so that it may be replaced after an interrupt too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    for old in sorted(folder.iterdir()):
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif old.name != MARKER:
            old.unlink()


def write_pages(root: Path, pages: Path, replays: Collection[str] | None = None, jobs: int = 1) -> None:
    """Write every page of the book of the clone `root` into the folder `pages`, as markdown and notebooks."""
    pages.mkdir(parents=True, exist_ok=True)
    home, lessons = read_home(root), choose(root)
    source_pages = SourcePages(root, pages)
    chapters = read_chapters(lessons)
    add_replays(
        [(lesson, notebook) for lesson, notebook in chapters if replays is None or lesson.name in replays], jobs
    )
    write_chapters(chapters, pages / "lessons", home)
    write_glossary(lessons, pages / "glossary.md")
    write_readme_pages(root, pages, source_pages)
    techniques = write_techniques(pages / "techniques", source_pages)
    source_pages.write_index()
    shutil.copytree(STATIC, pages / "_static", dirs_exist_ok=True)
    (pages / "_static" / "dark.css").write_text(dark_css(), encoding="utf-8")
    write_front(chapters, techniques, pages)


def _sphinx(pages: Path, html: Path, doctrees: Path, repository: str) -> list[str]:
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    log = html.with_name("warnings.txt")
    with log.open("w+", encoding="utf-8") as warnings, patch_docutils(), docutils_namespace():
        app = Sphinx(
            srcdir=str(pages),
            confdir=None,
            outdir=str(html),
            doctreedir=str(doctrees),
            buildername="html",
            confoverrides=settings(repository),
            status=None,
            warning=warnings,
        )
        app.build()
        warnings.seek(0)
        return [_COLOUR.sub("", line) for line in warnings.read().splitlines() if line.strip()]


def settings(repository: str) -> dict[str, object]:
    """Sphinx's settings, which a `conf.py` would hold."""
    theme: dict[str, object] = {
        "navigation_with_keys": False,
        "show_prev_next": True,
        "navbar_align": "content",
        "header_links_before_dropdown": 4,
        "secondary_sidebar_items": ["page-toc"],
        "footer_start": ["copyright"],
        "footer_end": [],
        "show_toc_level": 2,
    }
    if repository:
        theme["icon_links"] = [{"name": "Source", "url": repository, "icon": "fa-solid fa-code", "type": "fontawesome"}]
    return {
        "project": "minillm",
        "html_title": "minillm",
        "copyright": "minillm, Apache License 2.0",
        "version": __version__,
        "extensions": ["myst_nb", "minillm.book.mathml"],
        "html_theme": "pydata_sphinx_theme",
        "html_theme_options": theme,
        "html_math_renderer": "mathml",
        "html_static_path": ["_static"],
        "html_css_files": ["book.css", "dark.css"],
        "html_show_sourcelink": False,
        "html_copy_source": False,
        "myst_enable_extensions": ["dollarmath"],
        "myst_heading_anchors": 3,
        "nb_execution_mode": "off",
        "nb_merge_streams": True,
        "nb_mime_priority_overrides": [
            ["html", "application/vnd.plotly.v1+json", None],
            ["html", "text/html", 0],
            ["html", "image/svg+xml", 10],
        ],
        "suppress_warnings": ["mystnb.unknown_mime_type"],
    }
