"""Mutation testing of the checkers: make every small mistake in every reference solution, and see which ones pass.

`minillm build --mutants` runs this. A mutant that passes every case is a survivor: either a case is missing, or the
mutant gives the same answers (an equivalent mutant). Equivalent mutants are declared, with the reason, in
`minillm/teaching/exercises/_lNN_equivalent.py`:

    EQUIVALENT = {
        "l02.best_r": {"if pad_cost == 0: [== -> <=]": "costs are never negative"},
    }

The report prints the descriptions ready to be copied. A declared mutant that no longer survives is reported too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from minillm.errors import LessonError
from minillm.teaching import exercises
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Exercise
from minillm.teaching.guard import Limits
from minillm.teaching.mutate import build, mutants_of
from minillm.teaching.registry import every, find
from minillm.teaching.result import Status

LIMITS = Limits(seconds=5.0)
CHUNK = 12
"""Mutants that a worker takes at a time."""
PLANTED = "planted: "


@dataclass(frozen=True)
class MutantResult:
    """The result for one mutant. `cause`: the cause in the learner's report, or "". `equivalent`: the declared reason.

    For a planted wrong version, `cause` is set only if the report names this version's own mistake.
    """

    exercise: str
    description: str
    caught: bool
    cause: str = ""
    problem: str = ""
    equivalent: str = ""

    @property
    def planted(self) -> bool:
        """Whether it is a planted wrong version, written by hand."""
        return self.description.startswith(PLANTED)

    @property
    def survived(self) -> bool:
        """Whether it passed without being declared equivalent."""
        return not self.caught and not self.equivalent


@dataclass(frozen=True)
class Report:
    """All results, in order, and the declared equivalents (exercise, description) that are not among the survivors."""

    results: tuple[MutantResult, ...]
    stale: tuple[tuple[str, str], ...]

    def of(self, exercise: str) -> list[MutantResult]:
        """The results of one exercise."""
        return [result for result in self.results if result.exercise == exercise]

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.write_text(
            json.dumps({"results": [asdict(result) for result in self.results], "stale": self.stale}, indent=1),
            encoding="utf-8",
        )


def run(names: Sequence[str] = (), jobs: int | None = None, progress: Any = None) -> Report:
    """Try the mutants of the exercises in `names`: lessons (`07`) or exercises (`l07.admit`); none: all.

    `jobs`: processes at a time (None: one per processor). `progress`: called as `progress(iterable, total=…)`.

    Raises:
        LessonError: a name matches no exercise.
    """
    chosen = _chosen(names)
    tasks = [(e.name, start) for e in chosen for start in range(0, _count(e), CHUNK)]
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=context, initializer=_prepare)
    try:
        futures = {pool.submit(_try_some, *task): task for task in tasks}
        done: Iterable[Any] = as_completed(futures)
        done = progress(done, total=len(tasks)) if progress else done
        found = {futures[future]: future.result() for future in done}
    finally:  # after an interrupt, wait only for the tasks that the workers have already
        pool.shutdown(cancel_futures=True)
    results = tuple(result for task in tasks for result in found[task])
    return Report(results, _stale(chosen, results))


def _chosen(names: Sequence[str]) -> list[Exercise]:
    known = every()
    chosen = [e for e in known if not names or any(_matches(e.name, name) for name in names)]
    unknown = [name for name in names if not any(_matches(e.name, name) for e in known)]
    if unknown:
        raise LessonError(f"no exercise matches {unknown[0]!r}; write a lesson (07) or an exercise ({known[0].name})")
    return chosen


def _matches(exercise: str, name: str) -> bool:
    lesson = exercise.partition(".")[0]
    return name in (exercise, lesson, lesson.removeprefix("l"))


def _count(exercise: Exercise) -> int:
    return len(exercise.wrong) + len(mutants_of(exercise.reference))


def equivalents(exercise: str) -> dict[str, str]:
    """The declared equivalent mutants of an exercise: description → reason."""
    module = f"{exercises.__name__}._{exercise.partition('.')[0]}_equivalent"
    if importlib.util.find_spec(module) is None:
        return {}
    declared: dict[str, dict[str, str]] = importlib.import_module(module).EQUIVALENT
    return declared.get(exercise, {})


def _stale(chosen: Sequence[Exercise], results: Sequence[MutantResult]) -> tuple[tuple[str, str], ...]:
    survived = {(result.exercise, result.description) for result in results if not result.caught}
    declared = [(e.name, description) for e in chosen for description in equivalents(e.name)]
    return tuple(pair for pair in declared if pair not in survived)


# -------------------------------------------------------------------------------------------------- in a worker process


def _prepare() -> None:
    warnings.simplefilter("ignore")  # NumPy warns about the infinities of mutated kernels
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@lru_cache(maxsize=2)
def _known(name: str) -> tuple[AnswerKey, list[Any]]:
    """All answers of an exercise, computed, and its mutants."""
    key = AnswerKey(find(name))
    key.fill()
    return key, mutants_of(key.exercise.reference)


def _try_some(name: str, start: int) -> list[MutantResult]:
    key, mutants = _known(name)
    wrong = key.exercise.wrong
    return [
        _try_planted(key, number) if number < len(wrong) else _try_mutant(key, mutants[number - len(wrong)])
        for number in range(start, min(start + CHUNK, len(wrong) + len(mutants)))
    ]


def _try_planted(key: AnswerKey, number: int) -> MutantResult:
    wrong = key.exercise.wrong[number]
    result = check_function(key.exercise, wrong.function, LIMITS, key)
    shown = result.counterexample
    named = shown is not None and (wrong.expected_message or wrong.description) in str(result)
    caught = result.status is Status.FAILED
    problem = shown.problem if shown else ""
    return MutantResult(
        key.exercise.name, PLANTED + wrong.description, caught, wrong.description if named else "", problem
    )


def _try_mutant(key: AnswerKey, mutant: Any) -> MutantResult:
    name, reason = key.exercise.name, equivalents(key.exercise.name).get(mutant.description, "")
    try:
        function = build(mutant, key.exercise.reference)
    except Exception as error:  # it cannot even be defined
        return MutantResult(name, mutant.description, True, "", f"{type(error).__name__}: {error}")
    result = check_function(key.exercise, function, LIMITS, key)
    shown = result.counterexample
    if shown is None:
        return MutantResult(name, mutant.description, not result.passed, "", "", reason)
    raised = f": {shown.got} {shown.where}".rstrip() if "raised an error" in shown.problem else ""
    return MutantResult(name, mutant.description, True, shown.cause, shown.problem + raised)
