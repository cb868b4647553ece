"""What all wrong answers have in common: which part is wrong, and how.

Used when no planted mistake gives the learner's answers. The result is a fact about every wrong answer, so it cannot be
a wrong cause; it tells the learner where to look (`the second value lacks its last entry; everything else is right`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real

import numpy as np
from torch import Tensor

from minillm.teaching.compare import values_match
from minillm.teaching.diagnosis_tensors import about_tensors
from minillm.teaching.exercise import Compare
from minillm.teaching.focus import without_conditions

Pair = tuple[object, object]
"""The answer of the reference and the answer of the learner's function."""
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def common_fact(
    pairs: Sequence[Pair], names: Sequence[str] = (), what: str = "the answer", compare: Compare = values_match
) -> str:
    """A sentence about `what` that is true of every pair of a right and a wrong answer; "" if none is known.

    `names`: those of the parts of an answer that is a tuple (`codes`, `scale`); `compare`: the exercise's comparison.
    """
    pairs = [(without_conditions(e), without_conditions(_as_python(e, g))) for e, g in pairs if compare(e, g)]
    if not pairs or not all(compare(e, g) for e, g in pairs):  # a condition is not met in one of them
        return ""
    if all(got is None and expected is not None for expected, got in pairs):
        return f"{what} is None: a path through the function ends without a return value"
    if all(expected is None for expected, _ in pairs):
        return f"{what} should be None, but it is not"
    parts = _parts(pairs, names)
    if parts is not None:
        return _about_parts(parts, compare)
    kinds = {type(value) for pair in pairs for value in pair}
    if kinds <= {int, float, bool}:
        return _subject(what, _about_numbers(pairs))
    if all(isinstance(e, list) and isinstance(g, list) for e, g in pairs):
        return _subject(what, _about_lists(pairs))
    if all(isinstance(e, Tensor) and isinstance(g, Tensor) for e, g in pairs):
        return _subject(what, about_tensors(pairs))
    types = {(type(e).__name__, type(g).__name__) for e, g in pairs}
    if len(types) == 1 and len(set(*types)) == 2:
        [(expected, got)] = types
        return f"{what} is of type {got} instead of {expected}"
    return ""


def same_structure(expected: object, got: object) -> bool:
    """Whether both hold as many numbers in the same places, whatever the types of numbers, sequences and arrays."""
    return _skeleton(expected) == _skeleton(got)


def _skeleton(value: object) -> object:
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _skeleton(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_skeleton(part) for part in value]
    return "number" if isinstance(value, (int, float, np.number, np.bool_)) else type(value).__name__


def _as_python(expected: object, got: object) -> object:
    """NumPy's number as Python's where `values_match` accepts both: its type is then not what is wrong."""
    fits = isinstance(got, np.integer) or (isinstance(got, np.floating) and isinstance(expected, float))
    return got.item() if fits and isinstance(expected, (int, float)) else got


def _subject(what: str, fact: str) -> str:
    return f"{what} {fact}" if fact else ""


def _parts(pairs: Sequence[Pair], names: Sequence[str]) -> dict[str, list[Pair]] | None:
    """The pairs part by part, if every answer is a dict of the same names or a tuple of the same length."""
    found: dict[str, list[Pair]] = {}
    for expected, got in pairs:
        if isinstance(expected, Mapping) and isinstance(got, Mapping) and expected.keys() == got.keys():
            named = {f"`{name}`": (value, got[name]) for name, value in expected.items()}
        elif isinstance(expected, tuple) and isinstance(got, tuple) and len(expected) == len(got) > 1:
            called = [f"`{name}`" for name in names] or [f"the {ordinal} value" for ordinal in ORDINALS]
            named = dict(zip(called, zip(expected, got, strict=True), strict=False))
        else:
            return None
        for name, both in named.items():
            found.setdefault(name, []).append(both)
    return found if all(len(each) == len(pairs) for each in found.values()) else None


def _about_parts(parts: Mapping[str, list[Pair]], compare: Compare) -> str:
    """Which parts are wrong, and how the first of them is that is wrong in every answer."""
    wrong = {name: [pair for pair in each if compare(*pair)] for name, each in parts.items()}
    shown_first = sorted(wrong, key=lambda name: compare(*parts[name][0]) is None)  # the first case is shown
    wrong = {name: wrong[name] for name in shown_first if wrong[name]}
    always = [name for name, each in wrong.items() if len(each) == len(parts[name])]
    fact = next(filter(None, (common_fact(parts[name], what=name, compare=compare) for name in always)), "")
    if len(wrong) == 1 and len(parts) > 1:
        [name] = wrong
        return f"{fact.partition(';')[0] or name + ' is wrong'}; everything else is right"
    return fact or (f"{' and '.join(wrong)} are wrong; everything else is right" if 0 < len(wrong) < len(parts) else "")


# ------------------------------------------------------------------------------------------------------------- numbers


def _about_numbers(pairs: Sequence[Pair]) -> str:
    numbers = [(e, g) for e, g in pairs]
    if all(isinstance(e, bool) and isinstance(g, bool) for e, g in numbers):
        return ""  # True is 1 in Python, but no number here
    if all(isinstance(e, bool) and not isinstance(g, bool) for e, g in numbers):
        return "is a number, where a bool is wanted: write True or False"
    if all(isinstance(g, bool) and not isinstance(e, bool) for e, g in numbers):
        return "is a bool, where a number is wanted"
    if all(isinstance(g, float) and not isinstance(e, float) for e, g in numbers):
        return "is a float, where an int is wanted: / gives a float, // rounds down to a whole number"
    if all(g == 0 for _, g in numbers):
        return "is 0"
    if all(g == -e for e, g in numbers):
        return "has the wrong sign"
    if len(numbers) > 1 and len({g - e for e, g in numbers}) == 1:
        difference = numbers[0][1] - numbers[0][0]
        return f"is always {abs(difference):g} too {'large' if difference > 0 else 'small'}"
    factors = [g / e if e else None for e, g in numbers]
    if len(numbers) > 1 and None not in factors and max(factors) - min(factors) <= 1e-6 * abs(max(factors)):
        return f"is always {factors[0]:.4g} times what it should be"
    if all(g < 0 <= e for e, g in numbers):
        return "is below 0"
    if len(numbers) > 1 and all(g > e for e, g in numbers):
        return "is too large in every case that fails"
    if len(numbers) > 1 and all(g < e for e, g in numbers):
        return "is too small in every case that fails"
    return ""


# --------------------------------------------------------------------------------------------------------------- lists


def _about_lists(pairs: Sequence[tuple[list, list]]) -> str:
    wanted = {type(x).__name__ for e, _ in pairs for x in e}
    strange = [{type(x).__name__ for x in g if not _is_one_of(wanted, x)} for _, g in pairs]
    if wanted and all(strange):
        kind = min(strange[0])
        convert = ": convert with int(…)" if wanted == {"int"} and kind in ("Tensor", "float") else ""
        return f"has entries of type {kind}, where {' or '.join(sorted(wanted))} is wanted{convert}"
    for fact, holds in LISTS:
        if all(holds(e, g) for e, g in pairs):
            return fact
    return _entries(pairs) or _first_wrong(pairs)


def _is_one_of(wanted: set[str], x: object) -> bool:
    """Whether `x` is of one of these types. As in `values_match`, NumPy's numbers count, and an int counts as a float.

    `1 == 1.0` and `1 == torch.tensor(1)` are true in Python, so the rules in `LISTS` do not see another type.
    """
    if isinstance(x, (bool, np.bool_)):
        return "bool" in wanted
    is_number = ("int" in wanted and isinstance(x, Integral)) or ("float" in wanted and isinstance(x, Real))
    return is_number or type(x).__name__ in wanted


def _is_permuted(e: list, g: list) -> bool:
    return len(e) == len(g) and all(x in e for x in g) and all(e.count(x) == g.count(x) for x in e)


LISTS = (
    ("is empty", lambda e, g: not g),
    ("should be empty", lambda e, g: g and not e),
    ("lacks its last entry; the others are right", lambda e, g: g == e[:-1]),
    ("lacks its first entry; the others are right", lambda e, g: g == e[1:]),
    ("has only the first entry of several", lambda e, g: len(e) > 1 and g == e[:1]),
    ("ends too early; the entries that it has are right", lambda e, g: len(g) < len(e) and g == e[: len(g)]),
    ("lacks entries at its beginning; those that it has are right", lambda e, g: len(g) < len(e) and g == e[-len(g) :]),
    ("has one entry too many at its end; the others are right", lambda e, g: g[:-1] == e),
    ("has one entry too many at its beginning; the others are right", lambda e, g: g[1:] == e),
    ("has extra entries at its end; the others are right", lambda e, g: len(g) > len(e) and g[: len(e)] == e),
    (
        "has extra entries at its beginning; the others are right",
        lambda e, g: len(g) > len(e) and g[-len(e) :] == e and e,
    ),
    ("holds the right entries in reverse order", lambda e, g: g == e[::-1]),
    ("holds the right entries in another order", _is_permuted),
    ("is shifted: each entry is one place too late", lambda e, g: len(e) == len(g) > 2 and g[1:] == e[:-1]),
    ("is shifted: each entry is one place too early", lambda e, g: len(e) == len(g) > 2 and g[:-1] == e[1:]),
)


def _entries(pairs: Sequence[tuple[list, list]]) -> str:
    """What the entries of lists of numbers have in common, if the lists have the right length."""
    if not all(len(e) == len(g) and all(type(x) in (int, float) for x in e + g) for e, g in pairs):
        return _lengths(pairs)
    numbers = [both for e, g in pairs for both in zip(e, g, strict=True)]
    if len(numbers) > 1 and len({g - e for e, g in numbers}) == 1:
        difference = numbers[0][1] - numbers[0][0]
        return f"has every entry {abs(difference):g} too {'large' if difference > 0 else 'small'}"
    if all(len(e) > 1 and e[:-1] == g[:-1] for e, g in pairs):
        return "is wrong only in its last entry"
    if all(len(e) > 1 and e[1:] == g[1:] for e, g in pairs):
        return "is wrong only in its first entry"
    if all(g < 0 for e, g in numbers if e != g):
        return "has entries below 0"
    if all(g == 0 for e, g in numbers if e != g):
        return "has 0 where other entries should be; its others are right"
    off = {g - e for e, g in numbers if e != g}
    if len(off) == 1 and len(numbers) > 2:
        [difference] = off
        return (
            f"has some entries {abs(difference):g} too {'large' if difference > 0 else 'small'}; its others are right"
        )
    return ""


def _lengths(pairs: Sequence[tuple[list, list]]) -> str:
    if all(len(g) > len(e) for e, g in pairs):
        return "has too many entries"
    if all(len(g) < len(e) for e, g in pairs):
        return "has too few entries"
    return ""


def _first_wrong(pairs: Sequence[tuple[list, list]]) -> str:
    """Whether the lists are wrong only after their first entry."""
    same = [len(e) == len(g) and len(e) > 1 for e, g in pairs]
    if all(same) and all(e[0] == g[0] for e, g in pairs):
        return "is right in its first entry and wrong after it"
    return ""
