"""Mutants of a function: versions that each have one small mistake, made by an edit of the syntax tree.

The mistakes are those that learners make: a wrong comparison, one too many or too few, the wrong axis, swapped
arguments, a forgotten factor, mask, clamp or rescale, a statement left out, a loop that stops after one iteration.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minillm.errors import LessonError
from minillm.teaching.source import compiled, plain_function


@dataclass(frozen=True)
class Mutant:
    """One version of a function with a mistake. `description` names the edit: the line, and the change in it."""

    description: str
    source: str


def mutants_of(function: Any) -> list[Mutant]:
    """Every mutant of `function`: a function, a class, a Triton kernel or a numba function.

    Raises:
        LessonError: the source of the function cannot be read.
    """
    tree = ast.parse(source_of(function))
    [definition] = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    unchanged = ast.unparse(tree)
    found: dict[str, str] = {}
    descriptions: Counter[str] = Counter()
    for node, line in list(_places(definition)):
        for new in _edits(node, definition):
            source = _with(tree, parents[node], node, ast.copy_location(new, node))
            if source != unchanged and source not in found:
                change = f"{_text(node)} -> {_text(new)}" if isinstance(node, ast.expr) else f"-> {_text(new)}"
                text = f"{line} [{change}]"
                descriptions[text] += 1
                found[source] = text + (f" #{descriptions[text]}" if descriptions[text] > 1 else "")
    return [Mutant(description, source) for source, description in found.items()]


def source_of(function: Any) -> str:
    """The source of the Python function that a learner writes, also for a Triton kernel or a numba function."""
    plain = plain_function(function)
    try:
        return textwrap.dedent(inspect.getsource(plain))
    except (OSError, TypeError):
        raise LessonError(f"the source of {function!r} cannot be read; define it in a file") from None


def build(mutant: Mutant, function: Any) -> Any:
    """The mutant as a function with the globals of `function`. Raises what its definition raises."""
    plain = plain_function(function)
    module = inspect.getmodule(plain)
    namespace = dict(getattr(plain, "__globals__", None) or vars(module))
    file = f"<mutant of {plain.__name__}, {abs(hash(mutant.source))}>"
    exec(compiled(mutant.source, file), namespace)
    return namespace[plain.__name__]


# ----------------------------------------------------------------------------------------------------- places and text


def _places(definition: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every node of the body with the line of its statement, in a fixed order; no docstrings and no annotations."""
    for node in _children(definition):
        if isinstance(node, ast.stmt):
            line = _text(node)
            yield node, line
            for part in _expressions(node):
                yield part, line
            yield from _places(node)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not _is_docstring(child):
            yield child
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from _children(child)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of one statement, without those of the statements inside it, annotations and decorators."""
    if isinstance(statement, ast.Raise):
        return  # the exercises do not check error messages
    for field, value in ast.iter_fields(statement):
        if field in ("body", "orelse", "finalbody", "handlers", "annotation", "returns", "args", "decorator_list"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.expr):
                yield from ast.walk(part)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _text(node: ast.AST) -> str:
    """The first line of the source of `node`; of a compound statement, its head."""
    if isinstance(node, ast.Pass):
        return "nothing"
    return ast.unparse(node).strip().splitlines()[0]


def _with(tree: ast.Module, parent: ast.AST, node: ast.AST, new: ast.AST) -> str:
    """The source of `tree` with `node`, a child of `parent`, replaced by `new`; `tree` is unchanged afterwards."""
    for field, value in ast.iter_fields(parent):
        if value is node:
            setattr(parent, field, new)
            text = ast.unparse(tree)
            setattr(parent, field, node)
            return text
        if isinstance(value, list) and any(part is node for part in value):
            place = next(i for i, part in enumerate(value) if part is node)
            value[place] = new
            text = ast.unparse(tree)
            value[place] = node
            return text
    raise AssertionError("a node is a child of its parent")


# ------------------------------------------------------------------------------------------------------------- edits

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
KEPT_SIDES: dict[type, str] = {
    **dict.fromkeys((ast.Add, ast.Mult, ast.BitAnd, ast.BitOr), "both"),
    **dict.fromkeys((ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift), "left"),
}
"""The sides of an operator that may be left alone when the other side is forgotten."""
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.MatMult)
NAMES = {
    "min": "max",
    "amin": "amax",
    "minimum": "maximum",
    "floor": "ceil",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "argmax": "argmin",
    "any": "all",
    "exp": "exp2",
    "log": "log2",
    "sum": "mean",
    "cos": "sin",
    "popleft": "pop",
    "append": "appendleft",
    "tril": "triu",
    "repeat": "repeat_interleave",
}
ONE_WAY = frozenset(("ones", "ones_like", "mean", "appendleft", "pop"))
OTHER_NAME = {**NAMES, **{new: old for old, new in NAMES.items() if new not in ONE_WAY}}
VALUES = frozenset(("abs", "ceil", "exp", "floor", "int", "log", "log2", "norm", "round", "softmax", "sqrt", "square"))
BOUNDS = frozenset(("amax", "amin", "clamp", "clip", "max", "maximum", "min", "minimum", "where"))
COPIES = frozenset(
    ("contiguous", "copy", "deepcopy", "detach", "list", "reversed", "set", "sorted", "tuple", "double", "to")
)
REPLACED_BY_ARGUMENT = VALUES | BOUNDS | COPIES
"""Functions that a mutant replaces by their first argument: a forgotten call."""
SYMMETRIC = frozenset(("min", "max", "minimum", "maximum", "equal", "allclose", "gcd"))
"""Functions whose arguments may be swapped without effect."""
LIBRARIES = ("torch", "tl", "np", "math", "F", "triton", "itertools", "dataclasses", "functional")


def _edits(node: ast.AST, definition: ast.AST) -> Iterator[ast.AST]:
    """The mutations of one node; the node itself is not changed."""
    for kind, rule in RULES:
        if isinstance(node, kind):
            yield from rule(node)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from (ast.Name(other, ast.Load()) for other in _lookalikes(node.id, definition))


def _changed(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _compare(node: ast.Compare) -> Iterator[ast.AST]:
    for place, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield _changed(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]])


def _binary(node: ast.BinOp) -> Iterator[ast.AST]:
    for other in OPERATORS.get(type(node.op), ()):
        yield _changed(node, op=other())
    kept = KEPT_SIDES.get(type(node.op), "")
    if kept:
        yield node.left
    if kept == "both":
        yield node.right
    if isinstance(node.op, ORDERED):
        yield _changed(node, left=node.right, right=node.left)


def _boolean(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    for place in range(len(node.values)):
        rest = [*node.values[:place], *node.values[place + 1 :]]
        yield _changed(node, values=rest) if len(rest) > 1 else rest[0]


def _unary(node: ast.UnaryOp) -> Iterator[ast.AST]:
    yield node.operand
    if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        yield from (ast.Constant(value) for value in (-node.operand.value + 1, -node.operand.value - 1))


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield from (ast.Constant(value + 1), ast.Constant(value - 1))
    elif isinstance(value, float):
        yield from (ast.Constant(value * 2), ast.Constant(0.0)) if value else (ast.Constant(1.0),)


def _attribute(node: ast.Attribute) -> Iterator[ast.AST]:
    if node.attr in OTHER_NAME:
        yield _changed(node, attr=OTHER_NAME[node.attr])
    if node.attr == "inf":
        yield ast.Constant(100.0)
    if node.attr in ("T", "mT"):
        yield node.value


def _call(node: ast.Call) -> Iterator[ast.AST]:
    function, arguments = node.func, node.args
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    of_object = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") not in LIBRARIES
    if of_object and not isinstance(function.value, ast.Constant):
        yield function.value  # x.clamp(0, 1) -> x
    elif name in REPLACED_BY_ARGUMENT and arguments:
        yield arguments[1] if name == "where" and len(arguments) > 1 else arguments[0]
    if isinstance(function, ast.Name) and name in OTHER_NAME:
        yield _changed(node, func=ast.Name(OTHER_NAME[name], ast.Load()))
    if name == "float" and arguments and isinstance(arguments[0], ast.Constant):
        yield ast.Constant(-100.0 if "-" in str(arguments[0].value) else 100.0)
    if name == "cdiv" and len(arguments) == 2:
        yield ast.BinOp(arguments[0], ast.FloorDiv(), arguments[1])
    if name == "range":
        yield from _range(node)
    for place in range(0 if name in SYMMETRIC else len(arguments) - 1):
        swapped = [*arguments[:place], arguments[place + 1], arguments[place], *arguments[place + 2 :]]
        yield _changed(node, args=swapped)
    for place in range(len(node.keywords)):
        yield _changed(node, keywords=[*node.keywords[:place], *node.keywords[place + 1 :]])


def _range(node: ast.Call) -> Iterator[ast.AST]:
    place = 1 if len(node.args) > 1 else 0
    end = node.args[place]
    for operator in (ast.Add(), ast.Sub()):
        moved_end = ast.BinOp(end, operator, ast.Constant(1))
        yield _changed(node, args=[*node.args[:place], moved_end, *node.args[place + 1 :]])
    if not place:
        yield _changed(node, args=[ast.Constant(1), end])


def _slice(node: ast.Slice) -> Iterator[ast.AST]:
    for side in ("lower", "upper"):
        bound = getattr(node, side)
        if bound is None:
            continue
        yield _changed(node, **{side: None})
        if not isinstance(bound, ast.Constant):
            yield _changed(node, **{side: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
            yield _changed(node, **{side: ast.BinOp(bound, ast.Sub(), ast.Constant(1))})


def _subscript(node: ast.Subscript) -> Iterator[ast.AST]:
    index = _text(node.slice)
    if index in ("0", "-1") and isinstance(node.ctx, ast.Load):
        yield _changed(node, slice=ast.Constant(-1 if index == "0" else 0))


def _either(node: ast.IfExp) -> Iterator[ast.AST]:
    yield from (node.body, node.orelse)


def _tuple(node: ast.Tuple) -> Iterator[ast.AST]:
    if isinstance(node.ctx, ast.Load):
        for place in range(len(node.elts) - 1):
            parts = node.elts
            yield _changed(node, elts=[*parts[:place], parts[place + 1], parts[place], *parts[place + 2 :]])


def _comprehension(node: ast.AST) -> Iterator[ast.AST]:
    for place, loop in enumerate(node.generators):
        for condition in range(len(loop.ifs)):
            fewer = _changed(loop, ifs=[*loop.ifs[:condition], *loop.ifs[condition + 1 :]])
            yield _changed(node, generators=[*node.generators[:place], fewer, *node.generators[place + 1 :]])


def _if(node: ast.If) -> Iterator[ast.AST]:
    yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    yield _changed(node, test=ast.Constant(True))
    yield _changed(node, test=ast.Constant(False)) if node.orelse else ast.Pass()


def _loop(node: ast.For | ast.While) -> Iterator[ast.AST]:
    yield _changed(node, body=[*node.body, ast.Break()])
    yield ast.Pass()


def _simple(node: ast.stmt) -> Iterator[ast.AST]:
    yield ast.Pass()


def _augmented(node: ast.AugAssign) -> Iterator[ast.AST]:
    yield ast.Pass()
    for other in OPERATORS.get(type(node.op), ()):
        yield _changed(node, op=other())
    yield ast.Assign([node.target], node.value)


def _break(node: ast.Break | ast.Continue) -> Iterator[ast.AST]:
    yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    yield ast.Pass()


RULES: tuple[tuple[type | tuple[type, ...], Callable[[Any], Iterator[ast.AST]]], ...] = (
    (ast.Compare, _compare),
    (ast.BinOp, _binary),
    (ast.BoolOp, _boolean),
    (ast.UnaryOp, _unary),
    (ast.Constant, _constant),
    (ast.Attribute, _attribute),
    (ast.Call, _call),
    (ast.Slice, _slice),
    (ast.Subscript, _subscript),
    (ast.IfExp, _either),
    (ast.Tuple, _tuple),
    ((ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp), _comprehension),
    (ast.If, _if),
    ((ast.For, ast.While), _loop),
    ((ast.Expr, ast.Assign, ast.Delete, ast.Raise), _simple),
    (ast.AugAssign, _augmented),
    ((ast.Break, ast.Continue), _break),
)


def _lookalikes(name: str, definition: ast.AST) -> list[str]:
    """Names of the same function that differ from `name` in one word: `k_scale` and `v_scale`, `m_a` and `m_b`."""
    stored = {
        node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    known = stored | {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    words = re.split("_", name)
    found = []
    for other in sorted(known - {name}):
        parts = other.split("_")
        if len(parts) == len(words) > 1 and sum(a != b for a, b in zip(words, parts, strict=True)) == 1:
            found.append(other)
    return found
