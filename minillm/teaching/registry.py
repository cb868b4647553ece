"""Find an exercise by its name among the modules `minillm/teaching/exercises/lNN_*.py`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from contextlib import suppress

from minillm.errors import LessonError, UnknownExerciseError
from minillm.teaching import exercises
from minillm.teaching.exercise import Exercise


def module_names() -> list[str]:
    """Names of all exercise modules (`l02_kv_cache`), in lesson order."""
    return sorted(module.name for module in pkgutil.iter_modules(exercises.__path__) if not module.name.startswith("_"))


def exercises_of(module_name: str) -> list[Exercise]:
    """The `EXERCISES` of one module.

    Raises:
        LessonError: the module has no `EXERCISES`, or one whose name does not begin with the module's lesson.
    """
    module = importlib.import_module(f"{exercises.__name__}.{module_name}")
    found: list[Exercise] = getattr(module, "EXERCISES", [])
    lesson = module_name.partition("_")[0]
    misnamed = [exercise.name for exercise in found if not exercise.name.startswith(f"{lesson}.")]
    if not found or misnamed:
        raise LessonError(f"{module_name}.EXERCISES must be a list of exercises named '{lesson}.…', found {misnamed}")
    return found


def lessons() -> list[str]:
    """The lessons with exercises (`l02`), in order."""
    return sorted({name.partition("_")[0] for name in module_names()})


def of_lesson(lesson: str) -> list[Exercise]:
    """The exercises of a lesson (`l02`). Imports no other lesson."""
    return [e for name in module_names() if name.partition("_")[0] == lesson for e in exercises_of(name)]


def every() -> list[Exercise]:
    """All exercises, in the order of the lessons."""
    return [exercise for name in module_names() for exercise in exercises_of(name)]


def has_exercise(name: str) -> bool:
    """Whether the named lesson has this exercise. Imports no other lesson."""
    return any(exercise.name == name for exercise in of_lesson(name.partition(".")[0]))


def find(name: str | Exercise) -> Exercise:
    """The exercise of this name. An `Exercise` is returned as it is, for lessons outside the package.

    Only the module of the named lesson is imported.

    Raises:
        UnknownExerciseError: no exercise has this name; the message lists similar names.
    """
    if isinstance(name, Exercise):
        return name
    for exercise in of_lesson(name.partition(".")[0]):
        if exercise.name == name:
            return exercise
    known = []
    for module_name in module_names():
        with suppress(ImportError):  # lesson 15 needs numba
            known += [exercise.name for exercise in exercises_of(module_name)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
    advice = f"did you mean {' or '.join(map(repr, near))}?" if near else "no exercises are installed here"
    raise UnknownExerciseError(f"no exercise is called {name!r}; {advice}")
