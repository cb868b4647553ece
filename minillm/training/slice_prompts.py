"""Write the prompts of `minillm bench speculation`: pieces of held-out files, sorted by what a model is asked to write.

functions    a signature                            the body follows
docstrings   a signature and its docstring          the body follows
edits        a function, and a renamed copy begun   the copy follows, with one name changed
tests        a function, and its test begun         the test follows
imports      the first half of a file's imports     the others follow
new code     text whose continuation repeats least  nothing that was said before follows
long files   the beginning of a long file           whatever follows

`write_slice_prompts(Path("runs/corpus"), Path("minillm/bench/slice_prompts.jsonl"))` writes the bundled file anew, from
the corpus of `minillm train --stages corpus`. No command does: other prompts would make earlier measurements useless.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LONG_CHARS = 14_000
"""About 3,500 tokens: a run cuts off what its model has no room for."""
BEFORE = 800
"""Most characters before a signature."""
AHEAD = 240
"""Characters of a file that should repeat little of the `2 * BEFORE` characters before them."""


def lines_of(text: str) -> list[str]:
    """The lines of `text`, with their line ends, numbered as by `ast`: `str.splitlines` splits at form feeds, too."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


@dataclass(frozen=True)
class File:
    """A held-out source file."""

    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its lines, with their line ends."""
        return lines_of(self.text)


def write_slice_prompts(corpus: Path, path: Path, each: int = 8, only: Sequence[str] | None = None) -> None:
    """Write `each` prompts of every slice as JSON lines, from as many files as possible, `only` those named."""
    with gzip.open(corpus / "held_out.jsonl.gz", "rt", encoding="utf-8") as lines:
        files = [File(row["name"], row["text"]) for row in map(json.loads, lines)]
    files = [file for file in files if only is None or file.name in only]
    rows = []
    for name, find in SLICES.items():
        for file, prompt in _spread(files, find, each):
            rows.append(json.dumps({"slice": name, "source": file.name, "prompt": prompt}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _spread(files: Sequence[File], find: Callable[[File], Iterator[str]], count: int) -> Iterator[tuple[File, str]]:
    """The first prompt of each file, then the second of each, until there are `count`."""
    found = [(file, list(find(file))) for file in sorted(files, key=lambda file: file.name)]
    if find is _new_code:  # those that repeat least
        found = sorted(((f, p[:1]) for f, p in found if p), key=lambda pair: _repeated(pair[0], pair[1][0]))
    turns = max((len(prompts) for _, prompts in found), default=0)
    in_turn = [(file, prompts[turn]) for turn in range(turns) for file, prompts in found if turn < len(prompts)]
    yield from in_turn[:count]


def _functions_of(file: File) -> Iterator[ast.FunctionDef]:
    """Functions of 5 to 40 lines whose body starts on a line of its own."""
    for node in ast.walk(ast.parse(file.text)):
        is_function = isinstance(node, ast.FunctionDef) and 5 <= node.end_lineno - node.lineno <= 40
        if is_function and node.body[0].lineno > node.lineno:
            yield node


def _until(file: File, line: int) -> str:
    """The text before the 1-based `line`, from a line start at most `BEFORE` characters earlier."""
    before = "".join(file.lines[: line - 1])
    return before if len(before) <= BEFORE else before[-BEFORE:].partition("\n")[2]


def _functions(file: File) -> Iterator[str]:
    for node in _functions_of(file):
        if ast.get_docstring(node) is None:
            yield _until(file, node.body[0].lineno)


def _docstrings(file: File) -> Iterator[str]:
    for node in _functions_of(file):
        if ast.get_docstring(node) and len(node.body) > 1 and node.body[0].end_lineno - node.body[0].lineno >= 2:
            yield _until(file, node.body[0].end_lineno + 1)


def _source(file: File, node: ast.FunctionDef) -> str:
    source = "".join(file.lines[node.lineno - 1 : node.end_lineno])
    return re.sub(f"^{' ' * node.col_offset}", "", source, flags=re.MULTILINE)


def _edits(file: File) -> Iterator[str]:
    for node in _functions_of(file):
        source, names = _source(file, node), [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
        used = [name for name in names if len(re.findall(rf"\b{name}\b", source)) >= 3]
        if used and len(source) < 2 * BEFORE:
            edited = re.sub(rf"\b{used[0]}\b", f"new_{used[0]}", source)
            yield source + "\n\n" + "".join(lines_of(edited)[: node.body[0].lineno - node.lineno])


def _tests(file: File) -> Iterator[str]:
    for node in _functions_of(file):
        source = _source(file, node)
        if not node.name.startswith("_") and len(source) < 2 * BEFORE:
            yield f"{source}\n\ndef test_{node.name}():\n"


def _imports(file: File) -> Iterator[str]:
    lines = [n.lineno for n in ast.parse(file.text).body if isinstance(n, ast.Import | ast.ImportFrom)]
    if len(lines) >= 6:
        yield _until(file, lines[len(lines) // 2])


def _new_code(file: File) -> Iterator[str]:
    """The place of a file after which least repeats."""
    starts = [m.end() for m in re.finditer(r"\n", file.text) if 2 * BEFORE < m.end() < len(file.text) - AHEAD]
    if starts:
        yield min((file.text[max(0, at - 2 * BEFORE) : at] for at in starts[::5]), key=lambda p: _repeated(file, p))


def _repeated(file: File, prompt: str) -> float:
    """The share of the word triples of the text after `prompt` that `prompt` has too."""
    at = file.text.index(prompt) + len(prompt)
    triples = _triples(file.text[at : at + AHEAD])
    return sum(triple in _triples(prompt) for triple in triples) / max(1, len(triples))


def _triples(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+|[^\w\s]", text)
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def _long_files(file: File) -> Iterator[str]:
    if len(file.text) > LONG_CHARS + 2000:
        yield file.text[:LONG_CHARS].rpartition("\n")[0] + "\n"


SLICES: dict[str, Callable[[File], Iterator[str]]] = {
    "functions": _functions,
    "docstrings": _docstrings,
    "edits": _edits,
    "tests": _tests,
    "imports": _imports,
    "new code": _new_code,
    "long files": _long_files,
}
"""Name → the prompts that a file gives."""
