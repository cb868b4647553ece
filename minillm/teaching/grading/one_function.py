"""In a submission's runner: read a file's cells, or run one function on the cases of one exercise.

No answer to the exercise is in this process. The function runs in a child of it (`minillm.teaching.guard`), whose
messages this process passes on as they are.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, field, replace

from minillm.teaching.attempt import Outcome, call
from minillm.teaching.exercise import Case, Interface
from minillm.teaching.grading import cells as notebook_cells
from minillm.teaching.grading import values
from minillm.teaching.grading.cells import Cell
from minillm.teaching.grading.messages import (
    RUNNER_FAILED,
    Answered,
    Began,
    Cells,
    Ended,
    Error,
    Found,
    Loaded,
    NotLoaded,
    Unreadable,
    pack,
)
from minillm.teaching.grading.program import Program, Statement, is_stub, load, parse
from minillm.teaching.grading.similarity import shapes_of
from minillm.teaching.guard import ChildExit, Limits, Send, run_guarded
from minillm.teaching.pipe_messages import write_frame
from minillm.teaching.raised import Raised, Sort

MAX_TEXT = 2_000


@dataclass(frozen=True)
class ReadJob:
    """Read the cells of a file."""

    data: bytes
    name: str


@dataclass(frozen=True)
class RunJob:
    """Run the function `name` of a notebook on the cases of an exercise. `references`: the text of those that `use`
    returns, by exercise; never that of this exercise."""

    cells: list[Cell]
    name: str
    interface: Interface
    cases: tuple[Case, ...]
    limits: Limits
    references: dict[str, str] = field(default_factory=dict)


Job = ReadJob | RunJob


def do(job: Job, pipe: int) -> None:
    """Do the job; write its messages to `pipe`."""
    if isinstance(job, ReadJob):
        write_frame(pipe, pack(_read(job)))
        return
    death = run_guarded(
        lambda send: _work(job, pipe, send), lambda message: _forward(pipe, message), job.limits, only_bytes=True
    )
    if death is not None:
        death = replace(death, library_message=_cut(death.library_message))
    write_frame(pipe, pack(Ended(death)))


def fault(pipe: int, text: str) -> None:
    """Tell that the runner itself failed: by a fault of ours, or because the function broke it."""
    death = ChildExit(raised=RUNNER_FAILED, library_message=_cut(text[-MAX_TEXT:]))
    write_frame(pipe, pack(Ended(death)))


def _read(job: ReadJob) -> Cells | Unreadable:
    try:
        found = notebook_cells.read(job.data, job.name)
    except notebook_cells.UnreadableError as problem:
        return Unreadable(_cut(str(problem)))
    program = parse(found)
    return Cells(
        sources=[tuple(cell) for cell in found],
        functions=sorted(program.functions),
        broken=[str(each) for each in program.broken],
        lesson=notebook_cells.lesson_in_metadata(job.data),
        shapes=shapes_of(program),
    )


def _forward(pipe: int, message: object) -> None:
    if isinstance(message, bytes):
        write_frame(pipe, message)


# ------------------------------------------------------------------------------------- in the child with the function


def _work(job: RunJob, pipe: int, send: Send) -> None:
    """Find the function, define it and call it; `send` gets packed messages."""
    _lower_hard_limit()
    os.close(pipe)
    program = parse(job.cells)
    definition = program.definition(job.name)
    found = _found(program, definition, job.name)
    send(pack(found))
    if found.state != "written" or definition is None:
        return
    try:
        definition, function = _loaded(program, job, definition)
    except Exception as error:
        send(pack(NotLoaded(_cut(f"{type(error).__name__}: {error}"))))
        return
    notes = [_cut(note) for note in dict.fromkeys(program.notes)][:20]
    send(pack(Loaded(notes)))
    for index, case in enumerate(job.cases):
        send(pack(Began(index)))
        outcome = call(job.interface, function, case)
        send(pack(_answered(index, outcome)))
        error = outcome.error
        if error is not None and (error.ends_check or error.sort is Sort.STUB):
            return


def _found(program: Program, definition: Statement | None, name: str) -> Found:
    if definition is not None and isinstance(definition.node, (ast.Import, ast.ImportFrom)):
        return Found("imported", _cut(ast.unparse(definition.node)))
    if definition is not None and not is_stub(definition.node):
        counts = {definition, program.function(name) or definition}  # see `_loaded`
        return Found("written", library=_library([each for one in counts for each in program.needed(one)]))
    if broken := program.broken_definition(name):
        return Found("broken", _cut(str(broken)))
    if name in program.in_loops:
        return Found("missing", "it is defined inside a loop, which is not run")
    return Found("missing" if definition is None else "stub")


def _loaded(program: Program, job: RunJob, definition: Statement) -> tuple[Statement, object]:
    """The function, and the statement that defines it: if `definition` assigns what cannot be called, or raises, the
    last function of this name. Raises what the definition raises."""
    last = program.function(job.name)
    try:
        function = load(program, job.name, definition, job.references)
        if callable(function) or last is None:
            return definition, function
        what = f"assigns a {type(function).__name__}"
    except Exception as error:
        if last in (None, definition):
            raise
        what = f"raises {type(error).__name__}"
    program.notes.append(f"{job.name} in cell {definition.cell} {what}; the function in cell {last.cell} counts")
    return last, load(program, job.name, last, job.references)


def _answered(index: int, outcome: Outcome) -> Answered:
    error = _told(outcome.error) if outcome.error is not None else None
    try:
        value = values.encode(outcome.value)
    except Exception as problem:  # too large, or an object whose own code fails
        told = _cut(f"its answer cannot be taken down: {problem}")
        value, error = values.encode(None), Error("ValueError", told, Sort.ERROR.name, "", "", "")
    return Answered(index, value, error, [str(name) for name in outcome.changed])


def _told(error: Raised) -> Error:
    texts = {name: _cut(getattr(error, name)) for name in ("kind", "message", "where", "cause", "mismatch")}
    sort = Sort.PROCESSES if isinstance(error.exception, BlockingIOError) else error.sort
    return Error(sort=sort.name, **texts)


def _cut(text: str) -> str:
    """At most `MAX_TEXT` characters, without what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()[:MAX_TEXT]


MODULE = re.compile(r"\bminillm(?:\.\w+)*")


def _library(statements: list[Statement]) -> list[str]:
    """What statements import from minillm, or may import by its name in a text that is no docstring:
    `minillm.cache.prefix.root_hash`."""
    found: list[str] = []
    for statement in statements:
        nodes = list(ast.walk(statement.node))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "minillm":
                found += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [alias.name for alias in node.names if alias.name.partition(".")[0] == "minillm"]
            elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and node not in docstrings:
                text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
                found += MODULE.findall(text)
    return sorted({_cut(name) for name in found})[:50]


def _lower_hard_limit() -> None:
    """`guard` sets the soft limit of memory; a function could raise it again up to the hard one."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
