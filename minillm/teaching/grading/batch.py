"""Grade a folder of submissions: skip those that are done, several at a time, and never stop at a bad one."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec

from minillm.errors import ConfigError, UnsupportedError
from minillm.teaching.grading import grades
from minillm.teaching.grading.cells import MAX_FILE
from minillm.teaching.grading.grades import SCHEMA, ExerciseGrade, Status, Submission
from minillm.teaching.grading.one_submission import Grader, Rules
from minillm.teaching.grading.student_process import StudentProcess
from minillm.teaching.registry import of_lesson
from minillm.version import __version__

SUFFIXES = (".ipynb", ".py")
SKIPPED = (".ipynb_checkpoints", "__pycache__", "__MACOSX", "site-packages")
RESULTS = "submissions"
MAX_NAME = 80
MAX_NAMED = 3
"""Files that are named where none can be graded."""


@dataclass(frozen=True)
class File:
    """A submitted file. `name`: its path below the submissions. `student`: the folder it is in there, or its own name
    without suffix, or what a pattern takes from `name`. `problem`: why there is nothing to read, or ""."""

    path: Path
    name: str
    student: str
    problem: str = ""


def find(folder: Path, pattern: re.Pattern[str] | None = None) -> list[File]:
    """The submitted files below `folder`, by name. Links are not followed, and virtual environments left out.

    An entry of `folder` without such a file is in the list too, with its `problem`, so that no student is left out.
    The first group of `pattern`, matched at the beginning of a file's name below `folder`, is its student.

    Raises:
        ConfigError: there is no such folder, or no notebook in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the one with the submissions")
    found: list[File] = []
    for entry in folder.iterdir():
        if _is_hidden(entry.name):
            continue
        files = _files(entry)
        student = _readable(entry.name if not entry.is_symlink() and entry.is_dir() else entry.stem)
        submitted = [file for file in files if file.suffix.lower() in SUFFIXES and not _is_link(file)]
        problem = "" if submitted else _nothing_in(entry, files)
        for file in submitted or [entry]:
            name = _readable(file.relative_to(folder).as_posix())
            taken = pattern.match(name) if pattern else None
            found.append(File(file, name, (taken and taken[1]) or student, problem))
    if all(file.problem for file in found):
        raise ConfigError(f"{folder} has no file that ends in {' or '.join(SUFFIXES)}")
    return sorted(found, key=lambda file: file.path)


def _files(entry: Path) -> list[Path]:
    """All files at and below `entry`, links too, but none that is hidden or of a virtual environment."""
    if entry.is_symlink():
        return [entry]
    below = sorted(entry.rglob("*"))
    environments = {path.parent for path in below if path.name == "pyvenv.cfg" and path.parent != entry}
    return [
        path
        for path in (entry, *below)
        if _is_file(path)
        and not any(_is_hidden(part) for part in path.relative_to(entry.parent).parts)
        and environments.isdisjoint(path.parents)
    ]


def _is_file(path: Path) -> bool:
    """Whether `path` is a file or a link. So is what the system does not let us look at: `read` then says so."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _is_link(path: Path) -> bool:
    with suppress(OSError):
        return path.is_symlink()
    return False


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in SKIPPED


def _nothing_in(entry: Path, files: list[Path]) -> str:
    """Why an entry without a file to grade has none."""
    names = [f"{file.name} (a link, not followed)" if _is_link(file) else file.name for file in files]
    seen = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
    return _readable(f"no {' or '.join(SUFFIXES)} file; found {seen or 'nothing'}")


def _readable(name: str) -> str:
    """A file name as text; bytes that are no UTF-8 are replaced."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


Task = tuple[int, File, str]
"""Number of the file, the file, and the key of its result."""
Graders = Callable[[list[Task], Rules, str], Iterator[tuple[int, Submission]]]
"""Grades files somewhere else, by `(tasks, rules, mode)`: `minillm.cluster.grading` does so on other machines."""


def grade_all(
    files: Sequence[File],
    out: Path,
    rules: Rules,
    jobs: int = 1,
    mode: str = "",
    progress: Any = None,
    graders: Graders | None = None,
) -> list[Submission]:
    """The grades of `files`, in their order. If `rules` ask for lessons: only those for them (`_asked_for`); then those
    of students who handed in nothing for one of these lessons.

    Each file's is written to `out` as soon as it is there; those that are there already, with the same contents, rules
    and mode, are not graded again, unless they were interrupted.

    `jobs`: processes at a time. `mode`: see `StudentProcess`. `progress`: called as `progress(iterable, total=…)`.
    `graders`: who grades, in place of processes here.
    """
    folder = out / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    keys = [_key(file, rules, mode) for file in files]
    done: dict[int, Submission] = {}
    for number, (file, key) in enumerate(zip(files, keys, strict=True)):
        known = grades.read(folder / _result_name(file, key))
        if known is not None and not known.interrupted and (known.key, known.file) == (key, file.name):
            done[number] = known
    todo = [number for number in range(len(files)) if number not in done]
    tasks = [(number, files[number], keys[number]) for number in todo]
    graded = graders(tasks, rules, mode) if graders else _graded(tasks, rules, min(jobs, len(todo)), mode)
    for number, submission in progress(graded, total=len(todo)) if progress else graded:
        grades.write(folder / _result_name(files[number], keys[number]), submission)
        done[number] = submission
    every = [done[number] for number in range(len(files))]
    return [*_asked_for(every, rules.lessons), *_not_handed_in(every, rules.lessons)]


def _asked_for(every: list[Submission], lessons: Sequence[str]) -> list[Submission]:
    """The submissions without those that only hold other lessons than `lessons`, and without files that hold none, such
    as helpers, beside another one of the student's that is graded."""
    graded = {submission.student for submission in every if submission.exercises}
    return [
        submission
        for submission in every
        if not lessons
        or submission.exercises
        or submission.status is Status.UNREADABLE
        or not (submission.lessons or submission.student in graded)
    ]


def _not_handed_in(graded: Sequence[Submission], lessons: Sequence[str]) -> Iterator[Submission]:
    """For each student the exercises of those `lessons` that none of their files was graded on."""
    held: dict[str, set[str]] = {}
    for submission in graded:
        held.setdefault(submission.student, set()).update(submission.lessons)
    for student, there in held.items():
        missing = [lesson for lesson in lessons if lesson not in there]
        exercises = [
            ExerciseGrade(exercise=exercise.name, status=Status.NOT_ATTEMPTED, problem="no file is for this lesson")
            for lesson in missing
            for exercise in of_lesson(lesson)
        ]
        if exercises:
            made = {"student": student, "file": f"{student}: no file for {', '.join(missing)}", "key": ""}
            yield Submission(**made, status=Status.NOT_ATTEMPTED, lessons=missing, exercises=exercises)


def _graded(tasks: list[Task], rules: Rules, jobs: int, mode: str) -> Iterator[tuple[int, Submission]]:
    if jobs <= 1:
        if tasks:
            with grading_environment(), StudentProcess(0, mode) as process:
                grader = Grader(process, rules)
                for task in tasks:
                    yield task[0], _grade(grader, task)
        return
    context = multiprocessing.get_context("spawn")
    slots = context.Queue()
    for slot in range(jobs):
        slots.put(slot)
    pool = ProcessPoolExecutor(jobs, context, _prepare, (slots, rules, mode))
    with grading_environment():
        try:
            futures = [pool.submit(_grade_here, task) for task in tasks]
            for future in as_completed(futures):
                yield future.result()
        finally:  # after an interrupt, wait only for the tasks that the workers have already
            pool.shutdown(cancel_futures=True)


def _grade(grader: Grader, task: Task) -> Submission:
    _, file, key = task
    try:
        return grader.grade(read(file), file.student, file.name, key)
    except OSError as problem:
        return unreadable(file, key, problem)


def read(file: File) -> bytes:
    """The contents of a file. Raises `OSError` if there is none, if the system does not let us read it, or if it is too
    large."""
    if file.problem:
        raise OSError(file.problem)
    with file.path.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > MAX_FILE:
            raise OSError(errno.EFBIG, f"{size:,} bytes; the limit is {MAX_FILE:,}")
        return opened.read(MAX_FILE)


def unreadable(file: File, key: str, problem: OSError) -> Submission:
    """The result of a file that `read` does not read."""
    made = {"student": file.student, "file": file.name, "key": key}
    return Submission(**made, status=Status.UNREADABLE, reason=problem.strerror or str(problem))


_grader: list[Grader | UnsupportedError] = []
"""The grader of a worker process, or why it has none: an error of the initializer itself would only break the pool."""


def _prepare(slots: Any, rules: Rules, mode: str) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        process = StudentProcess(slots.get(), mode)
    except UnsupportedError as problem:
        _grader.append(problem)
        return
    Finalize(None, process.close, exitpriority=1)  # when this worker ends
    _grader.append(Grader(process, rules))


def _grade_here(task: Task) -> tuple[int, Submission]:
    [grader] = _grader
    if isinstance(grader, UnsupportedError):
        raise grader
    return task[0], _grade(grader, task)


@contextmanager
def grading_environment() -> Iterator[None]:
    """The variables under which references run as submissions do: on the CPU, kernels interpreted, one thread."""
    wanted = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _key(file: File, rules: Rules, mode: str) -> str:
    """What the grades of a file depend on, as a hash."""
    try:
        data = read(file)
    except OSError as problem:
        data = str(problem).encode("utf-8", "replace")
    secret = hashlib.sha256(rules.secret).hexdigest()
    settings = [SCHEMA, __version__, file.student, file.name, *rules.lessons, secret, rules.wall_seconds]
    settings += [rules.limits.seconds, rules.limits.memory, mode]
    return hashlib.sha256(msgspec.json.encode(settings) + b"\0" + data).hexdigest()


def _result_name(file: File, key: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", file.name)[-MAX_NAME:].lstrip("._")
    return f"{readable}-{key[:12]}.json"
