"""Compare two values and describe their first difference in one sentence, the gravest kind of difference first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from minillm.teaching.show import kind, short


def values_match(expected: object, got: object, rtol: float = 1e-4, atol: float = 1e-5) -> str | None:
    """None if `got` equals `expected`, else a sentence naming the first difference.

    Looks at the type, then the shape, then the dtype, then the values, and inside lists, tuples, dicts, dataclasses and
    plain objects in order. Floating-point values match within `atol + rtol * |expected|`, integers only exactly; NaN
    matches NaN. An int is accepted where a float is expected, but not a float for an int.
    """
    return _difference(expected, got, _Tolerance(rtol, atol), "", frozenset())


def close(rtol: float, atol: float) -> Callable[[object, object], str | None]:
    """`values_match` with another tolerance, for `Exercise(compare=close(1e-3, 1e-3))`."""
    return lambda expected, got: values_match(expected, got, rtol, atol)


def exact(expected: object, got: object) -> str | None:
    """`values_match` to the last bit."""
    return values_match(expected, got, rtol=0.0, atol=0.0)


@dataclass(frozen=True)
class _Tolerance:
    rtol: float
    atol: float

    def accepts(self, expected: float, got: float) -> bool:
        if expected == got or (math.isnan(expected) and math.isnan(got)):
            return True
        exactly = isinstance(expected, (int, np.integer)) or not math.isfinite(expected)
        return not exactly and abs(expected - got) <= self.atol + self.rtol * abs(expected)


def _difference(expected: object, got: object, tolerance: _Tolerance, where: str, seen: frozenset[int]) -> str | None:
    """`where` is the path inside the value so far; `seen` holds the containers above, so that cycles end."""
    at = f" at {where}" if where else ""
    if got is None and expected is not None:
        return f"None{at} instead of {kind(expected)}" + ("" if where else ": is a `return` missing?")
    if _is_number(expected) and _is_number(got):
        return _number_difference(expected, got, tolerance, at)
    if not _same_class(expected, got):
        return f"type{at}: {kind(got)} instead of {kind(expected)}"
    if isinstance(expected, np.ndarray):
        expected, got = torch.from_numpy(expected.copy()), torch.from_numpy(got.copy())  # no negative strides
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected, got, tolerance, at)
    if isinstance(expected, torch.Generator):
        same = torch.equal(expected.get_state(), got.get_state())
        return None if same else f"state of the random generator{at}: a different number of draws was taken from it"
    if id(expected) in seen:
        return None
    return _inner_difference(expected, got, tolerance, where, seen | {id(expected)})


def _inner_difference(
    expected: object, got: object, tolerance: _Tolerance, where: str, seen: frozenset[int]
) -> str | None:
    at = f" at {where}" if where else ""
    parts: Iterable[tuple[str, object, object]]
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(got):
            return f"length{at}: {len(got)} instead of {len(expected)}"
        parts = ((f"{where}[{i}]", e, g) for i, (e, g) in enumerate(zip(expected, got, strict=True)))
    elif isinstance(expected, Mapping):
        if expected.keys() != got.keys():
            return f"keys{at}: {short(list(got))} instead of {short(list(expected))}"
        parts = ((f"{where}[{key!r}]", expected[key], got[key]) for key in expected)
    elif _compares_by_identity(expected):
        state, other = _state(expected), _state(got)
        if state.keys() != other.keys():
            return f"attributes{at}: {short(list(other))} instead of {short(list(state))}"
        parts = ((f"{where}.{name}", state[name], other[name]) for name in state)
    else:
        return None if expected == got else f"value{at}: {short(got)} instead of {short(expected)}"
    return next(filter(None, (_difference(e, g, tolerance, spot, seen) for spot, e, g in parts)), None)


def _number_difference(expected: float, got: float, tolerance: _Tolerance, at: str) -> str | None:
    bools = (bool, np.bool_)
    floats = (float, np.floating)
    if isinstance(expected, bools) != isinstance(got, bools) or (
        isinstance(got, floats) and not isinstance(expected, floats)
    ):
        return f"type{at}: {kind(got)} instead of {kind(expected)}"
    return None if tolerance.accepts(expected, got) else f"value{at}: {short(got)} instead of {short(expected)}"


def _tensor_difference(expected: torch.Tensor, got: torch.Tensor, tolerance: _Tolerance, at: str) -> str | None:
    if expected.shape != got.shape:
        return f"shape{at}: {list(got.shape)} instead of {list(expected.shape)}"
    if expected.dtype != got.dtype:
        return f"dtype{at}: {got.dtype} instead of {expected.dtype}"
    if expected.layout != got.layout:
        return f"layout{at}: {got.layout} instead of {expected.layout}"
    if expected.device != got.device:
        return f"device{at}: {got.device} instead of {expected.device}"
    expected, got = expected.detach().cpu(), got.detach().cpu()
    wrong = ~torch.isclose(got, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = expected != got
    count = int(wrong.sum())
    if count == 0:
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    place = f"the first at {list(index)}: " if index else ""
    found, wanted = short(got[index].item()), short(expected[index].item())
    return f"values{at}: {count} of {wrong.numel()} differ, {place}{found} instead of {wanted}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_))


def _same_class(expected: object, got: object) -> bool:
    """Whether both have the same type; a learner's class matches the reference's class of the same name, and a named
    tuple a tuple."""
    for family in (torch.Tensor, np.ndarray, Mapping):
        if isinstance(expected, family) or isinstance(got, family):
            return isinstance(expected, family) and isinstance(got, family)
    is_named_tuple = type(expected) is tuple and isinstance(got, tuple)
    return is_named_tuple or type(expected).__name__ == type(got).__name__


def _compares_by_identity(value: object) -> bool:
    """Whether `==` would compare identities, or (for dataclasses) fail on tensors inside."""
    plain = type(value).__eq__ is object.__eq__ and not callable(value)
    return dataclasses.is_dataclass(value) or (plain and bool(_state(value)))


def _state(value: object) -> dict[str, object]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}
