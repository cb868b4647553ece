"""Lesson 09: the kernels of the exercises do what the engine's attention does, and read nothing that is not theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.base import DequantizedRows
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.models.config import ModelConfig
from minillm.ops.dispatch import has_triton
from minillm.ops.paged_attention import paged_attention
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.check_function import check_function
from minillm.teaching.drives.lazy_kernel import LazyKernel, resolve
from minillm.teaching.drives.triton_kernels import DEVICE, KernelError
from minillm.teaching.exercise import Case
from minillm.teaching.exercises.l09_paged_attention import EXERCISES, merge
from minillm.teaching.registry import find
from minillm.teaching.result import CheckResult, Status
from minillm.teaching.variants.l06_to_l09 import MAKERS
from minillm.teaching.variants.random_numbers import Draw
from tests.ops.triton.steps import Step, step
from tests.teaching.answers import key_of

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is for Linux")
DRIVES = {exercise.function_name: exercise.run_case for exercise in EXERCISES}
KERNELS = {exercise.function_name: exercise.reference for exercise in EXERCISES}
SEVERAL = {"query_lens": [1, 1, 1], "block_size": 4, "heads": (6, 2), "dim": 8, "past": (2, 5, 12)}


def run(name: str, given: Step, *more: object) -> torch.Tensor:
    """A reference kernel on a step of decoding."""
    pools = [x for rows in given[1:3] for x in (rows.pools if hasattr(rows, "pools") else [rows])]
    tables, batch = given.batch.block_tables, given.batch
    return DRIVES[name](KERNELS[name], given.q, *pools, tables, batch.seq_lens, batch.block_size, *more)


@cache
def answers(name: str) -> AnswerKey:
    """Every answer of the reference and of the planted mistakes: the interpreter takes seconds for them, and each check
    of a kernel would begin anew."""
    key = AnswerKey(find(f"l09.{name}"), known=key_of(f"l09.{name}"))
    key.fill()
    return key


def checked(name: str, *changes: tuple[str, str]) -> CheckResult:
    """The check of the reference kernel with these changes."""
    return check_function(f"l09.{name}", LazyKernel("l09", name, *changes), key=answers(name))


@settings(max_examples=30)
@given(
    pieces=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    size=st.sampled_from([1.0, 30.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_merged_pieces_are_softmax_over_all_keys(pieces: list[int], size: float, seed: int):
    torch.manual_seed(seed)
    scores, values = size * torch.randn(2, sum(pieces)).double(), torch.randn(sum(pieces), 3).double()
    so_far = torch.full((2,), -torch.inf).double(), torch.zeros(2).double(), torch.zeros(2, 3).double()
    for s, v in zip(scores.split(pieces, 1), values.split(pieces), strict=True):
        weights = (s - s.amax(1, keepdim=True)).exp()
        so_far = merge(*so_far, s.amax(1), weights.sum(1), weights @ v)
    expected = scores.softmax(1) @ values
    torch.testing.assert_close(so_far[2] / so_far[1][:, None], expected, rtol=1e-12, atol=1e-12)


def test_nothing_and_nothing_is_nothing():
    nothing = torch.tensor([-torch.inf]), torch.zeros(1), torch.zeros(1, 2)
    m, total, out = merge(*nothing, *nothing)
    assert m.item() == -torch.inf and total.item() == 0 and out.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("every", [torch.any, torch.all])
def test_a_set_without_keys_for_one_query_says_nothing_about_the_others(every):
    def answer(m_a, l_a, o_a, m_b, l_b, o_b):
        if every(torch.isinf(m_a)):
            return m_b, l_b, o_b
        m = torch.maximum(m_a, m_b)
        factor_a, factor_b = torch.exp(m_a - m), torch.exp(m_b - m)
        return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]

    report = str(check_function("l09.merge", answer))
    assert report.startswith("FAIL") and "for all queries" in report, report


@needs_triton
@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        (
            "decode_kernel",
            ("request * table_stride", "request * tl.cdiv(length, BLOCK_SIZE)"),
            "it must be table_stride",
        ),
        ("decode_kernel", ('score, float("-inf")', "score, -100.0"), "such as -100 or -10000"),
        ("decode_kernel", ('score, float("-inf")', "score, -1000.0"), "such as -100 or -10000"),
        ("decode_kernel", ('score, float("-inf")', "score, -10000.0"), "such as -100 or -10000"),
        ("merge_kernel", ("tl.max(lse, 0)", "tl.load(lse_ptr + row * SPLITS)"), "subtracts the lse of the first part"),
        ("merge_kernel", ("tl.max(lse, 0)", "tl.sum(lse, 0) / SPLITS"), "subtracts the smallest lse or a mean"),
    ],
)
def test_kernels_that_once_passed_are_caught_and_named(name: str, change: tuple[str, str], cause: str):
    report = str(checked(name, change))
    assert report.startswith("FAIL") and cause in report, report


STRAYING = {
    "stores and loads without the mask of the padding heads": [
        (", mask=is_head, other=0.0)", ")"),
        (", mask=is_head)", ")"),
    ],
    "stores without it": [(", mask=is_head)", ")")],
    "loads without it": [(", mask=is_head, other=0.0)", ")")],
    "lets one head too many in": [("head[:, None] < GROUP", "head[:, None] <= GROUP")],
    "reads one block too many": [("range(0, length, BLOCK_SIZE)", "range(0, length + 1, BLOCK_SIZE)")],
}
FAR = {
    "reads far away": [("block * BLOCK_SIZE + place", "block * 100000000 + place")],
    "writes far away": [("out_ptr + q_at", "out_ptr + q_at * 100000000")],
}


@needs_triton
@pytest.mark.parametrize("changes", STRAYING.values(), ids=STRAYING)
def test_a_kernel_that_leaves_its_tensors_never_passes_and_is_told_so(changes: list[tuple[str, str]]):
    result = checked("decode_kernel", *changes)
    assert result.status is Status.FAILED, str(result)
    told = ("outside of", "beyond the end of", "past the end of an array")
    assert any(words in str(result) for words in told), str(result)


@needs_triton
@pytest.mark.parametrize("changes", FAR.values(), ids=FAR)
def test_a_kernel_that_reads_or_writes_far_away_never_passes_and_never_ends_the_process(changes: list[tuple[str, str]]):
    """Far away there may be other memory of the process: then the answer is wrong, else the child process crashes."""
    assert checked("decode_kernel", *changes).status is Status.FAILED


@needs_triton
@pytest.mark.parametrize(
    ("change", "says", "not_said"),
    [
        (
            ("tl.store(out_ptr + q_at, out / total[:, None], mask=is_head)", "pass"),
            "nothing is written into the result",
            "looks as if",
        ),
        (("range(0, length,", "range(0, length + 1,"), "past the end of an array", "looks as if"),
        (("m_new = tl.maximum(m, tl.max(score, 1))", "m_new = m"), "the result has NaN", "looks as if"),
    ],
    ids=["stores nothing", "reads a block too many", "NaN everywhere"],
)
def test_a_cause_that_does_not_follow_from_the_answers_is_not_named(
    change: tuple[str, str], says: str, not_said: str
) -> None:
    report = str(checked("decode_kernel", change))
    assert says in report and not_said not in report


def test_scores_that_fall_from_block_to_block_need_the_maximum_of_all_blocks():
    changes = "tl.maximum(m, tl.max(score, 1))", "tl.max(score, 1)"
    report = str(checked("decode_kernel", changes))
    assert "the second block's scores are hundreds below the first's" in report
    assert "takes the maximum of this block only" in report


@needs_triton
@pytest.mark.parametrize("seed", range(3))
def test_the_decode_kernel_is_the_engines_attention_and_reads_no_other_slot(seed: int):
    """All slots that hold no token of these requests are NaN."""
    given = step(seed, **SEVERAL)
    expected = paged_attention(given.q, given.keys, given.values, given.batch).cpu()
    torch.testing.assert_close(run("decode_kernel", given), expected, rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_split_and_merged_is_the_engines_attention(splits: int):
    """With 8 parts some have nothing to do."""
    given = step(4, **SEVERAL)
    parts = run("split_kernel", given, splits)
    rows, dim = given.q.shape[0] * given.q.shape[1], given.q.shape[2]
    merged = DRIVES["merge_kernel"](
        KERNELS["merge_kernel"], parts["part"].view(rows, splits, dim), parts["lse"].view(rows, splits)
    )
    expected = paged_attention(given.q, given.keys, given.values, given.batch).cpu()
    torch.testing.assert_close(merged.view(given.q.shape), expected, rtol=1e-5, atol=1e-5)
    assert splits < 8 or bool((parts["lse"] == -torch.inf).any())


@needs_triton
def test_the_int8_kernel_reads_what_the_engines_int8_cache_holds():
    given = step(2, **SEVERAL)
    cache = PagedInt8KVCache(ModelConfig(8, 8, 8, 1, 6, 2, 8, 8), 1, 1, torch.float32, given.q.device)
    rows = [DequantizedRows(cache.encode(x), cache.decode, tuple(x.shape)) for x in (given.keys, given.values)]
    coded = Step(given.q, *rows, given.batch)
    expected = paged_attention(given.q, *rows, given.batch).cpu()
    torch.testing.assert_close(run("int8_kernel", coded), expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_a_kernel_that_stops_is_reported_with_its_own_line():
    broken = LazyKernel("l09", "merge_kernel", ("split, channel = ", "split, chanel = "))
    text = str(check_function("l09.merge_kernel", broken))
    assert "KernelError: NameError: name 'channel' is not defined" in text
    if DEVICE == "cpu":  # the compiler's message shows the line itself
        assert "in the line `part = tl.load(" in text


@needs_triton
def test_a_function_without_the_decorator_is_told_so():
    text = str(check_function("l09.decode_kernel", lambda *args, **kwargs: None))
    assert "put @triton.jit on the line above its def" in text


@needs_triton
def test_a_kernel_whose_stub_is_a_comment_is_no_stub():
    change = (
        "    row = tl.program_id(0)\n",
        '    # raise NotImplementedError("write it here")\n    row = tl.program_id(0)\n',
    )
    assert check_function("l09.merge_kernel", LazyKernel("l09", "merge_kernel", change)).passed


def test_a_compiled_kernel_is_not_taken_for_a_planted_one():
    """Triton's `JITFunction` has an attribute `kernel`, which is None."""
    compiled = SimpleNamespace(fn=lambda: None, kernel=None)
    assert resolve(compiled) is compiled


@needs_triton
def test_a_stub_below_the_given_lines_is_not_done_yet():
    loop = "for first in range(begin, end, BLOCK_SIZE):"
    stub = LazyKernel("l09", "split_kernel", (loop, f'raise NotImplementedError("write it here")\n    {loop}'))
    assert check_function("l09.split_kernel", stub).status is Status.NOT_DONE


@needs_triton
def test_masked_lanes_that_reach_no_result_need_no_other():
    changes = "tl.load(k_ptr + at, mask=exists[:, None], other=0.0)", "tl.load(k_ptr + at, mask=exists[:, None])"
    assert check_function("l09.decode_kernel", LazyKernel("l09", "decode_kernel", changes)).passed


@pytest.mark.parametrize("number", range(8))
def test_hidden_cases_have_requests_of_more_than_two_blocks(number: int):
    """Kernels passed once that read only two blocks."""
    for name in ("l09.decode_kernel", "l09.split_kernel", "l09.int8_kernel"):
        draw = Draw(b"secret", "student", name, number)
        pools = 5 if name == "l09.int8_kernel" else 3
        tables, lengths, size = MAKERS[name](draw).args[pools : pools + 3]
        assert max(lengths) > 2 * size and max(lengths) <= tables.shape[1] * size


@needs_triton
def test_kernels_are_launched_with_a_grid():
    with pytest.raises(KernelError, match=r"merge_kernel\[grid\]"):
        KERNELS["merge_kernel"]()


@needs_triton
def test_a_planted_mistake_that_no_longer_fits_is_noticed():
    with pytest.raises(Exception, match="change its planted mistakes as well"):
        resolve(LazyKernel("l09", "merge_kernel", ("no such line", "")))


def test_remembered_answers_are_those_of_the_inputs_they_belong_to():
    merge_kernel = find("l09.merge_kernel")
    first, second = merge_kernel.all_cases()[:2]
    assert isinstance(first, Case)
    if has_triton():
        answers = [merge_kernel.run_case(merge_kernel.reference, *case.args) for case in (first, second, first)]
        assert torch.equal(answers[0], answers[2]) and not torch.equal(answers[0], answers[1])
        answers[0].zero_()
        assert torch.equal(merge_kernel.run_case(merge_kernel.reference, *first.args), answers[2])


def test_importing_the_exercises_imports_no_triton():
    """Or other lessons would decide for this one whether kernels are compiled or interpreted."""
    code = "import sys, minillm.teaching.exercises.l09_paged_attention; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


COMPILE = """
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minillm.teaching.drives.triton_kernels import changed_kernel
from minillm.teaching.drives.undefined_lanes import with_undefined_lanes
from minillm.teaching.exercises import _l09_kernels as kernels
from tests.ops.triton.compile_only import compile_instead

@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))

q, pool, table, lengths = torch.zeros(2, 6, 8), torch.zeros(8, 2, 8), torch.zeros(2, 2).long(), torch.zeros(2).long()
part, lse = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 4)
sizes = dict(NUM_KV=2, GROUP=3, PAD_GROUP=4, DIM=8, BLOCK_SIZE=4)
codes, scales = pool.to(torch.int8), pool[:, :, 0].bfloat16()
for architecture in (75, 90):
    target = GPUTarget("cuda", architecture, 32)
    triton.JITFunction.run = compile_instead(target, set())
    kernels.decode_kernel[(2, 2)](q, pool, pool, table, lengths, q, 2, 0.35, **sizes)
    kernels.split_kernel[(2, 2, 4)](q, pool, pool, table, lengths, part, lse, 2, 0.35, **sizes, SPLITS=4)
    kernels.merge_kernel[(12,)](part, lse, q, DIM=8, SPLITS=4)
    kernels.int8_kernel[(2, 2)](q, codes, scales, codes, scales, table, lengths, q, 2, 0.35, **sizes)
    torch.cuda.is_available = lambda: True  # so that nothing is interpreted
    without = ("other=0.0)", "other=None)")
    int8 = changed_kernel(kernels.int8_kernel, [without, ("other=0)", "other=None)")], vars(kernels))
    for load, variant in with_undefined_lanes(int8):
        triton.JITFunction.run = compile_instead(target, set())  # which compiles each name once
        variant[(2, 2)](q, codes, scales, codes, scales, table, lengths, q, 2, 0.35, **sizes)
        print("undefined", load)
    for rows in (1, 4, 16):
        kinds = dict(a_ptr="*fp16", b_ptr="*fp16", c_ptr="*fp32", M="constexpr", N="constexpr", K="constexpr")
        made = triton.compile(ASTSource(dot_kernel, kinds, dict(M=rows, N=32, K=32)), target=target)
        print("dot", architecture, rows, "mma" if "mma" in made.asm["ptx"] else "registers")
"""


def test_the_kernels_compile_and_tl_dot_is_what_the_lesson_says(tmp_path: Path):
    """`tl.dot` takes 1 and 4 rows; on sm_75 it multiplies in registers, from sm_80 on with tensor cores."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    file = tmp_path / "compile_lesson_09.py"  # Triton reads the source of a kernel from its file
    file.write_text(COMPILE)
    made = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environment, cwd=ROOT)
    if "No module named 'triton.backends.nvidia'" in made.stderr:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    assert made.returncode == 0, made.stderr[-2000:]
    for name in KERNELS:
        times = 2 + 8 * (name == "int8_kernel")  # for two GPUs; with other masked lanes of each of its four loads
        assert name == "merge" or made.stdout.count(f" {name} ") == times, (name, made.stdout)
    assert made.stdout.count("undefined tl.load") == 8
    for rows in (1, 4, 16):
        assert f"dot 75 {rows} registers" in made.stdout and f"dot 90 {rows} mma" in made.stdout
