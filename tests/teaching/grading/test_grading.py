"""Notebooks through the whole grader: the right status, the words of the notebook's own check, and no leaks."""

from __future__ import annotations

import json
import platform
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest

from instructors.trial.attempts import ATTEMPTS, GOOD, TARGET, Attempt
from instructors.trial.class_of_200 import ROOT, _bytes, _solved
from instructors.trial.shapes import SAME_MEANING, text, unreadable, with_cell
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.check_function import check_function
from minillm.teaching.diagnosis import LOOKS_AS_IF
from minillm.teaching.grading.bundle import NotBundled, bundle
from minillm.teaching.grading.grades import ExerciseGrade, Status, Submission
from minillm.teaching.grading.one_submission import Grader, Rules
from minillm.teaching.grading.student_process import MODES, StudentProcess
from minillm.teaching.guard import GIB, Limits
from minillm.teaching.registry import find
from tests.teaching.grading.isolation import possible

SECOND = "02_kv_cache"
RULES = Rules(limits=Limits(seconds=3.0, memory=GIB // 2), wall_seconds=40.0)
LONG = (
    *("sleeps and works in turn", "fills the disk", "prints without end", "a thread bomb"),
    *("prints a million lines", "a memory bomb in ten processes", "searches the whole disk for the answer"),
)
"""Attempts that take long; the trial of 200 makes them."""
LIKELY_CAUSES = ("factor is not defined", "calls itself endlessly")
"""Words of a report that the table in `docs/grading.md` has no room for."""


def process_in(mode: str) -> StudentProcess:
    if not possible(mode):
        pytest.skip(f"{mode} is not possible here")
    return StudentProcess(0, mode)


@pytest.fixture(scope="module")
def grader_in() -> Iterator[Callable[[str], Grader]]:
    """A grader by its mode; its process is started once."""
    with ExitStack() as processes:
        yield cache(lambda mode: Grader(processes.enter_context(process_in(mode)), RULES))


@pytest.fixture
def grader(grader_in: Callable[[str], Grader]) -> Grader:
    return grader_in("namespaces")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    (folder / "submissions").mkdir()
    (folder / "out").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield {"root": ROOT, "submissions": folder / "submissions", "out": folder / "out", "port": port}


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
def test_the_strongest_mode_that_is_possible_here_is_chosen():
    strongest = next(mode for mode in ("namespaces", "landlock", "limits") if possible(mode))
    with StudentProcess(0, "") as process:
        assert process.mode == strongest, process.refused


def graded(grader: Grader, notebook: dict, file: str = "x.ipynb") -> Submission:
    return grader.grade(_bytes(notebook), "alice", file, "key")


def grade_of(submission: Submission, name: str) -> ExerciseGrade:
    return next(grade for grade in submission.exercises if grade.exercise == name)


def _cell(lesson: str, name: str) -> str:
    """The solution of a function, as its lesson has it."""
    return next(text(cell) for cell in _solved(lesson)["cells"] if f"def {name}(" in text(cell))


@pytest.mark.parametrize("attempt", [a for a in ATTEMPTS if a.name not in LONG], ids=lambda attempt: attempt.name)
def test_an_attempt_gets_its_status_and_reaches_nothing(grader: Grader, places: dict, attempt: Attempt):
    submission = graded(grader, with_cell(_solved(SECOND), TARGET, attempt.cell(**places)))
    got = grade_of(submission, f"l02.{TARGET}")
    assert got.status.value in attempt.statuses, got
    assert attempt.says in "\n".join([got.problem, got.cause, got.got, *got.notes])
    assert [grade.status for grade in submission.exercises if grade is not got] == [Status.PASSED] * 4
    assert not list(places["out"].iterdir())


def test_what_a_notebook_provides_and_what_json_may_hold_costs_nothing(grader: Grader):
    """`display`, and half a surrogate pair in another cell."""
    right = next(a for a in ATTEMPTS if a.name == "right")
    source = right.cell().replace(GOOD, f"display(config)\n    get_ipython()\n    {GOOD}")
    assert "display(config)" in source
    notebook = with_cell(_solved(SECOND), TARGET, source)
    notebook["cells"].append({"cell_type": "code", "source": 'text = "\ud83d"', "metadata": {}, "outputs": []})
    submission = grader.grade(json.dumps(notebook).encode(), "alice", "x.ipynb", "key")
    assert [grade.status for grade in submission.exercises] == [Status.PASSED] * 5


def test_a_notebook_is_graded_on_its_own_lesson_of_those_that_are_asked_for(grader: Grader):
    asked = Grader(grader.process, replace(RULES, lessons=("l02", "l06")))
    assert graded(asked, _solved(SECOND)).lessons == ["l02"]
    other = Grader(grader.process, replace(RULES, lessons=("l06",)))
    submission = graded(other, _solved(SECOND))
    assert (submission.lessons, submission.exercises, submission.status) == (["l02"], [], Status.NOT_ATTEMPTED)
    assert submission.reason == "it is not for the lessons that are graded (l06)"


def test_of_the_lessons_that_are_asked_for_none_is_left_out_that_the_notebook_has_a_part_of(grader: Grader):
    notebook = _solved(SECOND)
    for name in ("allocate", "release"):
        cell = next(cell for cell in _solved("06_paged_blocks")["cells"] if f"def {name}(" in text(cell))
        notebook["cells"].append(cell)
    asked = Grader(grader.process, replace(RULES, lessons=("l02", "l06")))
    submission = graded(asked, notebook)
    assert (submission.lessons, submission.status) == (["l02", "l06"], Status.FAILED)
    assert [grade_of(submission, f"l06.{name}").status for name in ("allocate", "slot_mapping")] == [
        Status.PASSED,
        Status.NOT_ATTEMPTED,
    ]


def test_a_file_without_functions_is_for_the_lesson_that_it_names(grader: Grader):
    asked = Grader(grader.process, replace(RULES, lessons=("l02",)))
    for notebook, file, lessons in (
        (_solved("00_tour"), "x.ipynb", ["l00"]),
        ({"cells": []}, "00_tour.ipynb", ["l00"]),
        ({"cells": []}, "2024_helpers.ipynb", []),
    ):
        submission = graded(asked, notebook, file)
        assert (submission.lessons, submission.exercises) == (lessons, [])
        assert submission.reason == "it is not for the lessons that are graded (l02)"
        assert graded(grader, notebook, file).reason == "it has no function of any exercise"


def test_a_helper_with_the_name_of_another_lesson_s_function_is_not_graded(grader: Grader):
    """Lesson 5 has a `cache_bytes`, as lesson 4 has."""
    asked = Grader(grader.process, replace(RULES, lessons=("l04", "l12", "l15")))
    assert graded(asked, _solved("05_weights")).exercises == []


def test_a_case_that_only_the_grader_tries_is_marked_as_hidden(grader: Grader):
    """A table of the answers to the visible cases, and a function that is wrong in a visible case."""
    visible = AnswerKey(find("l02.next_capacity"))
    table = {case.args: visible.expected(index) for index, case in enumerate(visible.cases)}
    parameters = "capacity, past, num_new, every"
    cheats = f"TABLE = {table!r}\n\n\ndef next_capacity({parameters}):\n    return TABLE.get(({parameters}), (0, 0))"
    wrong = f"def next_capacity({parameters}):\n    return 0, 0"
    asked = Grader(grader.process, replace(RULES, secret=b"a secret of a test"))
    grades = [
        grade_of(graded(by, with_cell(_solved(SECOND), "next_capacity", source)), "l02.next_capacity")
        for by, source in ((asked, cheats), (grader, cheats), (asked, wrong))
    ]
    assert [(grade.status, grade.hidden) for grade in grades] == [
        (Status.FAILED, True),
        (Status.PASSED, False),
        (Status.FAILED, False),
    ]
    assert grades[0].case.startswith("hidden case") and not grades[2].case.startswith("hidden case")


@pytest.mark.parametrize(("body", "interrupted"), [("os.kill(os.getpid(), 9)", True), ("os._exit(1)", False)])
def test_a_process_that_was_killed_is_told_from_one_that_ended(grader: Grader, body: str, interrupted: bool):
    """Who killed it is not known; if it was the system, for want of memory, another run may give another grade."""
    submission = graded(grader, with_cell(_solved(SECOND), TARGET, Attempt("ends itself", body).cell()))
    got = grade_of(submission, f"l02.{TARGET}")
    assert (got.status, got.interrupted, submission.interrupted) == (Status.CRASHED, interrupted, interrupted)


def test_the_documentation_has_the_status_and_the_words_of_every_attempt():
    page = (ROOT / "docs" / "grading.md").read_text(encoding="utf-8")
    rows = {name: row for name, *row in re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", page, re.MULTILINE)}
    for attempt in ATTEMPTS:
        status, report = rows[attempt.name]
        assert status in attempt.statuses, attempt.name
        assert attempt.says in LIKELY_CAUSES or attempt.says in report, attempt.name


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "namespaces"])
def test_weaker_isolation_grades_too(grader_in: Callable[[str], Grader], mode: str):
    attempts = {a.name: a for a in ATTEMPTS}
    hostile = attempts["imports the reference"]
    for attempt in (attempts["right"], attempts["os._exit"], hostile):
        submission = graded(grader_in(mode), with_cell(_solved(SECOND), TARGET, attempt.cell(root=ROOT)))
        assert grade_of(submission, f"l02.{TARGET}").status.value in attempt.statuses
    assert submission.isolation == mode


@pytest.mark.parametrize(
    "name",
    [
        *("imports the reference without the import hook", "loads the file of the reference", "reads the solutions"),
        *("reads another clone's history", "reads other submissions", "writes into the reports", "changes minillm"),
        *(
            "takes the cover off",
            "connects to this machine",
            "connects to the network",
            "reads the grader's environment",
        ),
    ],
)
def test_landlock_alone_keeps_the_answers_and_the_network_away(
    grader_in: Callable[[str], Grader], places: dict, name: str
):
    attempt = next(a for a in ATTEMPTS if a.name == name)
    notebook = with_cell(_solved(SECOND), TARGET, attempt.cell(**places))
    got = grade_of(graded(grader_in("landlock"), notebook), f"l02.{TARGET}")
    assert got.status is Status.FAILED, got
    assert not list(places["out"].iterdir())


KEPT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def number(*args):
    if libc.syscall(*args) < 0:
        raise OSError(ctypes.get_errno(), "")
ways = {
    "memfd_create": lambda: os.memfd_create("x"),
    "shmget": lambda: number(CALLS["shmget"], 0, 4096, 0o600),
    "msgget": lambda: number(CALLS["msgget"], 0, 0o600),
    "semget": lambda: number(CALLS["semget"], 0, 1, 0o600),
    "keyctl": lambda: number(CALLS["keyctl"], 0, -3, 1),
}
kept = []
for name, way in ways.items():
    try:
        way()
    except PermissionError:
        continue
    kept.append(name)
return kept
"""
CALLS = {"x86_64": {"shmget": 29, "semget": 64, "msgget": 68, "keyctl": 250}}
CALLS["aarch64"] = {"shmget": 194, "semget": 190, "msgget": 186, "keyctl": 219}


def only(source: str) -> dict:
    """A notebook of one cell."""
    return {"cells": [{"cell_type": "code", "source": source}]}


@pytest.mark.skipif(platform.machine() not in CALLS, reason="the numbers of system calls are not known")
@pytest.mark.parametrize("mode", MODES)
def test_memory_that_stays_without_being_mapped_and_keyrings_are_refused(
    grader_in: Callable[[str], Grader], mode: str
) -> None:
    source = Attempt("keeps", KEPT, before=f"CALLS = {CALLS[platform.machine()]}").cell()
    got = grade_of(graded(grader_in(mode), only(source)), f"l02.{TARGET}")
    assert got.got == "[]", got


@pytest.mark.parametrize("mode", ["landlock", "limits"])
def test_many_files_are_too_much_and_none_stays(
    grader_in: Callable[[str], Grader], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.teaching.grading.sandbox.SCRATCH_BYTES", 2 << 20)
    body = "import time\nfor n in range(4):\n    open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(2)\n" + GOOD
    grader = grader_in(mode)
    got = grade_of(graded(grader, only(Attempt("many files", body).cell())), f"l02.{TARGET}")
    assert got.status is Status.CRASHED
    assert got.problem == "stopped: it wrote more than 2 MiB of files, or folders that cannot be counted"
    assert not list(grader.process._folder.iterdir())


@pytest.mark.parametrize("mode", ["landlock", "limits"])
def test_folders_that_are_deep_and_closed_do_not_stay(grader_in: Callable[[str], Grader], mode: str) -> None:
    down = "for _ in range(1_500):\n        os.mkdir('d')\n        os.chdir('d')\n    os.chmod('.', 0)"
    body = f"try:\n    {down}\nexcept OSError:\n    pass\n{GOOD}"
    grader = grader_in(mode)
    for _ in range(2):
        got = grade_of(graded(grader, only(Attempt("deep", body).cell())), f"l02.{TARGET}")
        assert got.status in (Status.PASSED, Status.CRASHED) and not got.interrupted, got
        assert not list(grader.process._folder.iterdir())


@pytest.mark.parametrize("change", SAME_MEANING.values(), ids=SAME_MEANING)
def test_cells_may_be_moved_split_doubled_and_renamed(grader: Grader, change):
    submission = graded(grader, change(_solved("06_paged_blocks")), "my homework.ipynb")
    assert (submission.lessons, submission.status) == (["l06"], Status.PASSED)


@pytest.mark.parametrize("name", unreadable({"cells": []}))
def test_what_is_no_notebook_is_unreadable(grader: Grader, name: str):
    submission = grader.grade(unreadable(_solved(SECOND))[name], "alice", "x.ipynb", "key")
    assert submission.status is Status.UNREADABLE
    assert submission.reason


def test_a_notebook_as_it_was_given_out_is_not_attempted(grader: Grader):
    data = (ROOT / "lessons" / f"{SECOND}.ipynb").read_bytes()
    submission = grader.grade(data, "alice", "x.ipynb", "key")
    assert submission.status is Status.NOT_ATTEMPTED
    assert {grade.status for grade in submission.exercises} == {Status.NOT_ATTEMPTED}
    assert {grade.problem for grade in submission.exercises} == {"it is not written yet"}


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        (
            "def append_kv(*args):\n    raise NotImplementedError('write append_kv here')\n\n"
            f"def {TARGET}(config, bytes_per_value):\n    return append_kv(config)",
            Status.FAILED,
            'it calls append_kv, which is not written yet: write it, or call what use("l02.append_kv") returns',
        ),
        (
            f"def {TARGET}(config, bytes_per_value):\n    if bytes_per_value:\n"
            "        raise NotImplementedError('for zero')\n    return 0",
            Status.FAILED,
            "it raises NotImplementedError: for zero",
        ),
        (
            f"from helpers import two\n\n\ndef {TARGET}(config, bytes_per_value):\n    return two()",
            Status.FAILED,
            "your function raised an error; "
            "what it needs had failed: cell 1, line 1: ModuleNotFoundError: No module named 'helpers'",
        ),
        (
            f"for _ in range(1):\n    def {TARGET}(config, bytes_per_value):\n        return 1",
            Status.NOT_ATTEMPTED,
            "it is defined inside a loop, which is not run",
        ),
    ],
)
def test_what_is_not_run_is_told_without_advice_that_was_followed(grader: Grader, source: str, status, says: str):
    notebook = with_cell(_solved(SECOND), TARGET, source)
    notebook["cells"] = [cell for cell in notebook["cells"] if text(cell) == source]
    got = grade_of(graded(grader, notebook), f"l02.{TARGET}")
    assert (got.status, got.problem) == (status, says)


@pytest.mark.parametrize("name", ["l02.append_kv", "l02.offset_mask", "l06.own_block", "l08.copy_kernel"])
def test_a_mistake_is_told_in_the_words_of_the_notebook_s_own_check(grader: Grader, name: str, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    exercise = find(name)
    lesson = next(path.stem for path in (ROOT / "solutions").glob(f"{name[1:3]}_*.py"))
    compared = 0
    for wrong in exercise.wrong[:5]:
        try:
            source = bundle(wrong.function, exercise.function_name)
        except NotBundled:
            continue
        notebook = with_cell(_solved(lesson), exercise.function_name, source)
        notebook["cells"] = [cell for cell in notebook["cells"] if text(cell) == source]
        got = grade_of(graded(grader, notebook), name)
        here = check_function(exercise, wrong.function)
        shown = here.counterexample
        assert got.status is Status.FAILED
        assert (got.case, got.problem, got.cause) == (shown.label, shown.problem, shown.cause)
        assert (got.expected, got.passed_cases) == (shown.expected, here.num_passed)
        assert got.mistake == (wrong.description if shown.cause == LOOKS_AS_IF + wrong.description else "")
        compared += 1
    assert compared


def test_no_submission_finds_what_another_has_left(grader: Grader):
    body = """
found = []
for folder in ("/", "/tmp", "/dev/shm", "/scratch", "/etc", "/dev", "/proc", os.path.dirname(os.__file__)):
    try:
        found += [name for name in os.listdir(folder) if name == "note"]
        open(os.path.join(folder, "note"), "w").close()
    except OSError:
        pass
return sorted(found)
"""
    notebook = with_cell(_solved(SECOND), TARGET, Attempt("leaves a note", body).cell())
    for _ in range(2):
        got = grade_of(graded(grader, notebook), f"l02.{TARGET}")
        assert got.got == "[]"


def test_no_submission_finds_an_earlier_one_in_its_memory(grader: Grader):
    """Processes are forked from one template: what it held of earlier jobs, all later ones would inherit."""
    body = """
import ctypes, re
found, mark = 0, re.compile(b"written[ ]by[ ]the[ ]student[ ]before")  # the pattern does not match itself
for line in open("/proc/self/maps"):
    span, access, *rest = line.split()
    start, end = (int(at, 16) for at in span.split("-"))
    if access.startswith("rw") and "[" not in rest[-1].replace("[heap]", "") and end - start < 1 << 28:
        found += len(mark.findall(ctypes.string_at(start, end - start)))
return found
"""
    earlier = Attempt("right", GOOD, before="# written by the student before\n" * 500).cell()
    for _ in range(2):
        assert grade_of(graded(grader, with_cell(_solved(SECOND), TARGET, earlier)), f"l02.{TARGET}").passed_cases
        notebook = with_cell(_solved(SECOND), TARGET, Attempt("searches its memory", body).cell())
        assert grade_of(graded(grader, notebook), f"l02.{TARGET}").got == "0"


def test_a_function_that_sends_answers_without_end_is_stopped(grader: Grader):
    body = """
from minillm.teaching.pipe_messages import write_frame
from minillm.teaching.grading.messages import Answered, pack
from minillm.teaching.grading.values import encode
while True:
    write_frame(sys.stdout._pipe, b"m" + pack(Answered(99, encode(bytes(1 << 20)), None, [])))
"""
    notebook = with_cell(_solved(SECOND), TARGET, Attempt("sends without end", body).cell())
    got = grade_of(graded(grader, notebook), f"l02.{TARGET}")
    assert (got.status, got.problem) == (Status.CRASHED, "stopped: its process sent more than 128 MiB")


def test_imports_from_the_engine_are_reported(grader: Grader):
    own = f"def {TARGET}(config, bytes_per_value):\n    return kv(config, bytes_per_value)"
    source = f"from minillm.models.config import ModelConfig as kv\n\n{own}"
    got = grade_of(graded(grader, with_cell(_solved(SECOND), TARGET, source)), f"l02.{TARGET}")
    assert got.library == ["minillm.models.config.ModelConfig"]


@pytest.mark.parametrize(
    ("import_it", "library"),
    [
        ('kv = importlib.import_module("minillm.models.config").ModelConfig', ["minillm.models.config"]),
        ('exec("from minillm.models.config import ModelConfig as kv", {})', ["minillm.models.config"]),
        ('exec(b"pass\\nimport minillm.models.config", {})', ["minillm.models.config"]),
        ('kv = pkgutil.resolve_name("minillm.models.config:ModelConfig")', ["minillm.models.config"]),
        ('kv = __import__("minillm").models', ["minillm"]),
        ('"""As minillm.models does."""', []),
    ],
)
def test_imports_by_a_text_are_reported(grader: Grader, import_it: str, library: list[str]):
    source = (
        f"import importlib\nimport pkgutil\n\n\ndef {TARGET}(config, bytes_per_value):\n    {import_it}\n    return 1"
    )
    got = grade_of(graded(grader, with_cell(_solved(SECOND), TARGET, source)), f"l02.{TARGET}")
    assert got.library == library


def test_code_that_hides_its_imports_is_reported_with_them(grader: Grader):
    """It runs when the function is defined, in the process that defines it."""
    before = "import minillm.teaching.grading.one_function as o\ndef hide():\n    o._library = lambda statements: []\n"
    body = "from minillm.models.config import ModelConfig\n    return 1"
    source = f"{before}\n\ndef {TARGET}(config, bytes_per_value, hidden=hide()):\n    {body}"
    got = grade_of(graded(grader, with_cell(_solved(SECOND), TARGET, source)), f"l02.{TARGET}")
    assert got.library == ["minillm.models.config.ModelConfig", "minillm.teaching.grading.one_function"]


@pytest.mark.parametrize("slots", ["return []", "raise NotImplementedError", ""], ids=["wrong", "a stub", "missing"])
def test_a_right_function_passes_with_the_reference_of_another_as_in_the_notebook(grader: Grader, slots: str):
    source = _cell("06_paged_blocks", "gather_attention").replace("slot_mapping(", "my_slots(")
    notebook = with_cell(_solved("06_paged_blocks"), "gather_attention", source)
    notebook["cells"] = [cell for cell in notebook["cells"] if "def slot_mapping(" not in text(cell)]
    if slots:
        notebook["cells"].insert(0, {"cell_type": "code", "source": f"def slot_mapping(*args):\n    {slots}"})
    submission = graded(grader, notebook)
    statuses = {grade.exercise: grade.status for grade in submission.exercises}
    assert statuses.pop("l06.slot_mapping") is (Status.FAILED if "[]" in slots else Status.NOT_ATTEMPTED)
    assert set(statuses.values()) == {Status.PASSED}
    [note] = grade_of(submission, "l06.gather_attention").notes
    assert note == "use gives the reference of l06.slot_mapping, because yours does not pass"


def test_a_function_finds_the_reference_of_none_that_passes_or_is_graded_after_it(grader: Grader):
    body = "found = {name: use(f'l02.{name}').__code__.co_code for name in ('append_kv', 'offset_mask', 'best_r')}"
    own = "return [name for name in found if found[name] == globals()[name].__code__.co_code]"
    attempt = Attempt("asks for all", f"append_kv, offset_mask, best_r\n{body}\n{own}").cell()
    wrong = "def {0}(*args):\n    return '{0}'"
    notebook = with_cell(_solved(SECOND), TARGET, attempt)
    for name in ("offset_mask", "best_r"):
        notebook = with_cell(notebook, name, wrong.format(name))
    got = grade_of(graded(grader, notebook), f"l02.{TARGET}")
    assert got.got == "['append_kv', 'best_r']"


def test_a_result_that_hides_the_function_is_told_and_costs_nothing(grader: Grader):
    cell = 1 + next(n for n, cell in enumerate(_solved(SECOND)["cells"]) if "def best_r(" in text(cell))
    for source, what in (("best_r = best_r(100, 1.0, 1.0, 0.0)", "assigns a float"), ("best_r = 1 / 0", "raises Zero")):
        notebook = _solved(SECOND)
        notebook["cells"].append({"cell_type": "code", "source": source})
        got = grade_of(graded(grader, notebook), "l02.best_r")
        assert got.status is Status.PASSED, got
        assert f"best_r in cell {len(notebook['cells'])} {what}" in got.notes[-1]
        assert got.notes[-1].endswith(f"the function in cell {cell} counts")
    only = {"cells": [{"cell_type": "code", "source": "best_r = 10.0"}]}
    got = grade_of(graded(grader, only), "l02.best_r")
    assert (got.status, got.got) == (Status.FAILED, "TypeError: 'float' object is not callable"), got


def test_a_function_that_is_imported_is_not_an_attempt(grader: Grader):
    source = "from minillm.speculative.rejection_sampler import residual"
    notebook = with_cell(_solved("10_speculative_decoding"), "residual", source)
    got = grade_of(graded(grader, notebook), "l10.residual")
    assert got.status is Status.NOT_ATTEMPTED
    assert "imported" in got.problem


def test_the_template_has_imported_the_drive_of_every_lesson(grader: Grader):
    files = ROOT.glob("minillm/teaching/drives/l[0-9][0-9].py")
    drives = sorted(f"minillm.teaching.drives.{file.stem}" for file in files)
    body = f"return [name for name in {drives} if name not in sys.modules]"
    notebook = with_cell(_solved(SECOND), TARGET, Attempt("drives", body).cell())
    assert drives and grade_of(graded(grader, notebook), f"l02.{TARGET}").got == "[]"


def test_the_template_has_imported_no_answer(grader: Grader):
    body = "return sorted(name for name in sys.modules if 'exercises' in name)"
    notebook = with_cell(_solved(SECOND), TARGET, Attempt("modules", body).cell())
    got = grade_of(graded(grader, notebook), f"l02.{TARGET}")
    assert got.got == "['minillm.teaching.exercises']", "the empty package, and no module in it"
