"""Of a notebook only what a function needs runs, whatever happened to the cells."""

from __future__ import annotations

import ast
import inspect
import json
import sys

import pytest

from minillm.teaching.grading import cells as notebook_cells
from minillm.teaching.grading.cells import Cell, UnreadableError, python_of, read
from minillm.teaching.grading.program import is_stub, load, parse


@pytest.fixture(autouse=True)
def main_module():
    """`load` replaces `__main__`, which is meant for a process of its own."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


def program_of(*sources: str):
    return parse([Cell(number, source) for number, source in enumerate(sources, 1)])


def loaded(*sources: str, name: str = "f"):
    program = program_of(*sources)
    return load(program, name, program.definition(name)), program


def test_helpers_constants_and_imports_are_there_in_any_order():
    cells = (
        "def f(x):\n    return helper(x) + LIMIT",
        "def helper(x):\n    return math.floor(x) * FACTORS[0]",
        "LIMIT = len(FACTORS)",
        "FACTORS = (3, 4)",
        "import math",
    )
    for order in (cells, cells[::-1], cells[2:] + cells[:2]):
        function, program = loaded(*order)
        assert function(2.5) == 8
        assert program.notes == []


def test_what_the_function_does_not_need_never_runs(tmp_path):
    reached = tmp_path / "reached"
    function, program = loaded(
        f"open({str(reached)!r}, 'w')",
        f"unused = open({str(reached)!r}, 'w')",
        "import nothing_like_this",
        "while True: pass",
        "import math\nmath.floor = None",
        "raise SystemExit",
        "import math\n\ndef f(x):\n    return math.floor(x)",
    )
    assert function(2.5) == 2
    assert program.notes == []
    assert not reached.exists()


def test_a_local_name_does_not_drag_in_a_global_one():
    function, _ = loaded("model = 1 / 0", "def f(x):\n    model = x\n    return [model for model in model]")
    assert function([1]) == [1]


def test_a_decorator_a_default_and_a_class_are_needed_too():
    function, _ = loaded(
        "class Base:\n    factor = FACTOR\n\nclass Mine(Base):\n    pass",
        "FACTOR = 7",
        "@twice\ndef f(x, y=FACTOR):\n    return x * y * Mine.factor",
        "from functools import wraps",
        "def twice(g):\n    @wraps(g)\n    def run(*a):\n        return 2 * g(*a)\n    return run",
    )
    assert function(1) == 2 * 7 * 7


def test_a_helper_of_the_same_cell_comes_before_a_later_one_of_the_same_name():
    own = "def helper(x):\n    return x + 1\n\ndef f(x):\n    return helper(x)"
    other = "def helper(x):\n    return x - 1\n\ndef g(x):\n    return helper(x)"
    for order in ((own, other), (other, own)):
        assert loaded(*order)[0](1) == 2
        assert loaded(*order, name="g")[0](1) == 0


def test_of_helpers_in_other_cells_the_nearest_one_before_counts():
    """A notebook's own check has seen that one; a lesson may define another helper of the same name later."""
    one, two, three = (f"def helper(x):\n    return x + {n}" for n in (10, 20, 30))
    f, stub = "def f(x):\n    return helper(x)", "def helper(x):\n    raise NotImplementedError"
    for cells, value in (
        ((one, two, f, three), 20),
        ((one, two, stub, f, three), 20),
        ((two, "helper = abs", f, three), 1),
        ((stub, f, one, two), 20),
        ((f, three, one), 10),
        (("from math import floor as helper", f, three), 30),
    ):
        function, program = loaded(*cells)
        assert function(0 if value != 1 else -1) == value, cells
        assert program.notes == []


def test_a_wrapped_helper_is_the_nearest_one_before_too():
    wrapped = ("def g(x):\n    return x + 1", "g = twice(g)", "def f(x):\n    return g(x)", "def g(x):\n    return 0")
    assert loaded("def twice(h):\n    return lambda x: 2 * h(x)", *wrapped)[0](4) == 10


def test_an_import_of_the_same_name_does_not_replace_what_was_written():
    function, _ = loaded("def floor(x):\n    return x", "from math import floor", name="floor")
    assert function(2.5) == 2.5
    function, _ = loaded("def floor(x):\n    raise NotImplementedError", "from math import floor", name="floor")
    assert function(2.5) == 2


def test_the_last_written_definition_counts_and_a_stub_never_replaces_it():
    first, second, stub = (
        "def f(x):\n    return 1",
        "def f(x):\n    return 2",
        "def f(x):\n    raise NotImplementedError('x')",
    )
    function, program = loaded(first, second, stub)
    assert function(0) == 2
    assert program.notes == ["f is written 2 times; the last one counts"]
    _, program = loaded(first, first, stub)
    assert program.notes == []
    assert is_stub(program_of(stub, stub).definition("f").node)


@pytest.mark.parametrize(
    ("body", "stub"),
    [
        ("raise NotImplementedError", True),
        ('"""Text."""\n    raise NotImplementedError("write it")', True),
        ("pass", True),
        ("...", True),
        ("return None", False),
        ("raise ValueError", False),
        ("if x:\n        raise NotImplementedError\n    return 1", False),
        ("row = 3  # given\n    raise NotImplementedError('write it')", True),
        ("if x:\n        return 1\n    raise NotImplementedError('for other x')", False),
    ],
)
def test_what_counts_as_unwritten(body, stub):
    assert is_stub(ast.parse(f"def f(x):\n    {body}").body[0]) is stub


def test_use_takes_the_student_s_own_function():
    function, _ = loaded(
        "from minillm.teaching import use",
        'mine = use("l02.g")',
        "def g(x):\n    return x + 1",
        "def f(x):\n    return mine(x)",
    )
    assert function(1) == 2


@pytest.mark.parametrize(
    "cells",
    [
        ('mine, other = use("l02.g"), 1', "def f(x):\n    return mine(x)"),
        ('from minillm.teaching import use\ng = use("l02.g")\n\ndef f(x):\n    return g(x)',),
        ("from minillm.teaching import show, use", 'def f(x):\n    assert show\n    return use("l02.g")(x)'),
        ('table = {"g": use("l02.g")}', 'def f(x):\n    return table["g"](x)'),
    ],
)
def test_use_may_stand_in_any_expression(cells):
    for order in (cells, cells[::-1]):
        function, program = loaded(*order, "def g(x):\n    return x + 1")
        assert function(1) == 2 and program.notes == []


@pytest.mark.parametrize(
    "cells",
    [
        ("from minillm.teaching import *", 'def f(x):\n    assert check\n    return use("l02.g")(x)'),
        ("import minillm.teaching as mt", 'mine = mt.use("l02.g")', "def f(x):\n    return mine(x)"),
        ('def f(x):\n    import minillm.teaching\n    return minillm.teaching.use("l02.g")(x)',),
    ],
)
def test_use_is_the_grader_s_however_it_is_imported(cells):
    function, program = loaded(*cells, "def g(x):\n    return x + 1")
    assert function(1) == 2 and program.notes == []
    function, _ = loaded('class Own:\n    def use(self, text):\n        return text\n\nf = Own().use("l02")')
    assert function == "l02"


def test_a_cell_may_await():
    cells = ("import asyncio", "TWO = await asyncio.sleep(0, 2)", "def f(x):\n    return x * TWO")
    function, program = loaded(*cells)
    assert function(3) == 6 and program.notes == []


def test_a_needed_statement_that_does_not_compile_is_named_and_the_rest_goes_on():
    function, program = loaded("TWO = 2", "if TWO > 2:\n    TWO = yield", "def f(x):\n    return x * TWO")
    assert function(3) == 6
    assert program.notes == ["cell 2, line 1: SyntaxError: 'yield' outside function (<cell 2>, line 2)"]


@pytest.mark.parametrize(
    "call",
    [
        *('check("l02.f", mine)', 'use("l02.f", mine)', 'teaching.check("l02.f", function=mine)'),
        *('fast = use("l02.f", mine)', 'print(use("l02.f", lambda x: mine(x)))'),
    ],
)
@pytest.mark.parametrize("given", ["", "def f(x):\n    raise NotImplementedError", "from engine import f"])
def test_a_function_of_another_name_is_found_by_its_check(call: str, given: str):
    mine = "def mine(x):\n    return x + STEP"
    function, program = loaded(given, "STEP = 3", mine, call, "def mine(x):\n    return 0")
    assert function(1) == 4 and program.notes == [] and "f" in program.functions
    function, program = loaded(given, mine, "STEP = 3", call, 'def g(x):\n    return 10 * use("l02.f")(x)', name="g")
    assert function(1) == 40


def test_a_function_of_the_exercise_s_name_comes_before_one_that_was_only_checked():
    for cells in (
        ("def f(x):\n    return 1", "def mine(x):\n    return 2", 'check("l02.f", mine)'),
        ("def f(x):\n    return 1", 'check("l02.f", f)\ncheck("l02.f", twice(f))'),
        ("def f(x):\n    return 1", "def g(x):\n    check('l02.f', g)", "check(name, mine)", "check('x', mine)"),
    ):
        function, program = loaded(*cells)
        assert function(0) == 1 and program.notes == []


def test_use_gives_the_reference_that_was_sent_instead_of_the_own_function():
    cells = ('mine = use("l02.g")', "def g(x):\n    return 0", "def f(x):\n    return mine(x), g(x)")
    program = program_of(*cells)
    text = "def helper(x):\n    return 2 * x\n\ndef g(x):\n    return helper(x)"
    function = load(program, "f", program.definition("f"), {"l02.g": text})
    assert function(4) == (8, 0)
    assert program.notes == ["use gives the reference of l02.g, because yours does not pass"]


def test_use_without_an_own_function_says_which_is_missing():
    function, _ = loaded('def f(x):\n    return use("l02.g")(x)')
    with pytest.raises(NameError, match="'g' is not defined"):
        function(1)


def test_of_assignments_in_other_cells_those_before_count():
    """A notebook's own check has seen those."""
    f = "def f(x):\n    return SIDES * x"
    assert loaded("SIDES = 2", f, "SIDES = 3")[0](1) == 2
    assert loaded("SIDES = 2", "SIDES += 2", f, "SIDES = 3")[0](1) == 4
    assert loaded(f, "SIDES = 3")[0](1) == 3
    assert loaded("SIDES = 2", "SIDES = 3\n" + f, "SIDES = 4")[0](1) == 3


def test_a_needed_statement_that_fails_is_named_and_the_rest_goes_on():
    function, program = loaded("LIMIT = 1 / 0", "def f(x):\n    return x if x else LIMIT")
    assert function(1) == 1
    assert program.notes == ["cell 1, line 1: ZeroDivisionError: division by zero"]
    with pytest.raises(NameError):
        function(0)


def test_a_definition_that_fails_raises():
    with pytest.raises(NameError):
        loaded("@unknown\ndef f(x):\n    return x")
    with pytest.raises(ModuleNotFoundError):
        loaded("try:\n    import nothing_like_this\n    def f(x): pass\nfinally:\n    pass")


def test_cells_that_are_not_python_do_not_hide_the_others():
    function, program = loaded("def f(x):\n    return x", "def g(:", "this is no Python")
    assert function(3) == 3
    here = f"(read by Python {sys.version_info.major}.{sys.version_info.minor})"
    assert [str(each) for each in program.broken] == [
        f"cell 2, line 1: invalid syntax {here}",
        f"cell 3, line 1: invalid syntax {here}",
    ]
    assert program.broken_definition("g").cell == 2
    assert program.broken_definition("f") is None


@pytest.mark.parametrize(
    "wrapping",
    ["f = functools.lru_cache(f)", "f: object = functools.lru_cache(f)", "f = functools.lru_cache(f)\nf = twice(f)"],
)
def test_a_function_may_be_wrapped_after_its_definition(wrapping):
    helper = "import functools\n\n\ndef twice(g):\n    return g"
    cells = (
        helper,
        "def f(x):\n    return g(x) + 1",
        wrapping,
        "def g(x):\n    return f0(x)",
        "def f0(x):\n    return 2 * x",
    )
    assert loaded(*cells)[0](4) == 9
    assert loaded(*cells, "def h(x):\n    return f(x)", name="h")[0](4) == 9


def test_only_lines_of_ipython_are_left_out():
    source = "%%time\nx = (7\n % 3)\nreturn_value = 5  # right?\nlist?\n%matplotlib inline\n!ls\n"
    source += "files = !ls\nt = %timeit -o f()"
    assert python_of(source).splitlines() == [
        "pass", "x = (7", " % 3)", "return_value = 5  # right?", "pass", "pass", "pass", "pass", "pass"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "python",
    [
        "x = (\n    5\n    %y)\nassert (x\n        != y)",
        'def f():\n    """Bytes.\n    %d of them"""\n    return 1',
        "x = 7 \\\n  %y",
        "# it's\nx = [  # (\n  1,\n!=y]",
    ],
)
def test_lines_inside_of_a_statement_are_no_magics(python):
    assert python_of(f"%time\n{python}\n!ls (\n{python}\n%%x") == f"pass\n{python}\npass\n{python}\npass"


@pytest.mark.parametrize(("python", "line"), [("def f(x):\n    return 2 *", 4), ("x = '", 3), ("x = (", 3)])
def test_a_syntax_error_beside_a_magic_has_its_own_line(python: str, line: int):
    [broken] = program_of(f"%matplotlib inline\n\n{python}\n%time").broken
    assert broken.line == line


def test_lines_of_ipython_on_windows_and_over_several_lines():
    source = "a = 1\r\nlist?\r\n!pip install x \\\r\n  y\r\nfiles = !ls \\\r\n  z\r\ndef f(x):\r\n    return a\r\n"
    data = json.dumps({"cells": [{"cell_type": "code", "source": source}]}).encode()
    for found in (read(data, "x.ipynb"), read(source.encode(), "x.py")):
        assert python_of(found[0].source).splitlines() == [
            *("a = 1", "pass", "pass", "", "pass", "", "def f(x):", "    return a")
        ]
        assert parse(found).broken == []


def test_a_timed_statement_is_kept():
    """IPython's `%time` binds the names of its line in the notebook."""
    function, program = loaded("%time TABLE = [1, \\\n  2]\n%time", "def f(x):\n    return TABLE[x]")
    assert function(1) == 2 and program.notes == []
    assert python_of("if 1:\n  %time x = 1\n%time !ls\n%time -p x = 1\n%timeit x = 1").splitlines() == [
        *("if 1:", "  x = 1", "pass", "pass", "pass")
    ]


def test_a_function_in_a_loop_or_a_broken_cell_is_known_and_not_run():
    program = program_of("for i in range(3):\n    if i:\n        def f(x):\n            return i", "def g(:\n")
    assert program.in_loops == {"f"} and program.definition("f") is None
    assert program.functions == {"f", "g"}
    match = "match 1:\n    case 1:\n        def f(x):\n            def inner(): pass\n\nclass A:\n    def h(self): pass"
    assert program_of(match).in_loops == {"f"}
    assert program_of("while True:\n    def f(x): pass", "def f(x):\n    return x").in_loops == set()


def test_magics_are_left_out_and_lines_keep_their_numbers():
    function, _ = loaded("%%time\n%matplotlib inline\n!ls\ndef f(x):\n    return 1 / x")
    with pytest.raises(ZeroDivisionError) as caught:
        function(0)
    assert caught.traceback[-1].lineno + 1 == 5
    assert "return 1 / x" in inspect.getsource(function)
    assert python_of("%%bash\nls") == ""
    value, _ = loaded("f = (7\n  % 4)")  # the operator, not a magic
    assert value == 3


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
def test_a_type_alias_is_there():
    function, program = loaded("type Pair = tuple[int, int]", "def f(x):\n    return Pair.__value__, x")
    assert function(1)[1] == 1 and program.notes == []


def test_annotations_and_a_future_import_of_another_cell():
    function, _ = loaded("def f(x: Unknown) -> Unknown:\n    return x", "from __future__ import annotations")
    assert function(3) == 3


def notebook(*cells: str) -> bytes:
    return ('{"cells": [' + ", ".join(cells) + "]}").encode()


def test_only_code_cells_with_text_count_and_numbers_are_those_a_reader_sees():
    data = notebook(
        '{"cell_type": "markdown", "source": "# Title"}',
        '{"cell_type": "code", "source": ["a = 1\\n", "b = 2"]}',
        '{"cell_type": "code", "source": 7}',
        "null",
        "[]",
        '{"cell_type": "code", "source": "c = 3", "metadata": "nonsense", "id": 3}',
    )
    assert read(data, "x.ipynb") == [(2, "a = 1\nb = 2"), (3, ""), (6, "c = 3")]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "a list"),
        (b'{"nbformat": 4}', "a list 'cells'"),
        (b'{"cells": 3}', "a list 'cells'"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["empty", "half", "list", "no cells", "cells no list", "bytes", "deep"],
)
def test_what_is_no_notebook_is_unreadable_and_says_why(data, says):
    with pytest.raises(UnreadableError, match=says):
        read(data, "x.ipynb")


def test_a_python_file_is_read_by_its_marks(monkeypatch):
    for mark in ("# %%", "#%%", "#\t%%"):
        found = read(f"{mark}\na = 1\n{mark} [markdown]\n# text\n# 5 %%\n".encode(), "x.py")
        assert [cell.source.strip() for cell in found] == ["", "a = 1", "# text\n# 5 %%"]
    monkeypatch.setattr(notebook_cells, "MAX_FILE", 10)
    with pytest.raises(UnreadableError, match="the limit is 10"):
        read(b"a" * 11, "x.py")
