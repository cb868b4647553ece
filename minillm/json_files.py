"""Reads the JSON files of a checkpoint and validates them against a schema before anything is allocated.

The schemas are `msgspec` structs. msgspec checks types strictly (`true` is not a number, `"8"` is not an integer, NaN
is in no range), imports in a few milliseconds and has no dependencies. A field's `Meta(description=…)` describes its
valid values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from minillm.errors import CheckpointError

MAX_BYTES = 64 * 2**20
"""The size limit of a JSON file; the index of the largest checkpoint has a few megabytes."""
T = TypeVar("T")


class _ShortRepr(Repr):
    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python refuses to print an integer of more than a few thousand digits
            return f"an integer of {x.bit_length():,} bits"


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 60


def int_in_range(least: int, most: int) -> Any:
    """Return the schema type of an integer from `least` to `most`, or null."""
    words = f"a whole number from {least:,} to {most:,}"
    return Annotated[Annotated[int, Meta(ge=least, le=most)] | None, Meta(description=words)]


def float_in_range(above: float, most: float) -> Any:
    """Return the schema type of a number above `above` (exclusive) and up to `most` (inclusive), or null."""
    words = f"a number above {above:g} and up to {most:g}"
    return Annotated[Annotated[float, Meta(gt=above, le=most)] | None, Meta(description=words)]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises `CheckpointError` if the file is missing, too large, nested too deeply, or not a JSON object.
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path.name} is not a regular file; fetch it again")
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"cannot read {path.name} ({problem.strerror}); is this the folder of a model?") from None
    except CheckpointError:
        raise
    except ValueError as problem:
        raise CheckpointError(f"{path.name} is not valid JSON ({problem}); fetch it again") from None
    except RecursionError:
        raise CheckpointError(f"{path.name} is nested too deeply; fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} is not a JSON object; fetch it again")
    return content


def validated(stored: Mapping[str, Any], schema: type[T]) -> T:
    """Convert `stored` to the struct `schema`. Raises `CheckpointError` with field, value and valid values."""
    try:
        return msgspec.convert(stored, schema)
    except msgspec.ValidationError as problem:
        what, _, path = str(problem).partition(" - at `$")
        keys = re.findall(r"\w+|\.\.\.", path)
        field, value = _found(stored, keys)
        if "unknown field" in what:
            raise CheckpointError(f"{field} has an unknown entry {what.split('`')[1]!r}") from None
        raise CheckpointError(f"{field} is {short_repr(value)}; it must be {_allowed(schema, keys) or what}") from None
    except UnicodeEncodeError:
        raise CheckpointError("a string in it has an unpaired surrogate, which UTF-8 cannot encode") from None


def short_repr(value: Any) -> str:
    """Return the repr of a value from a file, truncated to about sixty characters."""
    return _SHORT_REPR.repr(value)


def _found(stored: Any, keys: list[str]) -> tuple[str, Any]:
    """Return the path to the invalid value, and the value; if an entry on the path has no name, its container."""
    name = ""
    for key in keys:
        if isinstance(stored, Mapping) and key in stored:
            stored, name = stored[key], f"{name}.{key}" if name else key
        elif isinstance(stored, list) and key.isdigit():
            stored, name = stored[int(key)], f"{name}[{key}]"
        else:
            break
    return name, stored


def _allowed(schema: type, keys: list[str]) -> str | None:
    """Return the schema's description of the field, or of the nearest enclosing field that has one."""
    found = None
    for key in keys:
        hint = get_type_hints(schema, include_extras=True).get(key)
        if get_origin(hint) is Annotated:
            found = hint.__metadata__[0].description
            hint = get_args(hint)[0]
        inside = [part for part in (hint, *get_args(hint)) if isinstance(part, type)]
        schema = next((part for part in inside if issubclass(part, msgspec.Struct)), object)
    return found
