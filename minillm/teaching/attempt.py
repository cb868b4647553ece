"""One call of a function on one case: what it returned or raised, and which inputs it changed.

Nothing here needs an exercise's answers: the process of a submission has its `Interface` only.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from minillm.teaching.compare import exact, values_match
from minillm.teaching.exercise import Case, Exercise, Function, Interface
from minillm.teaching.raised import Raised
from minillm.teaching.show import kind

SEED = 0


@dataclass(frozen=True)
class Outcome:
    """What one call did: the value to compare or the exception, and the inputs that it must not change but did."""

    value: object = None
    error: Raised | None = None
    changed: tuple[str, ...] = ()


def call(exercise: Exercise | Interface, function: Function, case: Case) -> Outcome:
    """Call `function` on deep copies of the inputs. Torch's CPU generator is seeded, and restored afterwards."""
    args = copy.deepcopy(case.args)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        try:
            value = exercise.run_case(function, *args) if exercise.run_case else function(*args)
        except KeyboardInterrupt:  # the stop button
            raise
        except BaseException as error:  # the learner's mistake is the result; `sys.exit` is one too
            return Outcome(error=Raised.of(error, function, lambda: exercise.wanted))
    before, after = named_inputs(exercise, case.args), named_inputs(exercise, args)
    if exercise.in_place:
        value = {"returned": value, **{f"{name} after the call": after.get(name) for name in exercise.in_place}}
    guarded = [name for name in before if name not in exercise.in_place and not _is_meant_to_advance(before[name])]
    return Outcome(value, changed=tuple(name for name in guarded if exact(before[name], after[name])))


def named_inputs(exercise: Exercise | Interface, args: tuple[object, ...]) -> dict[str, object]:
    """The inputs of a case under the names of the reference's (or the drive's) parameters."""
    return dict(exercise.inputs.bind(*args).arguments)


def difference(exercise: Exercise, expected: object, got: object) -> str | None:
    """`exercise.compare`; if it fails on an unexpected type, a sentence that says so."""
    if got is None and expected is not None:
        return values_match(expected, got)
    try:
        return exercise.compare(expected, got)
    except Exception as error:
        return f"type: {kind(got)} cannot be compared with {kind(expected)} ({type(error).__name__})"


def _is_meant_to_advance(value: object) -> bool:
    return isinstance(value, torch.Generator)
