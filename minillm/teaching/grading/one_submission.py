"""Grade one submission: read its cells, run each exercise's function without the answers, compare here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.attempt import Outcome
from minillm.teaching.diagnosis import LOOKS_AS_IF
from minillm.teaching.exercise import Exercise
from minillm.teaching.grading import values
from minillm.teaching.grading.bundle import bundle
from minillm.teaching.grading.cells import Cell
from minillm.teaching.grading.grades import ExerciseGrade, Status, Submission, overall
from minillm.teaching.grading.hidden_cases import hidden_cases
from minillm.teaching.grading.messages import (
    RUNNER_FAILED,
    Answered,
    Cells,
    Ended,
    Error,
    Found,
    Loaded,
    NotLoaded,
    Unreadable,
)
from minillm.teaching.grading.one_function import MAX_TEXT, ReadJob, RunJob
from minillm.teaching.grading.program import file_of
from minillm.teaching.grading.student_process import StudentProcess, Told
from minillm.teaching.guard import ChildExit, Limits
from minillm.teaching.judge import STUB, Judge
from minillm.teaching.raised import Raised, Sort
from minillm.teaching.registry import lessons, of_lesson
from minillm.teaching.result import CheckResult, Counterexample
from minillm.teaching.result import Status as CheckStatus

LIMITS = Limits(seconds=10.0)
READ_LIMITS = 60.0, 1 << 30
SIGKILL = 9
NO_EXERCISES = "l00"
"""The lesson in which there is nothing to write."""
_ENDED_BY = {Sort.TIME: Status.TIMEOUT, Sort.MEMORY: Status.CRASHED, Sort.EXIT: Status.CRASHED}
_ENDED_BY[Sort.PROCESSES] = Status.CRASHED


@dataclasses.dataclass(frozen=True)
class Rules:
    """What all submissions are graded by. `limits`: for each exercise; `wall_seconds`: for each exercise, waiting
    included; `lessons`: those to grade ("l02"), see `asked_for`, or none: those that each file holds, see `lessons_of`;
    `secret`: of the course, for the hidden cases."""

    limits: Limits = LIMITS
    wall_seconds: float = 60.0
    lessons: tuple[str, ...] = ()
    secret: bytes = b""


class Grader:
    """Grades submissions one after the other in `process`; keeps the answers that all of them share."""

    def __init__(self, process: StudentProcess, rules: Rules) -> None:
        self.process, self.rules = process, rules
        self._visible: dict[str, AnswerKey] = {}
        self._texts: dict[str, str] = {}

    def grade(self, data: bytes, student: str, file: str, key: str) -> Submission:
        """The grades of one file. A submission never makes this raise; a fault of an exercise does."""
        told = self.process.run(ReadJob(data, file), *READ_LIMITS)
        message = told.messages[0] if told.messages else Unreadable(told.stopped or "it cannot be read within limits")
        made = {"student": student, "file": file, "key": key, "isolation": self.process.mode}
        if not isinstance(message, Cells):
            reason = message.reason if isinstance(message, Unreadable) else "it cannot be read"
            return Submission(**made, status=Status.UNREADABLE, reason=reason, interrupted=interrupted(told))
        held = lessons_of(message, file)
        chosen = asked_for(self.rules.lessons, held, message) if self.rules.lessons else held
        exercises = [exercise for lesson in chosen for exercise in of_lesson(lesson)]
        cells = [Cell(*cell) for cell in message.sources]
        grades: list[ExerciseGrade] = []
        references: dict[str, str] = {}
        for exercise in exercises:
            grades.append(self._exercise(exercise, cells, student, references))
            if grades[-1].status is not Status.PASSED:  # `use` then returns the reference, as in a notebook
                references[exercise.name] = self._reference(exercise)
        return Submission(
            **made,
            status=overall(grades),
            reason="" if grades else self._nothing_to_grade(),
            lessons=chosen or held,
            exercises=grades,
            notes=[f"not Python: {broken}" for broken in message.broken],
            shapes={e.name: message.shapes[e.function_name] for e in exercises if e.function_name in message.shapes},
            interrupted=any(grade.interrupted for grade in grades),
        )

    def _exercise(
        self, exercise: Exercise, cells: list[Cell], student: str, references: Mapping[str, str]
    ) -> ExerciseGrade:
        visible = self._answers(exercise)
        hidden = hidden_cases(visible, self.rules.secret, student)
        key = AnswerKey(exercise, visible, hidden) if hidden else visible
        for index in range(len(key.cases)):
            key.expected(index)  # an error of a reference is no answer of the student's
        limits = self.rules.limits
        job = RunJob(cells, exercise.function_name, exercise.interface, key.cases, limits, dict(references))
        told = self.process.run(job, self.rules.wall_seconds, 2 * limits.memory)
        grade = _Verdict(key, self.rules, told, [file_of(cell.number) for cell in cells]).grade()
        unclear = grade.status in (Status.TIMEOUT, Status.CRASHED) and interrupted(told)
        seconds = round(told.seconds, 3)
        return replace(grade, hidden=_is_hidden(grade.case, hidden), seconds=seconds, interrupted=unclear)

    def _nothing_to_grade(self) -> str:
        asked = ", ".join(self.rules.lessons)
        return f"it is not for the lessons that are graded ({asked})" if asked else "it has no function of any exercise"

    def _answers(self, exercise: Exercise) -> AnswerKey:
        """The visible cases; their answers are kept."""
        if exercise.name not in self._visible:
            self._visible[exercise.name] = AnswerKey(exercise)
        return self._visible[exercise.name]

    def _reference(self, exercise: Exercise) -> str:
        """The text of an exercise's reference, with all that it needs."""
        if exercise.name not in self._texts:
            self._texts[exercise.name] = bundle(exercise.reference, exercise.function_name)
        return self._texts[exercise.name]


class _Verdict:
    """What the messages of one function mean."""

    def __init__(self, key: AnswerKey, rules: Rules, told: Told, files: Sequence[str]) -> None:
        self.key, self.rules, self.told, self.files = key, rules, told, set(files)
        self.judge = Judge(key, rules.limits.lowered())
        self.name = key.exercise.name

    def grade(self) -> ExerciseGrade:
        """The grade."""
        found = self._first(Found)
        if found is None:
            return self._unfinished([], "before your function was called")
        nothing = {
            "missing": found.note or f"there is no function {self.key.exercise.function_name}",
            "stub": "it is not written yet",
        }
        nothing["imported"] = f"it is imported and not written: {found.note}"
        if found.state in nothing:
            return self._plain(Status.NOT_ATTEMPTED, nothing[found.state])
        if found.state == "broken":
            return self._plain(Status.FAILED, f"its cell is not Python: {found.note}")
        if (failed := self._first(NotLoaded)) is not None:
            return self._plain(Status.FAILED, f"its definition raises {failed.problem}")
        if self._first(Loaded) is None:
            return self._unfinished([], "before your function was called")
        outcomes = self._outcomes()
        try:
            return self._judged(outcomes)
        except Exception as problem:  # an answer that cannot be compared or shown is wrong, and must not stop the batch
            return self._plain(Status.FAILED, f"its answer cannot be compared ({type(problem).__name__})")

    def _judged(self, outcomes: list[Outcome]) -> ExerciseGrade:
        last = outcomes[-1].error if outcomes else None
        ended_early = last is not None and (last.ends_check or last.sort is Sort.STUB)
        problems = [self.judge.problem(index, outcome) for index, outcome in enumerate(outcomes)]
        if len(outcomes) < len(self.key.cases) and not ended_early and not any(problems):
            return self._unfinished(outcomes, "without an answer to every case")
        result = self.judge.result(outcomes, problems)
        if result.status is CheckStatus.NOT_DONE and result.note.startswith(
            f"write {self.key.exercise.function_name} "
        ):
            return self._plain(Status.NOT_ATTEMPTED, "it is not written yet")  # the stub is below lines that were given
        if result.status is CheckStatus.NOT_DONE:
            said = f"it raises NotImplementedError: {result.note}"
            if STUB.match(result.note):
                said = f"it calls a function that is not written yet: {result.note}"
            told = result.note.startswith("it calls ")
            return self._plain(Status.FAILED, result.note if told else said, len(outcomes) - 1)
        if result.passed:
            return self._of(result, Status.PASSED)
        first = outcomes[next(index for index, problem in enumerate(problems) if problem)].error
        return self._of(result, _ENDED_BY.get(first.sort, Status.FAILED) if first else Status.FAILED)

    def _unfinished(self, outcomes: list[Outcome], when: str) -> ExerciseGrade:
        """The grade of a function whose process ended, or was ended, during case `len(outcomes)`."""
        at = min(len(outcomes), len(self.key.cases) - 1)
        if self.told.stopped:
            kind, _, what = self.told.stopped.partition(": ")
            result = self.judge.died(at, ChildExit(), self.files)
            status = Status.TIMEOUT if kind == "time" else Status.CRASHED
            return replace(self._of(result, status), problem=f"stopped: {what or kind}", got="nothing", cause="")
        ended = self._last_ended()
        if ended is None or ended.death is None:
            result = self.judge.died(at, ChildExit(), self.files)
            said = f"its process ended {when}"
            return replace(self._of(result, Status.CRASHED), problem=said, got="nothing", cause="")
        death = dataclasses.replace(
            ended.death,
            raised=_text(ended.death.raised),
            library_message=_text(ended.death.library_message),
            lines=tuple((_text(file), line, _text(name)) for file, line, name in ended.death.lines[:50]),
        )
        slow = death.out_of_time or death.idle_timeout
        return self._of(self.judge.died(at, death, self.files), Status.TIMEOUT if slow else Status.CRASHED)

    def _outcomes(self) -> list[Outcome]:
        """The outcomes of the first cases, in order; a second answer to the same case is ignored."""
        outcomes: list[Outcome] = []
        for message in self.told.messages:
            if isinstance(message, Answered) and message.index == len(outcomes) < len(self.key.cases):
                error = _raised(message.error) if message.error is not None else None
                try:
                    value = None if error else values.decode(message.value)
                except ValueError as problem:
                    value, error = None, Raised("ValueError", f"its answer cannot be read: {problem}")
                outcomes.append(Outcome(value, error, tuple(_text(name) for name in message.changed[:20])))
        return outcomes

    def _first(self, kind: type) -> object:
        return next((message for message in self.told.messages if isinstance(message, kind)), None)

    def _last_ended(self) -> Ended | None:
        last = self.told.messages[-1] if self.told.messages else None
        return last if isinstance(last, Ended) else None

    def _plain(self, status: Status, problem: str, passed: int = 0) -> ExerciseGrade:
        count = len(self.key.cases)
        said = _text(problem)
        return ExerciseGrade(exercise=self.name, status=status, passed_cases=passed, num_cases=count, problem=said)

    def _of(self, result: CheckResult, status: Status) -> ExerciseGrade:
        shown = result.counterexample or Counterexample("", {}, "", "", "")
        found, loaded = self._first(Found), self._first(Loaded)
        planted = shown.cause.removeprefix(LOOKS_AS_IF) if shown.cause.startswith(LOOKS_AS_IF) else ""
        known = {wrong.description for wrong in self.key.exercise.wrong}
        notes = [_text(note) for note in loaded.notes[:20]] if isinstance(loaded, Loaded) else []
        failed = [note for note in notes if note.startswith("cell ")] if shown.got.startswith("NameError") else []
        return ExerciseGrade(
            exercise=self.name,
            status=status,
            passed_cases=result.num_passed,
            num_cases=result.num_cases,
            case=shown.label,
            inputs=dict(shown.inputs),
            expected=shown.expected,
            got=shown.got,
            problem="; ".join([shown.problem, *(f"what it needs had failed: {note}" for note in failed)]),
            where=shown.where,
            cause=shown.cause,
            mistake=planted if planted in known else "",
            notes=notes,
            library=[_text(name) for name in found.library[:50]] if isinstance(found, Found) else [],
        )


def interrupted(told: Told) -> bool:
    """Whether a job ended for a reason that the submission need not have given: it took too long by the clock, it was
    killed, or its runner or the template failed.

    The submission can bring all of these about, too. Then it costs the time of grading it again.
    """
    if told.stopped:
        return told.stopped.partition(":")[0] in ("time", "process")
    last = told.messages[-1] if told.messages else None
    if not isinstance(last, Ended):
        return not isinstance(last, Cells | Unreadable)  # a runner says at its end how the function ended
    death = last.death or ChildExit()
    killed = death.signal_number == SIGKILL and not death.idle_timeout and not death.out_of_time
    return killed or death.raised == RUNNER_FAILED


def asked_for(wanted: Sequence[str], held: Sequence[str], cells: Cells) -> list[str]:
    """Those of the `wanted` lessons that a notebook is graded on: the lessons that it holds (`held`: `lessons_of`), and
    those of which it has two functions. A single one may be a helper of the same name, of another lesson."""
    there = set(cells.functions)
    shared = {lesson: len(there & {e.function_name for e in of_lesson(lesson)}) for lesson in wanted}
    return [lesson for lesson in wanted if lesson in held or shared[lesson] >= 2]


def lessons_of(cells: Cells, file: str) -> list[str]:
    """The lessons that a notebook holds: the one that its metadata or its file name gives if it has one of its
    functions, else the one most of whose functions it has; and every other lesson of which it has all functions. A file
    without functions is for the lesson that it names, which may be `NO_EXERCISES`."""
    there = set(cells.functions)
    wanted = {lesson: {e.function_name for e in of_lesson(lesson)} for lesson in lessons()}
    shares = {lesson: len(names & there) / len(names) for lesson, names in wanted.items()}
    named = [
        f"l{number[0]}" for text in (cells.lesson, file.rpartition("/")[2]) if (number := re.findall(r"\d\d", text))
    ]
    if not any(shares.values()):
        return [lesson for lesson in named if lesson in (*wanted, NO_EXERCISES)][:1]
    first = next((lesson for lesson in named if shares.get(lesson)), max(shares, key=lambda lesson: shares[lesson]))
    return sorted({first} | {lesson for lesson, share in shares.items() if share == 1.0})


def _raised(error: Error) -> Raised:
    sort = Sort.__members__.get(error.sort, Sort.ERROR)
    texts = [_text(text) for text in (error.where, error.cause, error.mismatch)]
    return Raised(_text(error.kind), _text(error.message), sort, *texts)


def _text(text: str) -> str:
    """Text of a submission, short and without control characters."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", text[:MAX_TEXT])


def _is_hidden(case: str, hidden: Sequence[object]) -> bool:
    return any(getattr(other, "label", None) == case for other in hidden)
