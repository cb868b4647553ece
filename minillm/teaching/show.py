"""Show a value small and readable: what a learner needs to redo the counterexample by hand, and no more."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
import torch

MAX_ELEMENTS = 64
MAX_ITEMS = 12
MAX_LINE = 70
MAX_CHARACTERS = 600


def kind(value: object) -> str:
    """The type in words: `float32 tensor [2, 3]`, `list of 4`, `int`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {list(value.shape)}"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


def short(value: object) -> str:
    """`value` on one line, or on a few if it is a tensor; no addresses, and at most 600 characters."""
    text = without_addresses(_text(value))
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 2].rstrip() + " …"


def without_addresses(text: str) -> str:
    """`<Thing at 0x7f3a…>` differs from run to run; `<Thing>` does not."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _text(value: object) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _array(torch.as_tensor(value), kind(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_text(item) for item in value[:MAX_ITEMS]) + (", …" if len(value) > MAX_ITEMS else "")
        comma = "," if len(value) == 1 and isinstance(value, tuple) else ""
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{comma})"
    if isinstance(value, Mapping):
        items = [f"{key!r}: {_text(item)}" for key, item in list(value.items())[:MAX_ITEMS]]
        lines = sum(map(len, items)) > MAX_LINE or any("\n" in item for item in items)
        return "{" + (",\n " if lines else ", ").join(items) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))[:MAX_ITEMS]) + "}" if value else "set()"
    if isinstance(value, torch.Generator):
        return f"torch.Generator seeded with {value.initial_seed()}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_fields(value))})"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return repr(value)


def _fields(value: object) -> list[str]:
    """`name=value` of the fields that say something: those that differ from their default."""
    shown = []
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.repr and (type(default) is not type(content) or repr(default) != repr(content)):
            shown.append(f"{field.name}={_text(content)}")
    return shown


def _array(tensor: torch.Tensor, name: str) -> str:
    """Rows of numbers under a line that says the type; large tensors show their corner."""
    tensor = tensor.detach().cpu()
    corner, cut = tensor, ""
    if tensor.numel() > MAX_ELEMENTS:
        corner = tensor[tuple(slice(0, 4) for _ in tensor.shape)]
        while corner.numel() > MAX_ELEMENTS:
            corner = corner[:1].reshape(corner.shape[1:])
        cut = f" (its first corner of {list(corner.shape)})"
    if corner.numel() == 0:
        return f"{name}, empty"
    if corner.dim() <= 1:
        return f"{name}{cut}: {_rows(corner)}"
    return f"{name}{cut}:\n{_rows(corner)}"


def _rows(tensor: torch.Tensor) -> str:
    whole = not tensor.is_floating_point() or bool((tensor == tensor.round()).all() and (tensor.abs() < 1e6).all())
    options = {"precision": 0, "suppress_small": True} if whole else {"precision": 4, "suppress_small": True}
    numbers = tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    return np.array2string(numbers.numpy(), max_line_width=100, threshold=10**6, separator=", ", **options)
