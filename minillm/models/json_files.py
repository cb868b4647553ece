"""JSON that comes with a checkpoint, held against a schema before anything is allocated for what it says.

The schemas are `msgspec` structs. It checks types strictly (`true` is no number, `"8"` no integer, NaN in no range), is
imported in a few milliseconds and needs nothing else. A field's `Meta(description=…)` says what is allowed there.
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

MOST_BYTES = 64 * 2**20
"""No file of settings is larger; the index of the largest checkpoint has a few megabytes."""
T = TypeVar("T")
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def whole(least: int, most: int) -> Any:
    """The type of an integer in this range, or null."""
    words = f"a whole number from {least:,} to {most:,}"
    return Annotated[Annotated[int, Meta(ge=least, le=most)] | None, Meta(description=words)]


def number(above: float, most: float) -> Any:
    """The type of a number in this range, which begins behind `above`, or null."""
    words = f"a number above {above:g} and up to {most:g}"
    return Annotated[Annotated[float, Meta(gt=above, le=most)] | None, Meta(description=words)]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError` if there is none, or it is no JSON, too large or too deep."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path.name} is no plain file; fetch it again")
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path.name} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"cannot read {path.name} ({problem.strerror}); is this the folder of a model?") from None
    except CheckpointError:
        raise
    except ValueError as problem:
        raise CheckpointError(f"{path.name} is no JSON ({problem}); fetch it again") from None
    except RecursionError:
        raise CheckpointError(f"{path.name} is nested too deeply to be read; fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds no JSON object; fetch it again")
    return content


def checked(stored: Mapping[str, Any], schema: type[T]) -> T:
    """`stored` as the struct `schema`. Raises `CheckpointError` naming field, value and what is allowed there."""
    try:
        return msgspec.convert(stored, schema)
    except msgspec.ValidationError as problem:
        what, _, path = str(problem).partition(" - at `$")
        keys = re.findall(r"\w+|\.\.\.", path)
        field, value = _found(stored, keys)
        if "unknown field" in what:
            raise CheckpointError(f"{field} has an entry {what.split('`')[1]!r} that minillm does not know") from None
        raise CheckpointError(f"{field} is {shown(value)}; it must be {_allowed(schema, keys) or what}") from None
    except UnicodeEncodeError:
        raise CheckpointError("some text in it is half a surrogate pair, which no UTF-8 can hold") from None


def shown(value: Any) -> str:
    """A value from a file in at most some sixty characters."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no integer of more than some thousand digits
        return f"an integer of {value.bit_length():,} bits"


def _found(stored: Any, keys: list[str]) -> tuple[str, Any]:
    """The path to the value that is wrong, and the value: the container where the path ends in an unnamed entry."""
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
    """What the schema's description says of the field, or of the nearest one around it that has a description."""
    found = None
    for key in keys:
        hint = get_type_hints(schema, include_extras=True).get(key)
        if get_origin(hint) is Annotated:
            found = hint.__metadata__[0].description
            hint = get_args(hint)[0]
        inside = [part for part in (hint, *get_args(hint)) if isinstance(part, type)]
        schema = next((part for part in inside if issubclass(part, msgspec.Struct)), object)
    return found
