"""The definition of an exercise: a reference, cases, planted wrong versions, and hints.

A module `minillm/teaching/exercises/lNN_name.py` ends with `EXERCISES = [Exercise(...), ...]`. The code that finds the
learner's function, runs it, compares its answers and explains mistakes is in other modules, and depends on no lesson.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.errors import LessonError
from minillm.teaching.compare import values_match

Function = Callable[..., Any]
NUM_HINTS = 4
Compare = Callable[[object, object], "str | None"]


@dataclass(frozen=True)
class Case:
    """One call the learner's function must get right.

    `label` is read by the learner when the case fails ("three new tokens after four"), so it names what is special
    about these inputs. `args` are copied deeply before every call; put the smallest case first, because
    the first counterexample is the one shown.
    """

    label: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Attempt:
    """One case with the learner's answer: the input of `Exercise.diagnose`.

    `got` and `expected` are the returned values. When the exercise has `in_place` parameters they are a dict
    `{"returned": ..., "<parameter> after the call": ...}` on both sides.
    """

    case: Case
    expected: object
    got: object


@dataclass(frozen=True)
class Interface:
    """How a case calls a function: what the process of a submission gets to know of an exercise. It holds no answer.

    `inputs`: the parameters of a case; `wanted`: those of the function. Neither has annotations; a default is None.
    `run_case` is from `minillm.teaching.drives`.
    """

    inputs: inspect.Signature
    wanted: inspect.Signature
    in_place: tuple[str, ...] = ()
    run_case: Function | None = None


Diagnose = Callable[[Attempt], "str | None"]


@dataclass(frozen=True)
class WrongVersion:
    """A mistake that learners make, planted on purpose.

    `description` completes the sentence "it looks as if your function …" ("forgets the rows that were there before"). A
    learner whose outputs equal those of `function` in every case gets this sentence. The generic tests require that
    `function` fails the check with `expected_message` in the message (if `expected_message` is empty: with
    `description`).
    """

    description: str
    function: Function
    expected_message: str = ""


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Args:
        name: `"lNN.function_name"`; the learner's function is found by the part after the dot.
        reference: the right answer. It must not change its inputs, except those in `in_place`.
        cases: the cases, or a function making them (so that importing the module builds no tensors).
        hints: four, each more specific than the one before: where to look, which operation, the shape of the code with
            the decisive part left out, the whole solution. Prose with `code` and *emphasis*, or lines of code (see
            `hint_text`).
        wrong: at least two planted mistakes; each differs from the others in some case.
        compare: `(expected, got) -> None` if right, else a sentence that names the first difference. The default
            compares type, shape, dtype and values in this order, floats within `rtol=1e-4, atol=1e-5`.
        diagnose: optional `(attempt) -> likely cause or None`, called before the planted mistakes are compared. Its
            cause is used if it is the same (but for numbers) for every failing case, and None for the passing ones.
        fallback_diagnosis: the same kind of function, called with the first failing case when no planted mistake gives
            the learner's answers. It names a property of right answers that this one violates ("the weights do not sum
            to 1").
        parts: names of the parts of an answer that is a tuple, for the report (`("codes", "scale")`).
        in_place: parameters that the function is meant to write to; their contents after the call are compared too.
        run_case: how a case uses the function, if not by one call: `run_case(function, *args) -> value to compare`.
            For classes, generators, several calls in a row, or statistics over many calls.
        draw: optional `(expected, got) -> (expected cells, got cells) or None` for a picture of an answer that is not
            itself a grid: rows written, tiles visited, blocks owned. Cells are what `minillm.teaching.draw.cells_of`
            takes: a matrix of integers or truth values, as a tensor or as lists.
        guarded: whether the learner's function runs in a child process where the system allows it, so that a crash, an
            endless loop or a memory blow-up fails the check and does not end the notebook (`minillm.teaching.guard`).
            False only for a function that cannot run in a child process.

    Torch's CPU generator has the same seed in every call, of the learner's function and of the reference.
    """

    name: str
    reference: Function
    cases: Sequence[Case] | Callable[[], Sequence[Case]]
    hints: tuple[str, str, str, str]
    wrong: tuple[WrongVersion, ...]
    compare: Compare = values_match
    diagnose: Diagnose | None = None
    fallback_diagnosis: Diagnose | None = None
    parts: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    run_case: Function | None = None
    draw: Callable[[object, object], tuple[object, object] | None] | None = None
    guarded: bool = True

    def __post_init__(self) -> None:
        lesson, _, function = self.name.partition(".")
        if not lesson.isidentifier() or not function.isidentifier():
            raise LessonError(f"exercise name {self.name!r}: write it as 'l02.append_kv' (lesson, dot, function name)")
        if len(self.hints) != NUM_HINTS:
            raise LessonError(f"exercise {self.name} has {len(self.hints)} hints; it needs {NUM_HINTS}")
        unknown = [name for name in self.in_place if name not in self.parameters]
        if unknown:
            raise LessonError(f"exercise {self.name}: in_place names {unknown}; the parameters are {self.parameters}")

    @property
    def function_name(self) -> str:
        """The name of the learner's function: the part after the dot."""
        return self.name.partition(".")[2]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the inputs of a case, in order: the reference's parameters, or those of `run_case` after its
        first."""
        return tuple(self.inputs.parameters)

    @property
    def inputs(self) -> inspect.Signature:
        """The parameters of a case: the reference's, or those of `run_case` after its first."""
        whole = inspect.signature(self.run_case or self.reference)
        return whole.replace(parameters=list(whole.parameters.values())[1:]) if self.run_case else whole

    @property
    def wanted(self) -> inspect.Signature:
        """The parameters that the learner's function must have."""
        return inspect.signature(self.reference)

    @property
    def interface(self) -> Interface:
        """What the process of a submission gets to know."""
        return Interface(_bare(self.inputs), _bare(self.wanted), self.in_place, self.run_case)

    def all_cases(self) -> tuple[Case, ...]:
        """The cases; new ones in each call if `cases` is a function."""
        return tuple(self.cases() if callable(self.cases) else self.cases)


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """The signature with names and kinds of parameters only; a default is None."""
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(p.name, p.kind, default=empty if p.default is empty else None)
        for p in signature.parameters.values()
    ]
    return inspect.Signature(parameters)
