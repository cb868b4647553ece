"""Write the pictures of the solved lessons as SVG files, for slides.

    python -m instructors.pictures OUT          all lessons
    python -m instructors.pictures OUT 02 10    some

Each file is `OUT/02_kv_cache-3.svg`; `OUT/index.html` shows all of them under the headings of their lessons. The
pictures are those of the recorded runs: nothing is run. They have a white background and stay sharp at any size.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from nbformat import NotebookNode

from instructors.lesson_plan import ROOT
from minillm.errors import MinillmError
from minillm.teaching.course import choose, read_notebook

SVG = "http://www.w3.org/2000/svg"
_TAG = re.compile(r"<svg\b|</svg>")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Picture:
    """A picture of a lesson. `heading`: the last one above it; `title`: what it shows, in words."""

    name: str
    heading: str
    title: str
    svg: str


def pictures(notebook: NotebookNode, lesson: str) -> list[Picture]:
    """The different pictures in the outputs of a notebook, in order."""
    found: list[Picture] = []
    seen: set[str] = set()
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = ([heading, *_HEADING.findall(cell.source)])[-1]
            continue
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown = list(_outermost(data.get("text/html", "")))  # a replay shows two, and only one of them as an image
            for svg in shown or _outermost(data.get("image/svg+xml", "")):
                if svg not in seen:
                    seen.add(svg)
                    found.append(_picture(f"{lesson}-{len(found) + 1}", heading, svg))
    return found


def write(folder: Path, names: list[str] | None = None, root: Path = ROOT) -> list[Path]:
    """Write the pictures of these lessons (None: all), and a page that shows them, into `folder`.

    Raises:
        LessonError: no lesson has that name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, page = [], []
    for lesson in choose(root, names):
        notebook = read_notebook(lesson.solution)
        for picture in pictures(notebook, lesson.name) if notebook is not None else []:
            written.append(folder / f"{picture.name}.svg")
            written[-1].write_text(picture.svg + "\n", encoding="utf-8")
            caption = html.escape(f"{picture.name}: {picture.heading}")
            image = f'<img src="{picture.name}.svg" alt="{html.escape(picture.title)}" style="max-width: 100%">'
            page.append(f"<figure><figcaption>{caption}</figcaption>{image}</figure>")
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Pictures of the lessons</title>\n'
    (folder / "index.html").write_text(head + "\n".join(page) + "\n</html>\n", encoding="utf-8")
    return [*written, folder / "index.html"]


def _outermost(text: str) -> Iterator[str]:
    """The `<svg>` elements of a text that are not inside another one."""
    depth = begin = 0
    for tag in _TAG.finditer(text):
        if tag[0] == "</svg>":
            depth -= 1
            if depth == 0:
                yield text[begin : tag.end()]
        else:
            begin, depth = (begin if depth else tag.start()), depth + 1


def _picture(name: str, heading: str, svg: str) -> Picture:
    if "xmlns=" not in svg.partition(">")[0]:
        svg = svg.replace("<svg", f'<svg xmlns="{SVG}"', 1)
    root = ElementTree.fromstring(svg)
    title = root.findtext(f"{{{SVG}}}title") or root.get("aria-label") or heading
    return Picture(name, heading, title, svg)


def main(arguments: list[str] | None = None) -> int:
    """Write the pictures. Returns 2 if a lesson does not exist."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m instructors.pictures", description=__doc__, formatter_class=form)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the pictures")
    parser.add_argument("lessons", nargs="*", metavar="LESSON", help="which lessons (default: all)")
    args = parser.parse_args(arguments)
    try:
        written = write(args.out, args.lessons or None)
    except (MinillmError, OSError) as problem:
        print(f"pictures: {problem}", file=sys.stderr)
        return 2
    print(f"{len(written) - 1} pictures, {sum(path.stat().st_size for path in written) / 1e6:.1f} MB: {written[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
