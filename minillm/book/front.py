"""The front page: a run of the engine that plays by itself, and the contents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode

from minillm.book.replays import PLACE
from minillm.book.techniques import Technique
from minillm.errors import LessonError
from minillm.teaching.course import Lesson

FRONT = """\
---
html_theme.sidebar_secondary.remove: true
---
# How fast LLM inference works

An LLM inference engine whose core you can read in an afternoon, and {count} lessons in which you watch it run, take it
apart and build each part. Below, the engine answers prompts while you watch: requests own blocks of the KV cache, a
small model guesses tokens, and the large one accepts or rejects them.

```{{raw}} html
:file: replay.html
```

Every lesson here is solved, with the outputs of a real run. To work on the exercises, clone the repository and run
`make lab`.

## Contents

- [Lessons](lessons/index.md), each with its exercises solved
- [Read the engine](engine.md): the files in reading order, with their code
- [Techniques](techniques/index.md): {techniques} ways to store a cache, quantise weights, draft tokens and reuse work
- [What was measured](measured.md), and [how it is tested](tested.md)
- [Glossary](glossary.md)

```{{toctree}}
:hidden:

lessons/index
engine
techniques/index
measured
tested
glossary
source/index
```
"""


def write_front(chapters: Sequence[tuple[Lesson, NotebookNode]], techniques: Sequence[Technique], pages: Path) -> None:
    """Write `index.md` into `pages`. Raises `LessonError` if no output of the first lesson is a replay."""
    text = FRONT.format(count=len(chapters), techniques=len(techniques))
    replay = f'<div class="front-replay">{first_replay(*chapters[0])}</div>'
    (pages / "replay.html").write_text(replay, encoding="utf-8")
    (pages / "index.md").write_text(text, encoding="utf-8")


def first_replay(lesson: Lesson, notebook: NotebookNode) -> str:
    """The HTML of the first replay among the outputs of the lesson."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            html = output.get("data", {}).get("text/html", "")
            if PLACE in html:
                return html
    raise LessonError(f"{lesson.solution} has no replay for the front page; run: minillm build {lesson.number:02}")
