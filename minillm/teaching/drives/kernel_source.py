"""What the source of a Triton kernel says: whether it is a stub, and which of its loads lack a mask or an `other`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def source_of(kernel: Any) -> ast.FunctionDef | None:
    """The syntax tree of the kernel; None if its source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(kernel, "fn", kernel))))
    except (OSError, SyntaxError, TypeError):
        return None
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


def stub_message(tree: ast.FunctionDef | None) -> str | None:
    """The message of a stub, which somewhere raises `NotImplementedError`; None for any other kernel."""
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)] if tree else []
    if not raised:
        return None
    said = [node.value for node in ast.walk(raised[0]) if isinstance(node, ast.Constant)]
    return str(said[0]) if said else "write it here"


def unmasked_loads(tree: ast.FunctionDef | None) -> list[str]:
    """The source of each call of `tl.load` that loads a block without a mask.

    A block is an expression made from `tl.arange`. If `%`, `tl.minimum`, `tl.where`, `tl.clamp` or a product with a
    condition keeps its offsets inside the tensor, it needs no mask. Nor does it in a branch, which may be there for
    whole blocks only. Only the source is examined; the kernel does not run.
    """
    found: list[str] = []
    kinds: dict[str, str] = {}
    in_branch = _in_branches(tree)
    for node in _in_order(tree.body if tree else []):
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            may_leave = _is_load(call) and not _is_masked(call) and _kind(call.args[0], kinds) == "block"
            if may_leave and call not in in_branch:
                found.append(ast.unparse(call))
        kinds.update({name: _kind(value, kinds) for name, value in _bound(node)})
    return found


def loads_without_other(tree: ast.FunctionDef | None) -> list[ast.Call]:
    """Each call of `tl.load` that has a mask and no `other`, so that its masked lanes are undefined."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree else ()
    return [call for call in calls if _is_load(call) and _is_masked(call) and not _argument(call, 2, "other")]


def _is_load(call: ast.Call) -> bool:
    return _name(call.func) == "load" and bool(call.args)


def _is_masked(call: ast.Call) -> bool:
    return _argument(call, 1, "mask")


def _argument(call: ast.Call, place: int, name: str) -> bool:
    """Whether the call has this argument, by place or by name, and it is not None."""
    given = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == name)]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Simple statements in order, including those inside loops and branches; before these the expressions of their
    headers."""
    for node in body:
        inner = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
        if inner:
            yield from (part for part in ast.iter_child_nodes(node) if isinstance(part, (ast.expr, ast.withitem)))
            yield from _in_order(inner)
        else:
            yield node


def _in_branches(tree: ast.FunctionDef | None) -> set[ast.AST]:
    """All nodes that run only if a condition holds, or only if it does not."""
    choices = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))] if tree else []
    return {part for choice in choices for node in _branches(choice) for part in ast.walk(node)}


def _branches(choice: ast.If | ast.IfExp) -> list[ast.AST]:
    return [*choice.body, *choice.orelse] if isinstance(choice, ast.If) else [choice.body, choice.orelse]


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a simple statement binds, each with the expression that it is bound to, as far as it shows one."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.AugAssign):
        pairs = [(node.target, ast.BinOp(node.target, node.op, node.value))]
    for target, value in pairs:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            pairs += zip(target.elts, value.elts, strict=False)
        elif isinstance(target, ast.Name):
            yield target.id, value


def _kind(node: ast.expr, kinds: Mapping[str, str]) -> str:
    """The kind of an expression: `block`, `kept inside` (a block that cannot leave the tensor), `condition` (a block of
    truth values) or `number`."""
    if isinstance(node, ast.Call) and _name(node.func) in ("load", "sum", "max", "min"):
        return "number"
    parts = [kinds.get(node.id, "number")] if isinstance(node, ast.Name) else []
    if isinstance(node, ast.Call) and _name(node.func) == "arange":
        parts.append("block")
    parts += [_kind(child, kinds) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.Compare) and "block" in parts:
        return "condition"
    bounded = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    bounded |= isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and "condition" in parts
    bounded |= isinstance(node, ast.Call) and _name(node.func) in ("minimum", "where", "clamp")
    if "block" in parts and not bounded and "kept inside" not in parts:
        return "block"
    kept = "block" in parts or "kept inside" in parts
    return "kept inside" if kept else "condition" if "condition" in parts else "number"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
