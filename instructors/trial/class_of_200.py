"""Grade a made-up class of 200 with one command, and compare every status with the right one.

    python -m instructors.trial.class_of_200 --folder /tmp/class --jobs 1

Some hand in each lesson's solutions, blank or disarranged notebooks, and files that are no notebooks. Some make every
mistake that is planted in the exercises, one per exercise and notebook. The rest try what `attempts` lists. The exit
code is 1 if a status is not the right one, or if anything was reached that must not be.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from instructors.trial.attempts import ATTEMPTS, TARGET
from instructors.trial.shapes import SAME_MEANING, Notebook, unreadable, with_cell
from minillm.teaching.grading import batch, reports
from minillm.teaching.grading.bundle import NotBundled, bundle
from minillm.teaching.grading.grades import ExerciseGrade, Status, Submission
from minillm.teaching.grading.one_submission import Rules
from minillm.teaching.guard import GIB, Limits
from minillm.teaching.registry import of_lesson

ROOT = Path(__file__).resolve().parents[2]
RULES = Rules(limits=Limits(seconds=4.0, memory=GIB), wall_seconds=40.0)
MARK = ".class_of_200"
"""A file beside submissions and reports that this trial wrote, and may delete."""
SIZE = 200


@dataclass
class Expected:
    """What a submission must get. `exercises`: statuses by exercise; all others `others`. `says`: by exercise the text
    that its report must hold."""

    kind: str
    name: str
    status: tuple[str, ...] = ()
    exercises: dict[str, tuple[str, ...]] = field(default_factory=dict)
    others: tuple[str, ...] = ("passed",)
    says: dict[str, str] = field(default_factory=dict)

    def faults(self, got: Submission) -> list[str]:
        """What is not as it must be."""
        found = []
        if self.status and got.status.value not in self.status:
            found.append(f"{got.status.value} instead of {' or '.join(self.status)}")
        if "unreadable" not in self.status and not got.exercises and "not attempted" not in self.status:
            found.append("no exercise was graded")
        for grade in got.exercises:
            right = self.exercises.get(grade.exercise, self.others)
            if grade.status.value not in right:
                found.append(
                    f"{grade.exercise}: {grade.status.value} instead of {' or '.join(right)} ({grade.problem})"
                )
            if (words := self.says.get(grade.exercise, "")) and words not in _report(grade):
                found.append(
                    f"{grade.exercise}: the report does not say {words!r} but {grade.problem!r}, {grade.cause!r}"
                )
        return found


def _report(grade: ExerciseGrade) -> str:
    return "\n".join([grade.problem, grade.cause, grade.mistake, grade.got, grade.where, *grade.notes])


def write_class(folder: Path, out: Path, port: int, size: int = SIZE) -> dict[str, Expected]:
    """Write `size` submissions to `folder` (more if there are more attempts); what each must get, by file name."""
    expected: dict[str, Expected] = {}
    places = {"root": ROOT, "submissions": folder, "out": out, "port": port}

    def hand_in(name: str, data: bytes, right: Expected) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        expected[name] = right

    second = _solved("02_kv_cache")
    for number, attempt in enumerate(ATTEMPTS):
        notebook = with_cell(second, TARGET, attempt.cell(**places))
        right = Expected("attempt", attempt.name, (), {f"l02.{TARGET}": attempt.statuses})
        right.says = {f"l02.{TARGET}": attempt.says} if attempt.says else {}
        hand_in(f"attempt_{number:02}/02_kv_cache.ipynb", _bytes(notebook), right)
    for number, (name, change) in enumerate(SAME_MEANING.items()):
        notebook = change(copy.deepcopy(_solved("06_paged_blocks")))
        hand_in(
            f"moved_{number:02}/my homework ({number}).ipynb", _bytes(notebook), Expected("moved", name, ("passed",))
        )
    for number, (name, data) in enumerate(unreadable(second).items()):
        hand_in(f"unreadable_{number:02}.ipynb", data, Expected("unreadable", name, ("unreadable",)))
    for lesson in _lessons():
        right = Expected("solved", f"lesson {lesson[:2]}, solved", ("passed",))
        hand_in(f"solved/{lesson}.ipynb", _bytes(_solved(lesson)), right)
        blank = Expected(
            "blank", f"lesson {lesson[:2]}, as it was given out", ("not attempted",), {}, ("not attempted",)
        )
        hand_in(f"blank/{lesson}.ipynb", (ROOT / "lessons" / f"{lesson}.ipynb").read_bytes(), blank)
    for name, notebook, right in _with_mistakes(size - len(expected)):
        hand_in(name, _bytes(notebook), right)
    return expected


def _with_mistakes(count: int) -> Iterator[tuple[str, Notebook, Expected]]:
    """`count` notebooks whose functions are planted mistakes, those of each lesson in turn."""
    rounds = {lesson: _mistaken(lesson) for lesson in _lessons()}
    made = 0
    while made < count and rounds:
        for lesson in list(rounds):
            found = next(rounds[lesson], None)
            if found is None:
                del rounds[lesson]
            elif made < count:
                notebook, right = found
                yield f"mistakes_{made:03}/{lesson}.ipynb", notebook, right
                made += 1


def _mistaken(lesson: str) -> Iterator[tuple[Notebook, Expected]]:
    """Notebooks of a lesson with the first, the second, … mistake of each of its exercises, while there are any."""
    exercises = of_lesson(f"l{lesson[:2]}")
    for number in range(max(len(exercise.wrong) for exercise in exercises)):
        notebook, right = _solved(lesson), Expected("mistakes", f"lesson {lesson[:2]}, mistakes number {number + 1}")
        for exercise in exercises:
            if number >= len(exercise.wrong):
                continue
            wrong = exercise.wrong[number]
            try:
                source = bundle(wrong.function, exercise.function_name, [e.function_name for e in exercises])
            except NotBundled:
                continue
            notebook = with_cell(notebook, exercise.function_name, source)
            right.exercises[exercise.name] = ("failed", "timeout", "crashed")
            right.says[exercise.name] = wrong.expected_message or wrong.description
        if right.exercises:
            yield notebook, right


def _lessons() -> list[str]:
    names = sorted(path.stem for path in (ROOT / "solutions").glob("[0-9][0-9]_*.ipynb"))
    return [name for name in names if of_lesson(f"l{name[:2]}")]


def _solved(lesson: str) -> Notebook:
    notebook = json.loads((ROOT / "solutions" / f"{lesson}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    return notebook


def _bytes(notebook: Notebook) -> bytes:
    return json.dumps(notebook).encode()


# ------------------------------------------------------------------------------------------------------- the trial


class Listener:
    """A server on this machine that counts who reaches it."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port, self.reached = self._socket.getsockname()[1], 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                other, _ = self._socket.accept()
            except OSError:
                return
            self.reached += 1
            other.close()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@dataclass
class Result:
    """What came of it. `reached`: what submissions reached that they must not."""

    graded: list[Submission]
    faults: dict[str, list[str]]
    reached: list[str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every status is right and nothing was reached."""
        return not self.faults and not self.reached


def run(folder: Path, jobs: int = 1, size: int = SIZE, only: str = "", progress: object = None) -> Result:
    """Write the class below `folder`, grade it, compare. `only`: keep the submissions whose names begin so."""
    submissions, out = folder / "submissions", folder / "report"
    for place in (submissions, out):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    listener = Listener()
    expected = write_class(submissions, out, listener.port, size)
    for name in [name for name in expected if not name.startswith(tuple(only.split(",")))]:
        (submissions / name).unlink()
        del expected[name]
    files = batch.find(submissions)
    began = time.monotonic()
    graded = batch.grade_all(files, out, RULES, jobs, "namespaces", progress)
    reports.write_all(graded, out, 0.95)
    seconds = time.monotonic() - began
    listener.close()
    faults = {s.file: found for s in graded if (found := expected[s.file].faults(s))}
    missing = set(expected) - {s.file for s in graded}
    faults |= {name: ["it was not graded"] for name in missing}
    reached = [f"the network, {listener.reached} times"] if listener.reached else []
    reached += [str(path) for path in out.rglob("reached")]
    reached += ["a process was left behind"] if _left_behind() else []
    _table(folder / "attempts.md", graded, expected)
    return Result(graded, faults, reached, seconds)


def _left_behind() -> bool:
    import psutil

    from minillm.teaching.grading.sandbox import UNUSED_UID

    mine = psutil.Process().children(recursive=True)
    strangers = [
        p
        for p in psutil.process_iter(["uids"])
        if p.info["uids"] and UNUSED_UID <= p.info["uids"].real < UNUSED_UID + 64
    ]
    return bool(
        [p for p in strangers if p.status() != "zombie"] or [p for p in mine if "template.py" in " ".join(p.cmdline())]
    )


def _table(path: Path, graded: list[Submission], expected: dict[str, Expected]) -> None:
    """What was tried and what came of it, as Markdown."""
    by_file = {submission.file: submission for submission in graded}
    lines = ["| attempt | status | what the report says |", "|---|---|---|"]
    for name, right in expected.items():
        if name not in by_file or right.kind not in ("attempt", "moved", "unreadable"):
            continue
        submission = by_file[name]
        shown = [grade for grade in submission.exercises if grade.exercise in right.exercises]
        status = shown[0].status.value if shown else submission.status.value
        problem = (shown[0].problem if shown else submission.reason) or "–"
        if shown and shown[0].problem == "your function raised an error":
            problem = shown[0].got
        text = problem.replace(str(ROOT), "…").replace("|", "\\|").splitlines()[0][:120]
        lines.append(f"| {right.name} | {status} | {text} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run the trial and print what was found."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where submissions and reports go")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--only", default="", help="beginnings of file names, separated by commas")
    args = parser.parse_args()
    mark = args.folder / MARK
    if not mark.exists() and any((args.folder / name).exists() for name in ("submissions", "report")):
        parser.error(f"{args.folder} has submissions or reports that no trial wrote; name another --folder")
    args.folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    os.environ["TRITON_INTERPRET"] = "1"  # the mistakes of lessons 08 and 09 are kernels
    result = run(
        args.folder, args.jobs, args.size, args.only, lambda done, total: tqdm(done, total=total, disable=None)
    )
    for name, found in sorted(result.faults.items()):
        print(name, *found, sep="\n    ")
    for found in result.reached:
        print("REACHED:", found)
    counts = {status.value: 0 for status in Status}
    for submission in result.graded:
        for grade in submission.exercises:
            counts[grade.status.value] += 1
    named = sum(bool(grade.mistake) for submission in result.graded for grade in submission.exercises)
    print(
        f"{len(result.graded)} submissions in {result.seconds:.0f} s with {args.jobs} jobs; {len(result.faults)} wrong"
    )
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"; {named} planted mistakes named")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
