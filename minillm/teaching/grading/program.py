"""The part of a notebook that one function needs: its definition, and the statements whose names it uses.

A notebook is not run from top to bottom. Definitions, imports and assignments run if the function needs their names,
directly or through others. Expressions (`check(...)`, `print(...)`, `model.eval()`), loops and assignments to
attributes never do. So a notebook whose cells were reordered, split or duplicated means the same, and a call at the top
level that takes an hour costs nothing.
"""

from __future__ import annotations

import ast
import asyncio
import dis
import inspect
import linecache
import re
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from minillm.teaching.grading.cells import Cell, python_of
from minillm.teaching.source import compiled

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_FUTURE = "annotations"
PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
"""Which reads the submissions; a later one may know more syntax."""
_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `ast.parse` and `compile` raise."""
_EXERCISE = re.compile(r"l\d\d\.\w+")
_NO_REFERENCES: Mapping[str, str] = types.MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Statement:
    """One top-level statement that binds names. `by_call`: it stands for `check("l02.append_kv", mine)`, and counts
    only where no `append_kv` is written."""

    cell: int
    node: ast.stmt
    flags: int
    by_call: bool = False

    @cached_property
    def code(self) -> types.CodeType:
        """The compiled statement. Raises `_NOT_PYTHON`. It may `await`, as in a notebook."""
        flags = self.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return compile(ast.Module([self.node], []), file_of(self.cell), "exec", flags, dont_inherit=True)

    @cached_property
    def binds(self) -> frozenset[str]:
        """The names that it binds."""
        return frozenset(_bound(self.node))

    @cached_property
    def uses(self) -> frozenset[str]:
        """The global names that it reads, at once or when a function in it is called; none if it does not compile."""
        try:
            return frozenset(global_names(self.code))
        except _NOT_PYTHON:
            return frozenset()


@dataclass(frozen=True)
class Broken:
    """A cell that is not Python."""

    cell: int
    line: int
    message: str
    source: str

    def __str__(self) -> str:
        return f"cell {self.cell}, line {self.line}: {self.message} (read by {PYTHON})"


@dataclass
class Program:
    """All statements of a notebook, in its order, and its broken cells."""

    statements: list[Statement]
    broken: list[Broken]
    in_loops: set[str] = field(default_factory=set)
    """The functions that are defined inside a loop or a `match`, and nowhere else that runs."""
    notes: list[str] = field(default_factory=list)

    @property
    def functions(self) -> set[str]:
        """The names of all functions and of whatever else is bound: stubs too, and those in broken cells and loops."""
        in_broken = {name for each in self.broken for name in re.findall(r"\bdef +(\w+) *\(", each.source)}
        return {name for statement in self.statements for name in statement.binds} | in_broken | self.in_loops

    def broken_definition(self, name: str) -> Broken | None:
        """The last broken cell with the text `def name(`."""
        found = [each for each in self.broken if f"def {name}(" in each.source.replace("  ", " ")]
        return found[-1] if found else None

    def definition(self, name: str) -> Statement | None:
        """The last statement that binds `name` and is neither an unwritten stub nor an import; else the last import;
        else the last stub; else None."""
        found, written = self._candidates(name)
        distinct = {ast.dump(statement.node) for statement in written}
        if len(distinct) > 1:
            self.notes.append(f"{name} is written {len(distinct)} times; the last one counts")
        return (written or found or [None])[-1]

    def function(self, name: str) -> Statement | None:
        """The last written function or class of this name; else None."""
        written = self._candidates(name)[1]
        return next((s for s in reversed(written) if isinstance(s.node, _DEFINITIONS)), None)

    def _that_bind(self, name: str) -> list[Statement]:
        """The statements that bind `name`; those `by_call` only if all others are stubs or imports."""
        found = [s for s in self.statements if name in s.binds and not _is_given(s, name)]
        own = [s for s in found if not s.by_call]
        return found if all(is_stub(s.node) or isinstance(s.node, _IMPORTS) for s in own) else own

    def _candidates(self, name: str) -> tuple[list[Statement], list[Statement]]:
        """The statements that bind `name`, stubs before imports; and those of them that are neither."""
        bound = self._that_bind(name)
        imported = [s for s in bound if isinstance(s.node, _IMPORTS)]
        written = [s for s in bound if not is_stub(s.node) and s not in imported]
        return [*(s for s in bound if s not in imported), *imported], written

    def needed(self, definition: Statement) -> list[Statement]:
        """`definition` and every statement that it needs, in the notebook's order.

        A name is looked up first in the cell that uses it, because that is what a notebook's own check has seen, where
        another cell defines a helper of the same name later. Of the definitions of a function in other cells the last
        written one before that cell counts, for the same reason; if all come later, the last. Of other names every
        assignment and import before that cell runs; if all come later, all of them.
        """
        first = [definition, *self._wrapped_by(definition)]
        chosen, seen = set(first), set(definition.binds)
        wanted = [(name, s.cell) for s in first for name in sorted(s.uses | _used_exercises(s))]
        while wanted:
            name, cell = wanted.pop(0)
            if name in seen:
                continue
            seen.add(name)
            for statement in self._binding(name, cell):
                if statement not in chosen:
                    chosen.add(statement)
                    inner = sorted(statement.uses | _used_exercises(statement))
                    wanted += [(other, statement.cell) for other in inner]
        return [statement for statement in self.statements if statement in chosen or "*" in statement.binds]

    def _binding(self, name: str, cell: int) -> list[Statement]:
        found = self._that_bind(name)
        beside = [statement for statement in found if statement.cell == cell and not is_stub(statement.node)]
        if beside:
            return beside
        if any(isinstance(statement.node, (ast.FunctionDef, ast.AsyncFunctionDef)) for statement in found):
            known, written = self._candidates(name)
            before = [statement for statement in written if statement.cell < cell]
            definition = (before or written or known or [None])[-1]
            return [definition, *self._wrapped_by(definition)] if definition else []
        return [statement for statement in found if statement.cell < cell] or found

    def _wrapped_by(self, definition: Statement) -> list[Statement]:
        """What `f = wrap(f)` wraps: the last written function or class of this name before it, and all that binds the
        name between the two."""
        if not isinstance(definition.node, (ast.Assign, ast.AnnAssign)):
            return []
        before = self.statements[: self.statements.index(definition)]
        found = [s for s in before if s.binds & definition.binds & definition.uses and not is_stub(s.node)]
        last = max((i for i, s in enumerate(found) if isinstance(s.node, _DEFINITIONS)), default=len(found))
        return found[last:]


def parse(cells: Sequence[Cell]) -> Program:
    """The statements of the cells. A cell that is not Python is recorded; the others count."""
    trees: list[tuple[int, ast.Module]] = []
    broken: list[Broken] = []
    for number, source in cells:
        tree = _tree(number, source)
        if isinstance(tree, Broken):
            broken.append(tree)
        else:
            trees.append((number, tree))
    flags = _future_flags(tree for _, tree in trees)
    statements = [statement for number, tree in trees for statement in _statements(number, tree, flags)]
    bound = {name for statement in statements for name in statement.binds}
    in_loops = {name for _, tree in trees for node in tree.body for name in _defined(node)} - bound
    return Program([s for s in statements if not _is_future(s.node)], broken, in_loops)


def _statements(cell: int, tree: ast.Module, flags: int) -> Iterator[Statement]:
    """The statements of a cell that bind names; and `append_kv = mine` for every `check("l02.append_kv", mine)` and
    `use("l02.append_kv", mine)` in its expressions and assignments."""
    for node in tree.body:
        if set(_bound(node)):
            yield Statement(cell, node, flags)
        for call in ast.walk(node) if isinstance(node, (ast.Expr, ast.Assign)) else ():
            if isinstance(call, ast.Call) and (made := _as_assignment(call)) is not None:
                yield Statement(cell, made, flags, by_call=True)


def _as_assignment(call: ast.Call) -> ast.Assign | None:
    """`append_kv = mine` for such a call; None for any other, and where `mine` is `append_kv` itself."""
    match call:
        case ast.Call(ast.Name(called) | ast.Attribute(attr=called), [ast.Constant(str(exercise)), *more], options):
            functions = [*more, *(option.value for option in options if option.arg == "function")]
        case _:
            return None
    if called not in ("check", "use") or not _EXERCISE.fullmatch(exercise) or len(functions) != 1:
        return None
    target = ast.Name(exercise.partition(".")[2], ast.Store())
    if isinstance(functions[0], ast.Name) and functions[0].id == target.id:
        return None
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([target], functions[0]), call))


def is_stub(node: ast.stmt) -> bool:
    """Whether a function only passes, or always ends by raising `NotImplementedError`: no `return`, and such a `raise`
    outside of any branch. Lines that a lesson gives may come before it."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    body = [step for step in node.body if not (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))]
    if all(isinstance(step, ast.Pass) for step in body):
        return True
    returns = any(isinstance(step, ast.Return) for step in ast.walk(node))
    return not returns and any(isinstance(step, ast.Raise) and _not_implemented(step) for step in body)


def _not_implemented(step: ast.Raise) -> bool:
    raised = step.exc.func if isinstance(step.exc, ast.Call) else step.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def load(program: Program, name: str, definition: Statement, references: Mapping[str, str] = _NO_REFERENCES) -> Any:
    """Run the statements that `definition` needs, in a new module, and return what is called `name` then.

    A statement that lacks a name is tried again after the others, so the order of cells does not matter. One that
    raises is left out, with a note. `use("l02.append_kv")` returns the notebook's own `append_kv`, or what its text in
    `references` defines.

    Raises:
        Exception: what `definition` itself raised.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where dataclasses and triton look a function's module up
    space = vars(module)
    space |= {"display": lambda *objects, **options: None, "get_ipython": lambda: None}  # as in a notebook

    @cache
    def reference(exercise: str) -> Any:
        program.notes.append(f"use gives the reference of {exercise}, because yours does not pass")
        made: dict[str, Any] = {"__name__": "__main__"}
        exec(compiled(references[exercise], f"<reference of {exercise}>"), made)
        return made[exercise.partition(".")[2]]

    def use(exercise: str, function: Any = None) -> Any:
        own = exercise.partition(".")[2]
        if exercise in references:
            return reference(exercise)
        if function is None and own not in space:
            raise NameError(f"name {own!r} is not defined", name=own)
        return function or space[own]

    space["use"] = use
    pending = program.needed(definition)
    while pending:
        postponed = []
        for statement in pending:
            try:
                _run(statement.code, space)
                if {"use", "*"} & statement.binds and isinstance(statement.node, _IMPORTS):
                    space["use"] = use
            except NameError as error:
                postponed.append((statement, error))
            except Exception as error:
                if statement is definition:
                    raise
                program.notes.append(_failed(statement, error))
        if len(postponed) == len(pending):
            for statement, error in postponed:
                if statement is definition:
                    raise error
                program.notes.append(_failed(statement, error))
            break
        pending = [statement for statement, _ in postponed]
    return space[name]


def _run(code: types.CodeType, space: dict[str, Any]) -> None:
    """Run a statement, in an event loop if it awaits something."""
    awaited = eval(code, space)
    if inspect.iscoroutine(awaited):
        asyncio.run(awaited)


def file_of(cell: int) -> str:
    """The file name of a cell in tracebacks."""
    return f"<cell {cell}>"


def _failed(statement: Statement, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"cell {statement.cell}, line {statement.node.lineno}: {type(error).__name__}: {first}"


def _tree(number: int, source: str) -> ast.Module | Broken:
    """The syntax tree, with the source where tracebacks and `inspect.getsource` find it."""
    problem: Exception | None = None
    for text in (source, python_of(source)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text, file_of(number))
        except _NOT_PYTHON as error:
            problem = error
            continue
        _name_use(tree)
        lines = text.splitlines(keepends=True)
        linecache.cache[file_of(number)] = (len(text), None, lines, file_of(number))
        return tree
    line = getattr(problem, "lineno", None) or 1
    return Broken(number, line, getattr(problem, "msg", None) or str(problem), source)


def _name_use(tree: ast.Module) -> None:
    """Make `teaching.use("l02.append_kv")` a call of `use`, which `load` provides."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="use") as called, args=[ast.Constant(value=str(name)), *_]):
                if _EXERCISE.fullmatch(name):
                    node.func = ast.copy_location(ast.Name("use", ast.Load()), called)


def _is_given(statement: Statement, name: str) -> bool:
    """Whether `load` itself provides what a statement binds to `name`: `from … import use`, or the notebook's own
    function in `append_kv = use("l02.append_kv")`."""
    if name == "use":
        return isinstance(statement.node, _IMPORTS)
    return isinstance(statement.node, ast.Assign) and name in _used_exercises(statement)


def _used_exercises(statement: Statement) -> set[str]:
    """`append_kv` for each call `use("l02.append_kv")` in a statement."""
    calls = [node for node in ast.walk(statement.node) if isinstance(node, ast.Call) and node.args]
    names = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "use"]
    texts = [name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)]
    return {text.partition(".")[2] for text in texts} - {""}


def _defined(node: ast.AST) -> Iterator[str]:
    """The functions that a top-level statement defines, in loops too, but not in a function or a class."""
    left = [node]
    while left:
        here = left.pop()
        if isinstance(here, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield here.name
        elif not isinstance(here, (ast.ClassDef, ast.expr)):
            left += ast.iter_child_nodes(here)


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a definition, import or assignment binds; "*" for a star import. Other statements bind none here,
    except `if`, `try` and `with` around such statements."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)
    elif isinstance(node, ast.Assign):
        yield from (name for target in node.targets for name in _targets(target))
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        yield from _targets(node.target)
    elif isinstance(node, getattr(ast, "TypeAlias", ())):  # Python 3.12
        yield node.name.id
    elif isinstance(node, (ast.If, ast.Try, ast.With)):
        handlers = [step for handler in getattr(node, "handlers", []) for step in handler.body]
        for step in [*node.body, *getattr(node, "orelse", []), *handlers, *getattr(node, "finalbody", [])]:
            yield from _bound(step)


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        yield from (name for part in target.elts for name in _targets(part))
    elif isinstance(target, ast.Starred):
        yield from _targets(target.value)


def global_names(code: types.CodeType) -> Iterator[str]:
    """The global names that the code, or a function in it, reads."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _future_flags(trees: Iterator[ast.Module]) -> int:
    """Compiler flags of `from __future__ import annotations`, which in a notebook hold for all cells after it."""
    import __future__

    named = {a.name for tree in trees for node in tree.body if _is_future(node) for a in node.names}
    return __future__.annotations.compiler_flag if _FUTURE in named else 0
