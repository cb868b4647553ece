"""Lesson 08: the kernels are right for random shapes, the checker sees what is beyond a tensor, and they compile."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import LessonError
from minillm.ops.kv_quant import dequantize_symmetric, quantize_symmetric
from minillm.ops.rms_norm import rms_norm
from minillm.teaching.check_function import check_function
from minillm.teaching.drives import l08_launch as launching
from minillm.teaching.drives.kernel_source import loads_without_other, unmasked_loads
from minillm.teaching.drives.lazy_kernel import LazyKernel, resolve
from minillm.teaching.drives.triton_kernels import KernelError, interpreting
from minillm.teaching.exercises.l08_triton_kernels import (
    EXERCISES,
    lanes,
    run_copy,
    run_dequantise,
    run_rms_norm,
    run_softmax,
)
from minillm.teaching.result import Status
from minillm.teaching.variants.l06_to_l09 import MAKERS
from minillm.teaching.variants.random_numbers import Draw

ROOT = Path(__file__).parents[2]
CLEAN = {
    "numbers of out never written": 0,
    "numbers written outside of out": 0,
    "numbers of the last program written by others": 0,
    "input numbers overwritten": 0,
    "blocks loaded without a mask": [],
}
NAMES = ["copy_kernel", "softmax_kernel", "rms_norm_kernel", "dequantise_kernel"]
SMALL = settings(max_examples=8, derandomize=True)
SIZES = st.integers(1, 20)


def power(columns: int) -> int:
    return 1 << (columns - 1).bit_length()


def holds(result: dict, expected: torch.Tensor, exact: bool = False) -> None:
    assert {key: result[key] for key in CLEAN} == CLEAN
    torch.testing.assert_close(result["out"], expected, **({"rtol": 0, "atol": 0} if exact else {}))


@SMALL
@given(rows=st.integers(1, 3), columns=SIZES, more=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_copy(rows: int, columns: int, more: tuple[int, int]):
    x = torch.randn(rows, columns)
    holds(run_copy(LazyKernel("l08", "copy_kernel"), x, columns + more[0], columns + more[1], 4), x, exact=True)


@SMALL
@given(rows=st.integers(1, 3), columns=SIZES, size=st.sampled_from([1e-3, 1.0, 300.0]))
def test_softmax(rows: int, columns: int, size: float):
    x = size * torch.randn(rows, columns)
    holds(run_softmax(LazyKernel("l08", "softmax_kernel"), x, power(columns)), x.softmax(-1))


@SMALL
@given(rows=st.integers(1, 3), columns=SIZES, dtype=st.sampled_from([torch.float32, torch.float16]))
def test_rms_norm(rows: int, columns: int, dtype: torch.dtype):
    x, weight = (100 * torch.randn(rows, columns)).to(dtype), torch.randn(columns).to(dtype)
    result = run_rms_norm(LazyKernel("l08", "rms_norm_kernel"), x, weight, 1e-5, power(columns))
    holds(result, rms_norm(x, weight, 1e-5))


@SMALL
@given(rows=st.integers(1, 7), columns=SIZES, tile=st.sampled_from([1, 2, 4]))
def test_dequantise_gives_the_engines_numbers_bit_for_bit(rows: int, columns: int, tile: int):
    codes, scale = quantize_symmetric(torch.randn(rows, columns), 127)  # scales in bfloat16
    result = run_dequantise(LazyKernel("l08", "dequantise_kernel"), codes, scale, tile, power(columns))
    holds(result, dequantize_symmetric(codes, scale), exact=True)


@given(rows=st.integers(1, 9), columns=st.integers(1, 50), block=st.sampled_from([1, 4, 8, 32]))
def test_lanes_are_counted_as_they_are_masked(rows: int, columns: int, block: int):
    starts = [(row, start) for row in range(rows) for start in range(0, columns, block)]
    off = sum(max(0, start + block - columns) for _, start in starts)
    assert lanes(rows, columns, block) == (len(starts), off)


def kernel_of(source: str):
    """The kernel, or the function, that a notebook's cell with this text defines."""
    with interpreting():
        resolve(LazyKernel("l08", "copy_kernel"))
        import triton
        import triton.language as tl

        text = textwrap.dedent(source)
        name = f"<cell {abs(hash(text))}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        space = {"triton": triton, "tl": tl}
        exec(compile(text, name, "exec"), space)
        return next(reversed(space.values()))


HEAD = "@triton.jit\ndef softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):\n"


def test_a_stub_of_a_kernel_is_not_done_yet():
    stub = kernel_of(HEAD + '    """Words."""\n    raise NotImplementedError("write softmax_kernel here")\n')
    result = check_function("l08.softmax_kernel", stub)
    assert result.status is Status.NOT_DONE and "write softmax_kernel here" in str(result)


def test_an_error_in_a_kernel_is_shown_with_its_line():
    text = str(
        check_function("l08.softmax_kernel", kernel_of(HEAD + "    row = tl.program_id(0)\n    x = row + colums\n"))
    )
    assert "NameError: name 'colums' is not defined (in the line `x = row + colums`)" in text


def test_a_kernel_with_other_parameters_is_told_so():
    text = str(
        check_function("l08.softmax_kernel", kernel_of("@triton.jit\ndef softmax_kernel(x_ptr, out_ptr):\n    pass\n"))
    )
    assert "your kernel takes (x_ptr, out_ptr), but it is launched with 3 tensors and numbers, then BLOCK=" in text


def test_a_function_without_the_decorator_is_no_kernel():
    body = """
        row, column = tl.program_id(0), tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=inside, other=-float("inf"))
        e = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)
    """
    source = HEAD + textwrap.indent(textwrap.dedent(body), "    ")
    assert check_function("l08.softmax_kernel", kernel_of(source)).passed
    report = str(check_function("l08.softmax_kernel", kernel_of(source.removeprefix("@triton.jit\n"))))
    assert "softmax_kernel is not a kernel: put @triton.jit on the line above its def" in report


def test_an_object_that_only_behaves_like_a_kernel_is_none():
    class Imitation:
        def __init__(self, function):
            self.fn = function

        def __getitem__(self, grid):
            return lambda x, out, *numbers, **sizes: out.copy_(x.softmax(-1))

    written = kernel_of("@triton.jit\ndef softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):\n    pass\n")
    result = check_function("l08.softmax_kernel", Imitation(written.fn))
    assert not result.passed and "put @triton.jit alone above its def" in str(result)


def test_a_kernel_that_writes_nothing_leaves_nan():
    text = str(check_function("l08.softmax_kernel", kernel_of(HEAD + "    row = tl.program_id(0)\n")))
    assert "nan instead of" in text


def test_a_write_in_front_of_the_result_is_said_to_be_outside_of_it():
    body = """
        row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < columns)
        tl.store(out_ptr + row * out_stride + column - 1, x, mask=column < columns)
    """
    head = "@triton.jit\ndef copy_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):\n"
    report = str(check_function("l08.copy_kernel", kernel_of(head + textwrap.indent(textwrap.dedent(body), "    "))))
    assert "1 number written outside of out" in report and "beyond" not in report


def test_another_right_way_passes():
    """Clamped places instead of a mask on the load, `tl.where` instead of `other`, one name for the pointers."""
    body = """
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        x_ptr += row * columns
        x = tl.load(x_ptr + tl.minimum(column, columns - 1))
        x = tl.where(column < columns, x, -float("inf"))
        e = tl.exp(x - tl.max(x))
        e = e / tl.sum(e)
        tl.store(out_ptr + row * columns + column, e, column < columns)
    """
    result = check_function("l08.softmax_kernel", kernel_of(HEAD + textwrap.indent(textwrap.dedent(body), "    ")))
    assert result.passed, str(result)


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_loop_over_the_blocks_that_no_other_program_copies_passes(interpreted: bool, monkeypatch):
    """A compiled kernel cannot be told another `tl.num_programs` than that of its launch."""
    if not interpreted:
        monkeypatch.setattr(launching, "is_interpreted", lambda kernel: False)
        monkeypatch.setattr(launching, "num_programs_of", lambda grid: nullcontext())
    body = """
        row = tl.program_id(0)
        for first in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + column, mask=column < columns)
            tl.store(out_ptr + row * out_stride + column, x, mask=column < columns)
    """
    head = "@triton.jit\ndef copy_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):\n"
    result = check_function("l08.copy_kernel", kernel_of(head + textwrap.indent(textwrap.dedent(body), "    ")))
    assert result.passed, str(result)
    everything = body.replace("tl.program_id(1) * BLOCK", "0").replace("tl.num_programs(1) * BLOCK", "BLOCK")
    result = check_function("l08.copy_kernel", kernel_of(head + textwrap.indent(textwrap.dedent(everything), "    ")))
    assert result.counterexample is not None and "numbers of the last program" in result.counterexample.problem


def test_a_product_with_a_condition_keeps_a_load_inside():
    body = """
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * columns + column * inside)
        x = tl.where(inside, x, -float("inf"))
        e = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)
    """
    result = check_function("l08.softmax_kernel", kernel_of(HEAD + textwrap.indent(textwrap.dedent(body), "    ")))
    assert result.passed, str(result)


def test_masked_lanes_without_other_are_undefined_but_may_be_ignored():
    """The interpreter loads 0 there, which is right for a sum of squares, and wrong on a GPU."""
    right = "x = tl.where(inside, x, 0.0)"
    body = """
        row, column = tl.program_id(0), tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=inside).to(tl.float32)
        x = tl.where(inside, x, 0.0)
        weight = tl.load(weight_ptr + column, inside).to(tl.float32)
        mean = tl.sum(x * x, 0) / columns
        tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)
    """
    head = "@triton.jit\ndef rms_norm_kernel(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):\n"
    source = head + textwrap.indent(textwrap.dedent(body), "    ")
    assert check_function("l08.rms_norm_kernel", kernel_of(source)).passed
    report = str(check_function("l08.rms_norm_kernel", kernel_of(source.replace(right, "pass"))))
    assert "depends on masked lanes of `tl.load(x_ptr + row * columns + column, mask=inside)`" in report


def test_masked_lanes_without_other_are_undefined_in_a_kernel_that_is_called_too():
    source = """
        @triton.jit
        def block(ptr, columns, BLOCK: tl.constexpr):
            column = tl.arange(0, BLOCK)
            return tl.load(ptr + column, mask=column < columns).to(tl.float32)

        @triton.jit
        def row_of(ptr, row, columns, BLOCK: tl.constexpr):
            return block(ptr + row * columns, columns, BLOCK)

        @triton.jit
        def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
            row, column = tl.program_id(0), tl.arange(0, BLOCK)
            x = row_of(x_ptr, row, columns, BLOCK)
            mean = tl.sum(x * x, 0) / columns
            out = x / tl.sqrt(mean + eps) * block(weight_ptr, columns, BLOCK)
            tl.store(out_ptr + row * columns + column, out, mask=column < columns)
    """
    x, weight = torch.tensor([[1.0, -2.0, 3.0]]), torch.ones(3)
    with pytest.raises(KernelError, match=r"depends on masked lanes of `tl.load\(ptr \+ column"):
        run_rms_norm(kernel_of(source), x, weight, 1e-5, 4)
    called = "row_of(x_ptr, row, columns, BLOCK)"
    chosen = source.replace(called, f"tl.where(column < columns, {called}, 0.0)")
    holds(run_rms_norm(kernel_of(chosen), x, weight, 1e-5, 4), rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(
    ("load", "count"),
    [
        ("tl.load(p + c, mask=c < n)", 1),
        ("tl.load(p + c, c < n)", 1),
        ("tl.load(p + c, mask=c < n, other=0.0)", 0),
        ("tl.load(p + c, c < n, 0.0)", 0),
        ("tl.load(p + c, mask=c < n, other=None)", 1),
        ("tl.load(p + c)", 0),
        ("tl.load(p + c, mask=None)", 0),
    ],
)
def test_loads_without_other_are_found_in_the_source(load: str, count: int):
    tree = ast.parse(f"def kernel(p, n):\n    x = {load}\n").body[0]
    assert len(loads_without_other(tree)) == count


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("x = tl.load(p + c)", 1),
        ("x = tl.load(p + c, mask=c < n)", 0),
        ("x = tl.load(p + c, c < n)", 0),
        ("x = tl.load(p + row)", 0),
        ("x = tl.load(p + c % n)", 0),
        ("x = tl.load(p + c * (c < n))", 0),
        ("on = (c < n) & (c > 1)\n    x = tl.load(p + on * c)", 0),
        ("on = c < n\n    x = tl.load(p + on + c)", 1),
        ("x = tl.load(p + tl.load(q + row))", 0),
        ("at = p + row * n\n    at += c\n    x = tl.load(at)", 1),
        ("if n > 7:\n        x = tl.load(p + c)\n    else:\n        x = tl.load(p + c, mask=c < n)", 0),
        ("if n < 8:\n        x = tl.load(p + c, mask=c < n)\n    else:\n        x = tl.load(p + c)", 0),
        ("x = tl.load(p + c) if n > 7 else tl.load(p + c, mask=c < n)", 0),
        ("x = tl.load(p + c[:, None] * n)", 1),
        ("m = tl.max(tl.load(p + c, mask=c < n), 0)\n    x = tl.load(p + m)", 0),
        ("r, d = 0, tl.arange(0, 8)\n    x = tl.load(p + d)", 1),
        ("r, d = 0, tl.arange(0, 8)\n    x = tl.load(p + r)", 0),
        ("row, c = c, row\n    x = tl.load(p + c)", 0),
        ("d: tl.tensor = tl.arange(0, 8)\n    x = tl.load(p + d)", 1),
        ("c %= n\n    x = tl.load(p + c)", 0),
        ("c = tl.load(p + c)", 1),
        ("while tl.sum(tl.load(p + c), 0) > 0:\n        c += 1", 1),
        ("if tl.max(tl.load(p + tl.arange(0, 8)), 0) > 0:\n        row += 1", 1),
        ("for _ in range(tl.max(tl.load(p + c), 0)):\n        row += 1", 1),
        ("for _ in range(tl.load(p + row)):\n        row += 1", 0),
        ("[d, r] = tl.arange(0, 8), 0\n    x = tl.load(p + d)", 1),
    ],
)
def test_loads_without_a_mask_are_found_in_the_source(line: str, count: int):
    text = f"def kernel(p, q, n):\n    row = tl.program_id(0)\n    c = tl.arange(0, 8)\n    {line}\n"
    assert len(unmasked_loads(ast.parse(text).body[0])) == count


def test_every_wrong_kernel_is_the_right_one_but_for_its_mistake():
    for exercise in EXERCISES[1:]:
        right = list(inspect.signature(exercise.reference).parameters)
        assert right[-1] == "BLOCK"
        for wrong in exercise.wrong:
            assert list(inspect.signature(wrong.function).parameters) == right, wrong.description


@pytest.mark.parametrize("number", range(4))
def test_every_drawn_case_sees_a_tile_that_writes_into_the_next(number: int):
    exercise = EXERCISES[-1]
    wrong = next(wrong.function for wrong in exercise.wrong if wrong.description.startswith("masks by place"))
    case = MAKERS[exercise.name](Draw(b"secret", "student", exercise.name, number))
    assert run_dequantise(wrong, *case.args)["numbers of the last program written by others"] > 0


def test_an_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with interpreting():
        assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in os.environ


def test_a_reference_is_launched_like_a_kernel_and_not_called_like_a_function():
    x, out = torch.arange(4.0).view(1, 4), torch.zeros(1, 4)
    if not torch.cuda.is_available():
        with interpreting():
            LazyKernel("l08", "copy_kernel")[(1, 1)](x, out, 4, 4, 4, BLOCK=4)
        assert torch.equal(x, out)
    with pytest.raises(LessonError, match="launched with a grid"):
        LazyKernel("l08", "copy_kernel")(x, out)
    assert issubclass(KernelError, LessonError)


IMPORTED_TOO_EARLY = """
import triton
from minillm.teaching.exercises.l08_triton_kernels import EXERCISES
from minillm.teaching.check_function import check_function
print(check_function(EXERCISES[2], EXERCISES[2].reference))
"""
AFTER_THE_DOCTOR = """
from minillm.doctor.doctor import doctor
doctor()
import os
os.environ["TRITON_INTERPRET"] = "1"
from minillm.teaching.exercises.l08_triton_kernels import EXERCISES
from minillm.teaching.check_function import check_function
print(check_function(EXERCISES[2], EXERCISES[2].reference))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton compiles")
def test_triton_imported_too_early_is_named_with_its_cure():
    assert "restart the notebook's kernel" in python(IMPORTED_TOO_EARLY).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton compiles")
def test_the_doctor_does_not_import_triton_too_early():
    made = python(AFTER_THE_DOCTOR)
    assert "PASS 8/8" in made.stdout, made.stderr


COMPILE = """
import torch, triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from minillm.teaching.exercises import _l08_kernels as kernels
from tests.ops.triton.compile_only import compile_instead
x, columns = torch.zeros(3, 48), 48
for architecture in (75, 90):
    triton.JITFunction.run = compile_instead(GPUTarget("cuda", architecture, 32), set())
    for real in (x, x.half()):
        kernels.copy_kernel[(3, 1)](real, real, columns, 48, 64, BLOCK=64)
        kernels.softmax_kernel[(3,)](real, real, columns, BLOCK=64)
        kernels.rms_norm_kernel[(3,)](real, real[0], real, columns, 1e-5, BLOCK=64)
    for scale in (x[:, 0], x[:, 0].bfloat16()):
        kernels.dequantise_kernel[(1,)](x.to(torch.int8), scale, x, 3, columns, ROWS=4, BLOCK=64)
"""


def test_the_kernels_compile_for_gpus_that_are_not_here():
    made = python(COMPILE)  # a process of its own: looking for `triton.backends` in this one would import Triton
    if "No module named 'triton.backends.nvidia'" in made.stderr:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    assert made.returncode == 0, made.stderr[-2000:]
    for name in NAMES:
        assert made.stdout.count(name) == 4, (name, made.stdout)  # two types, two GPUs
