"""The cause of an error, in words that name the values of the failing line.

Messages of Python and torch describe their own rules. Here the same fact is stated about the learner's line: which
index is past the end of which list, which name has no value yet, which two sizes do not match. Nothing is guessed.
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Callable
from types import FrameType

from minillm.teaching.diagnosis_rules import PYTHON, TRITON

QUOTED = re.compile(
    r"(?P<kind>\w*(?:Error|Exception)(?:Impl)?): (?P<message>.*?)(?: \(in the line `.*`\))?$", re.DOTALL
)
"""An error quoted in the message of another one, as the launchers of lessons 8 and 9 do."""
QUOTED_REPR = re.compile(r"""(?P<kind>\w*Error)\((["'])(?P<message>.*)\2,?\)$""", re.DOTALL)
"""An error's `repr`, which Triton's interpreter quotes."""
LONGEST = 60
"""Characters of the learner's code that are quoted."""


def cause_of_error(error: BaseException | None, own: Callable[[FrameType], bool]) -> str:
    """The cause of the error in one sentence; "" if the error is of an unknown kind.

    `own`: whether a frame of the traceback runs the learner's code.
    """
    if error is None:
        return ""
    kind, message, rules = type(error).__name__, _first_line(error), PYTHON
    for retold in (QUOTED, QUOTED_REPR):
        if quoted := retold.match(message):
            kind, message, rules = quoted["kind"], quoted["message"], (*TRITON, *PYTHON)
    for kinds, pattern, sentence in rules:
        found = re.fullmatch(kinds, kind) and re.fullmatch(pattern, message, re.DOTALL)
        if found:
            groups = [group.replace("'constexpr[", "").replace("]'", "") if group else "" for group in found.groups()]
            return _in_called(error, own) + sentence.format(*groups) + _failing_expression(error, own)
    return ""


def _in_called(error: BaseException, own: Callable[[FrameType], bool]) -> str:
    """`in attention(), which this line calls: ` if minillm's code raised the error for the learner's line; else ""."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = max((number for number, frame in enumerate(frames) if own(frame)), default=len(frames))
    for called in frames[last + 1 : last + 2]:
        module, name = called.f_globals.get("__name__", ""), called.f_code.co_name
        if module.startswith("minillm.") and not name.startswith("__"):  # not a hook that a check watches tensors with
            return f"in {name}(), which this line calls: "
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _failing_expression(error: BaseException, own: Callable[[FrameType], bool]) -> str:
    """For a wrong index, a division by 0 and the maximum of nothing: the expression with its values; else ""."""
    frames = [step for step in _steps(error) if own(step[0])]
    if not frames or not isinstance(error, (IndexError, ZeroDivisionError, ValueError)):
        return ""
    frame, place = frames[-1]
    try:
        node = ast.parse(_segment(frame, place), mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    if isinstance(error, IndexError) and isinstance(node, ast.Subscript):
        index, length = _value(node.slice, frame), _length(node.value, frame)
        if isinstance(index, int) and length is not None and not -length <= index < length:
            return f" ({_code(node)}: index {index}, of {length} {'entry' if length == 1 else 'entries'})"
    if isinstance(error, ZeroDivisionError) and isinstance(node, ast.BinOp) and _value(node.right, frame) == 0:
        return f" ({_code(node.right)})"
    if isinstance(error, ValueError) and isinstance(node, ast.Call) and len(node.args) == 1:
        return f" ({_code(node.args[0])} is empty)" if _length(node.args[0], frame) == 0 else ""
    return ""


Place = tuple[int, int, int, int]


def _steps(error: BaseException) -> list[tuple[FrameType, Place]]:
    """The frames of the traceback, each with the first and last line and column of the expression that it evaluated.

    Frames without columns are left out; Python 3.10 has no columns.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = []
    for frame, summary in zip(frames, traceback.extract_tb(error.__traceback__), strict=False):
        place = tuple(getattr(summary, name, None) for name in ("lineno", "end_lineno", "colno", "end_colno"))
        if None not in place:
            found.append((frame, place))
    return found  # type: ignore[return-value]


def _segment(frame: FrameType, place: Place) -> str:
    """The source of the expression, in parentheses so that it may span lines."""
    first, last, begin, end = place
    lines = [linecache.getline(frame.f_code.co_filename, number) for number in range(first, last + 1)]
    whole = "".join(lines)
    tail = len(lines[-1].encode()[end:].decode()) if lines else 0
    return "(" + whole[len(lines[0].encode()[:begin].decode()) : len(whole) - tail] + ")" if lines else ""


def _value(node: ast.expr, frame: FrameType) -> object:
    """The value of a side-effect-free expression in `frame`; None if it has side effects or raises."""
    plain = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Slice, ast.operator, ast.unaryop)
    if not all(isinstance(part, (*plain, ast.expr_context)) for part in ast.walk(node)):
        return None
    try:
        return eval(compile(ast.Expression(node), "<line>", "eval"), frame.f_globals, frame.f_locals)
    except Exception:
        return None


def _length(node: ast.expr, frame: FrameType) -> int | None:
    value = _value(node, frame)
    return len(value) if isinstance(value, (list, tuple, str)) else None


def _code(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
