"""A check that watches PyTorch's operations sees nothing of what NumPy computes, so tensors may not be handed to it."""

from __future__ import annotations

from typing import Any

from minillm.errors import LessonError

HANDED_OVER = {"numpy", "__array__", "__dlpack__"}


def refuse_numpy(func: Any) -> None:
    """Raise `LessonError` if `func`, an operation that a `TorchFunctionMode` sees, hands a tensor to NumPy."""
    if getattr(func, "__name__", "") in HANDED_OVER:
        raise LessonError("this check watches PyTorch's operations: compute with torch, not with NumPy")
