"""The error of a part of a stage: as a short text, and whether the process can go on after it."""

from __future__ import annotations

import re

BEGINNING, END = 250, 600
"""Characters that are kept of a long text. PyTorch gives the reason first; Triton prints the position of an error, then
the source, and the reason last."""
DEVICE_ERROR = re.compile(r"(CUDA (driver )?error|Error \[CUDA\])(?!.*captur)", re.IGNORECASE)
"""A CUDA error in the messages of PyTorch and of Triton, but none that only ends the capture of a CUDA graph
("operation not permitted when stream is capturing"): the process can go on after that. PyTorch words a lack of memory
differently."""


class DeviceFault(RuntimeError):
    """A CUDA error, such as an illegal access: from then on every call to the GPU fails in this process."""


def is_device_error(problem: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, names a CUDA error."""
    while problem is not None:
        if DEVICE_ERROR.search(str(problem)):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def error_text(problem: BaseException) -> str:
    """Return the type and the text of an error and of its first cause, each without the middle of a long text."""
    root = problem
    while root.__cause__ is not None:
        root = root.__cause__
    return _short(problem) if root is problem else f"{_short(problem)}; its cause is {_short(root)}"


def _short(problem: BaseException) -> str:
    name, text = type(problem).__name__, str(problem).strip()
    if len(text) > BEGINNING + END:
        text = f"{text[:BEGINNING]} … {text[-END:]}"
    return f"{name}: {text}" if text else name
