"""In a real Jupyter kernel: functions that live in cells, wrong in every way that could take the kernel with them."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

SETUP = """
import ctypes, os, sys
import torch
from minillm.teaching import check, use
from minillm.teaching.exercise import Case, Exercise, WrongVersion
EXERCISE = Exercise(
    name="l90.plus_one",
    reference=lambda x: x + 1,
    cases=[Case("two ones", (torch.ones(2),)), Case("three zeros", (torch.zeros(3),))],
    hints=("Look at *every* number.", "`x + 1`", "c", "d"),
    wrong=(WrongVersion("adds two", lambda x: x + 2), WrongVersion("adds nothing", lambda x: x)),
)
"""
TRITON = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import triton, triton.language as tl

@triton.jit
def copy_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * out_stride + column + 1_000_000_000, tl.load(x_ptr + row * x_stride + column))

check("l08.copy_kernel")
"""


def answer(body: str) -> str:
    return f"def plus_one(x):\n    {body}\n\ncheck(EXERCISE)"


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    """What each cell shows, all run in one kernel, in order."""
    cells = [
        SETUP,
        answer("ctypes.string_at(0)"),
        answer("os._exit(3)"),
        answer("sys.exit(2)"),
        answer("exit()"),
        answer("os.abort()"),
        answer("raise KeyboardInterrupt"),
        answer("print('I see', len(x)); return x + 2"),
        answer("return torch.zeros(10**12)"),
        "chosen = use(EXERCISE)",
        answer("return x + 1"),
        "from minillm.teaching import hint\nhint(EXERCISE, 1)",
        TRITON,
        "print('still here', os.getpid() == KERNEL)",
    ]
    cells[0] += "KERNEL = os.getpid()\n"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    return ["\n".join(map(_text, cell.outputs)) for cell in notebook.cells]


def _text(output: nbformat.NotebookNode) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain", "")


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (1, "crashed (SIGSEGV)"),
        (1, "line 2, in plus_one: ctypes.string_at(0)"),
        (2, "ended the whole process (os._exit, exit code 3)"),
        (3, "ends the program"),
        (5, "crashed (SIGABRT)"),
        (6, "stopped the check with KeyboardInterrupt"),
        (7, "I see 2"),
        (7, "it looks as if your function adds two"),
        (8, "of memory"),
        (9, "Using the reference for l90.plus_one"),
        (10, "PASS 2/2"),
        (11, "Hint 1 of 4 for l90.plus_one: Look at every number."),
        (12, "FAIL 0/7  l08.copy_kernel"),
        (12, "crashed (SIGSEGV)"),
        (13, "still here True"),
    ],
)
def test_the_kernel_survives_and_the_cell_says_what_happened(outputs, cell: int, says: str):
    assert says in outputs[cell]
