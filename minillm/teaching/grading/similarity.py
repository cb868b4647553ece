"""How alike two functions are: their syntax trees without names, texts and numbers. Evidence, not a verdict.

Short functions with one natural solution are alike in every class, so a number near 1 means nothing by itself. Read
both before you say anything to anyone.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from minillm.teaching.grading.program import Program, is_stub

MIN_NODES = 25
"""Functions with fewer nodes are alike by necessity. They are compared together with the helpers that they call: a
function of two lines may have all of the answer in a helper."""


def shapes_of(program: Program) -> dict[str, list[str]]:
    """For each written function, by its last definition: the kinds of its nodes, in order, each with its parent's; for
    a short one (`MIN_NODES`) also those of its helpers. What is assigned to its name afterwards does not count; a name
    that is only assigned, `name = other`, is `other`."""
    written = {node.name: node for s in program.statements for node in _functions(s.node) if not is_stub(node)}
    for statement in program.statements:
        match statement.node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=other)) if other in written:
                written.setdefault(name, written[other])
    return {name: _with_helpers(name, written) for name in written}


def _with_helpers(name: str, written: Mapping[str, ast.AST]) -> list[str]:
    """The shape of a function; if it is short, also of the written functions that it names, directly or through
    others."""
    found, pairs = [name], shape(written[name])
    if len(pairs) >= MIN_NODES:
        return pairs
    for each in found:  # which grows
        named = {node.id for node in ast.walk(written[each]) if isinstance(node, ast.Name)}
        found += sorted(other for other in named if other in written and other not in found)
    nodes = dict.fromkeys(written[each] for each in found)  # a function with two names once
    return [pair for node in nodes for pair in shape(node)]


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that a top-level statement defines: itself, or those in its branches."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
        for child in ast.iter_child_nodes(node):
            yield from _functions(child)


def shape(node: ast.AST) -> list[str]:
    """The normalised tree of a function, flat: names, texts, numbers, annotations and docstrings are left out."""
    pairs: list[str] = []
    queue: list[tuple[str, ast.AST]] = [("", node)]
    while queue and len(pairs) < 5_000:
        parent, here = queue.pop()
        kind = type(here).__name__
        if isinstance(here, ast.Expr) and isinstance(here.value, ast.Constant):
            continue
        if isinstance(here, (ast.BinOp, ast.UnaryOp, ast.BoolOp)):
            kind += f":{type(here.op).__name__}"
        if isinstance(here, ast.Compare):
            kind += ":" + ",".join(type(op).__name__ for op in here.ops)
        pairs.append(f"{parent}>{kind}")
        skipped = {"annotation", "returns", "ctx", "op", "ops"}
        for name, value in ast.iter_fields(here):
            if name in skipped:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    queue.append((kind, child))
    return pairs


def similarity(one: Sequence[str], other: Sequence[str]) -> float:
    """Shared pairs over all pairs, counted (the Jaccard index of multisets): 1 for equal trees."""
    a, b = Counter(one), Counter(other)
    union = sum((a | b).values())
    return sum((a & b).values()) / union if union else 0.0


def alike(trees: Iterable[tuple[str, Sequence[str]]], least: float) -> list[tuple[str, str, float]]:
    """The pairs of students of whose trees two are at least `least` alike, the most alike first.

    `trees`: (student, tree) of every file; two of the same student are no pair.
    """
    known = sorted({(student, tuple(tree)) for student, tree in trees if len(tree) >= MIN_NODES})
    most: dict[tuple[str, str], float] = {}
    for (one, tree), (other, its) in itertools.combinations(known, 2):
        if one != other and (share := similarity(tree, its)) >= least:
            most[one, other] = max(share, most.get((one, other), 0.0))
    return sorted([(*pair, share) for pair, share in most.items()], key=lambda pair: (-pair[2], pair[0], pair[1]))
