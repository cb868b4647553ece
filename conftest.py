"""How nbval reads the notebooks of lessons/ and solutions/: what it does not compare, and how long a cell may take; and
how lessons and tests are divided among workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

NOT_COMPARED = ("text/html", "image/svg+xml", "application/vnd.plotly.v1+json", "stderr")
"""Pictures are tested as pictures elsewhere; in a notebook their text/plain stands for them."""
CELL_TIMEOUT_S = 300
NBVAL_DEFAULT_TIMEOUT_S = 2000


def pytest_configure(config: pytest.Config) -> None:
    """Shorten nbval's patience, unless the command line chose another."""
    if getattr(config.option, "nbval_cell_timeout", None) == NBVAL_DEFAULT_TIMEOUT_S:
        config.option.nbval_cell_timeout = CELL_TIMEOUT_S


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--like-solutions`, for lessons as they are in the repository, with all exercises unsolved."""
    parser.addoption(
        "--like-solutions",
        action="store_true",
        help="compare what a lesson counts and draws with what its solution recorded",
    )


def pytest_collectstart(collector: pytest.Collector) -> None:
    """nbval's notebooks carry what to skip as an attribute; nothing else has it."""
    if not hasattr(collector, "skip_compare"):
        return
    collector.skip_compare += NOT_COMPARED
    if collector.config.getoption("--like-solutions"):
        from minillm.teaching.lesson_outputs import LessonOutputs

        collector.outputs = LessonOutputs.beside(collector.path)
        collector.get_kernel_message = collector.outputs.listening(collector.get_kernel_message)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """With `--like-solutions`, a cell of a lesson fails where it differs from its solution."""
    outputs = getattr(item.parent, "outputs", None)
    if outputs is None:
        return (yield)
    outputs.begin(item.cell_num)
    result = yield
    if difference := outputs.difference(item.cell_num):
        pytest.fail(f"unlike the solution: {difference}", pytrace=False)
    return result


TOGETHER = (
    ("tests/book/", "tests/browser/test_book.py"),
    (
        "tests/runtime/test_cpu_executor.py",
        "tests/engine/test_same_tokens.py",
        "tests/speculative/test_compiled_heads.py",
        "tests/bench/test_kernels.py",
        "tests/cache/test_kivi.py",
        "tests/cache/test_paged_int4.py",
        "tests/cache/test_paged_int8.py",
        "tests/speculative/test_self_quant.py",
        "tests/ops/cpu/test_attention.py",
        "tests/ops/cpu/test_nibbles.py",
        "tests/ops/cpu/test_panels.py",
        "tests/runtime/test_skipped_blocks.py",
    ),
    ("tests/teaching/test_exercises.py", "tests/teaching/test_l09.py"),
    (
        "tests/teaching/test_classroom.py",
        "tests/teaching/test_assignments.py",
        "tests/teaching/test_glossary.py",
        "tests/teaching/test_lesson_build.py",
        "tests/teaching/test_notebooks_with_nbval.py",
        "tests/teaching/test_rerun.py",
    ),
    ("tests/browser/test_lesson_00.py", "tests/browser/test_lessons.py", "tests/browser/test_replay.py"),
)
"""Files that share what is slow to make: one worker runs them. The first share the book of all lessons, the next the
inner functions of compiled steps, then what the kernels of lesson 9 and their planted mistakes answer, the built sample
course, and a JupyterLab server."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a worker takes a whole file, with these exceptions."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Queue(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for group in TOGETHER:
                if nodeid.startswith(group):
                    return group[0]
            return super()._split_scope(nodeid)

    return Queue(config, log)
