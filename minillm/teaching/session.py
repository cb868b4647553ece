"""The functions that a lesson calls: `check`, `hint` and `use`. They find the learner's function by its name.

They search in this order, and take the first match:
1. the function given explicitly: `check("l02.append_kv", mine)`;
2. the caller's frame: its local names, then its global names (in a notebook, the notebook's);
3. IPython's user namespace, for a call from a helper module.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

from minillm.errors import ExerciseFailed, LessonError
from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Exercise, Function
from minillm.teaching.hint_text import Hint
from minillm.teaching.registry import find
from minillm.teaching.result import CheckResult, Status

STRICT_VARIABLE = "MINILLM_STRICT"
THE_REFERENCE = "this is the reference; write your own"


def check(name: str | Exercise, function: Function | None = None) -> None:
    """Show `PASS 5/5`, or the first counterexample and its likely cause.

    Displays the result and returns nothing, so it need not be the last line of its cell. To get the result as an
    object, call `minillm.teaching.check_function.check_function`.

    Raises:
        UnknownExerciseError: no exercise has this name.
        ExerciseFailed: the check did not pass, and `MINILLM_STRICT=1` is set (for automatic grading).
    """
    result = _graded(find(name), function, sys._getframe(1))
    _show(result)
    if not result.passed and os.environ.get(STRICT_VARIABLE) == "1":
        raise ExerciseFailed(str(result))


def hint(name: str | Exercise, level: int = 1) -> None:
    """Show hint 1, 2, 3 or 4 of an exercise; each is more specific than the one before, the last is the solution.

    Raises:
        UnknownExerciseError: no exercise has this name.
        LessonError: there is no such level.
    """
    exercise = find(name)
    levels = range(1, len(exercise.hints) + 1)
    if not isinstance(level, int) or level not in levels:
        raise LessonError(f"hint level {level!r} of {exercise.name}: there are 1 to {len(levels)}; begin with 1")
    _show(Hint(f"Hint {level} of {len(levels)} for {exercise.name}", exercise.hints[level - 1]))


def use(name: str | Exercise, function: Function | None = None) -> Function:
    """The learner's function if it passes its check, else the reference, with a printed notice.

    Does not raise for an unsolved exercise, even in strict mode, so that later cells always run.

    Raises:
        UnknownExerciseError: no exercise has this name.
    """
    exercise = find(name)
    frame = sys._getframe(1)
    result = _graded(exercise, function, frame)
    if result.passed:
        return function or _find_function(exercise.function_name, frame)
    why = {Status.NOT_DONE: "yours is not done yet", Status.MISSING: "yours was not found"}.get(
        result.status, f"yours passes {result.num_passed} of {result.num_cases} cases"
    )
    print(f"Using the reference for {exercise.name}: {why}. Run its check to see more.")
    return exercise.reference


def _graded(exercise: Exercise, function: Function | None, frame: FrameType) -> CheckResult:
    chosen = function or _find_function(exercise.function_name, frame)
    if chosen is None:
        return CheckResult(exercise.name, Status.MISSING, 0, len(exercise.all_cases()))
    if chosen is exercise.reference:
        return CheckResult(exercise.name, Status.NOT_DONE, 0, len(exercise.all_cases()), note=THE_REFERENCE)
    return check_function(exercise, chosen)


def _find_function(name: str, frame: FrameType) -> Function | None:
    shell = _shell()
    namespaces = [frame.f_locals, frame.f_globals] + ([shell.user_ns] if shell else [])
    return next((namespace[name] for namespace in namespaces if callable(namespace.get(name))), None)


def _show(shown: CheckResult | Hint) -> None:
    if _shell():
        from IPython.display import display

        display(shown)
    else:
        print(shown)


def _shell() -> object | None:
    """The running IPython shell; None in plain Python, where IPython is never imported."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
