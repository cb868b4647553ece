"""Values as short readable text: enough for a learner to recompute a counterexample by hand, and no more."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np
import torch

ArrayText = Callable[[torch.Tensor, str], str]
MAX_ELEMENTS = 64
MAX_ITEMS = 12
MAX_LINE = 70
MAX_CHARACTERS = 600
MAX_FULL = 24
"""An array of up to so many numbers is shown in full where space is short."""
SHOWN_AS_ZERO = 5e-5
"""Numbers nearer to 0 than this have no digit left when four decimals are shown."""


def kind(value: object) -> str:
    """The type in words: `float32 tensor [2, 3]`, `list of 4`, `int`."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else "sparse "
        return f"{str(value.dtype).removeprefix('torch.')} {layout}tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {list(value.shape)}"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


def short(value: object) -> str:
    """`value` on one line, or on a few if it is a tensor; no addresses, and at most 600 characters."""
    return _cut(_text(value, _array))


def brief(value: object) -> str:
    """Like `short`, but an array of more than 24 numbers is shown by its type, shape and range."""
    return _cut(_text(value, _range))


def _cut(text: str) -> str:
    text = without_addresses(text)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 2].rstrip() + " …"


def without_addresses(text: str) -> str:
    """`text` without memory addresses, which differ from run to run: `<Thing at 0x7f3a…>` becomes `<Thing>`."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _text(value: object, array: ArrayText) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        try:
            return array(torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value), kind(value))
        except Exception:  # an answer that cannot be printed, such as a sparse tensor, must still be reported
            return kind(value)
    if isinstance(value, (np.number, np.bool_)):
        value = value.item()  # 3, and not np.int64(3)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_text(item, array) for item in value[:MAX_ITEMS]) + (", …" if len(value) > MAX_ITEMS else "")
        comma = "," if len(value) == 1 and isinstance(value, tuple) else ""
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{comma})"
    if isinstance(value, Mapping):
        items = [f"{key!r}: {_text(item, array)}" for key, item in list(value.items())[:MAX_ITEMS]]
        lines = sum(map(len, items)) > MAX_LINE or any("\n" in item for item in items)
        return "{" + (",\n " if lines else ", ").join(items) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_text(item, array) for item in value)[:MAX_ITEMS]) + "}" if value else "set()"
    if isinstance(value, torch.Generator):
        return f"torch.Generator seeded with {value.initial_seed()}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_fields(value, array))})"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return repr(value)


def _fields(value: object, array: ArrayText) -> list[str]:
    """`name=value` of the fields that differ from their default."""
    shown = []
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.repr and (type(default) is not type(content) or repr(default) != repr(content)):
            shown.append(f"{field.name}={_text(content, array)}")
    return shown


def _range(tensor: torch.Tensor, name: str) -> str:
    """A small array in full; of a large one the range of its finite numbers, and the counts of NaN, inf and -inf."""
    tensor = tensor.detach().cpu()
    if tensor.numel() <= MAX_FULL or tensor.is_complex():
        return _array(tensor, name)
    numbers = tensor.double()
    finite = numbers[numbers.isfinite()]
    parts = [f"{finite.min().item():.4g} to {finite.max().item():.4g}"] if len(finite) else []
    others = (("NaN", numbers.isnan()), ("inf", numbers == torch.inf), ("-inf", numbers == -torch.inf))
    parts += [f"{int(found.sum())} × {word}" for word, found in others if found.any()]
    return f"{name}: {', '.join(parts)}"


def _array(tensor: torch.Tensor, name: str) -> str:
    """Type and shape, then the numbers row by row; of a large tensor, only its first corner."""
    tensor = tensor.detach().cpu()
    corner, cut = tensor, ""
    if tensor.numel() > MAX_ELEMENTS:
        corner = tensor[tuple(slice(0, 4) for _ in tensor.shape)]
        while corner.numel() > MAX_ELEMENTS:
            corner = corner[:1].reshape(corner.shape[1:])
        cut = f" (its first corner of {list(corner.shape)})"
    if corner.numel() == 0:
        return f"{name}, empty"
    if corner.squeeze().dim() <= 1:
        return f"{name}{cut}: {rows_of(corner)}"
    return f"{name}{cut}:\n{rows_of(corner)}"


def rows_of(tensor: torch.Tensor) -> str:
    """The numbers of a tensor, row by row, without brackets for dimensions of size 1 and without empty lines."""
    tensor = tensor.squeeze()
    numbers = tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    whole = not tensor.is_floating_point() or bool((tensor == tensor.round()).all() and (tensor.abs() < 1e6).all())
    options: dict[str, object] = {"precision": 0 if whole else 4, "suppress_small": True}
    if not whole and _loses_digits(numbers.abs()):
        texts = [f"{number:.4g}" for number in numbers.flatten().tolist()]
        width = max(map(len, texts))
        options = {"formatter": {"float_kind": lambda number: f"{float(number):.4g}".rjust(width)}}
    text = np.array2string(numbers.numpy(), max_line_width=100, threshold=10**6, separator=", ", **options)
    return re.sub(r"\n\s*\n", "\n", text)


def _loses_digits(sizes: torch.Tensor) -> bool:
    """Whether four decimals show a number as 0 that is not, or leave two digits of the largest at most."""
    return bool(((sizes > 0) & (sizes < SHOWN_AS_ZERO)).any() or (sizes < 1e-2).all())
