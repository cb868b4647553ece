"""Lesson 09, paged attention in Triton: merge partial attentions, walk a block table, split the keys, read INT8.

The kernels are in `_l09_kernels`, which is imported when one of them is launched and not before, because that imports
Triton, and Triton decides on import whether it compiles or interprets.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
import traceback
import warnings
from copy import deepcopy
from functools import cached_property, wraps
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.errors import LessonError
from minillm.ops.dispatch import has_triton
from minillm.ops.kv_quant import INT8_LEVELS, quantize_symmetric
from minillm.teaching.exercise import Case, Exercise, Function, WrongVersion
from minillm.teaching.exercises._l08_launch import interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# -------------------------------------------------------------------------------------------------------------- merge


def merge(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    """Attention over two sets of keys from the attention over each (Milakov & Gimelshein 2018, section 3).

    Per query: `m` is the largest score, `l = Σ exp(score - m)`, `o = Σ exp(score - m) · value`. `m`, `l`:
    `[num_queries]`; `o`: `[num_queries, head_dim]`. Returns the same three of both sets together.
    """
    m = torch.maximum(m_a, m_b)
    keep_a, keep_b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, l_a * keep_a + l_b * keep_b, o_a * keep_a[:, None] + o_b * keep_b[:, None]


def _adds(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    return torch.maximum(m_a, m_b), l_a + l_b, o_a + o_b


def _averages(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    return torch.maximum(m_a, m_b), (l_a + l_b) / 2, (o_a + o_b) / 2


def _first_maximum(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    keep = torch.exp(m_b - m_a)
    return m_a, l_a + l_b * keep, o_a + o_b * keep[:, None]


def _sum_only(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m, total, _ = merge(m_a, l_a, o_a, m_b, l_b, o_b)
    return m, total, o_a + o_b


def _upside_down(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m = torch.maximum(m_a, m_b)
    keep_a, keep_b = torch.exp(m - m_a), torch.exp(m - m_b)
    return m, l_a * keep_a + l_b * keep_b, o_a * keep_a[:, None] + o_b * keep_b[:, None]


def _divides(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m, total, out = merge(m_a, l_a, o_a, m_b, l_b, o_b)
    return m, total, out / total[:, None]


def _merge_cases() -> list[Case]:
    def one(m: float, total: float, *out: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor([m]), torch.tensor([total]), torch.tensor([out])

    return [
        Case("two keys with equal scores", (*one(2.0, 1.0, 1.0, 0.0), *one(2.0, 1.0, 0.0, 4.0))),
        Case("the larger score comes second", (*one(0.0, 2.0, 2.0, 1.0), *one(1.0, 1.0, 3.0, 5.0))),
        Case("the larger score comes first", (*one(3.0, 1.5, 6.0, 1.0), *one(1.0, 2.0, 2.0, 2.0))),
        Case("the first keys of all: nothing came before", (*one(-torch.inf, 0.0, 0.0, 0.0), *one(1.5, 2.0, 3.0, 4.0))),
        Case("scores far apart", (*one(-200.0, 1.0, 1.0, 1.0), *one(300.0, 1.0, 2.0, 3.0))),
        Case(
            "two queries at once",
            (
                *(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
                *(torch.tensor([2.0, 4.0]), torch.tensor([3.0, 1.0]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])),
            ),
        ),
    ]


_MERGE = Exercise(
    name="l09.merge",
    reference=merge,
    cases=_merge_cases,
    hints=(
        "Both sums are relative to their own maximum. What must happen to them before they may be added?",
        "m = the larger of the two maxima. A sum that was made with exp(score - m_a) becomes one made with "
        "exp(score - m) if you multiply it by exp(m_a - m). The same factor holds for l and for o.",
        "m = torch.maximum(m_a, m_b); keep_a = torch.exp(m_a - m); keep_b = torch.exp(m_b - m); l = l_a·keep_a + "
        "l_b·keep_b; o the same with keep_a[:, None] and keep_b[:, None].",
    ),
    wrong=(
        WrongVersion("adds sums that are relative to different maxima", _adds),
        WrongVersion("averages the two parts", _averages),
        WrongVersion("keeps the first maximum, even if a larger score comes later or none came before", _first_maximum),
        WrongVersion("corrects l and forgets to correct o", _sum_only),
        WrongVersion("has the sign of the correction upside down: exp(m - m_a) instead of exp(m_a - m)", _upside_down),
        WrongVersion("divides o by l already, and so cannot go on merging", _divides),
    ),
)

# ----------------------------------------------------------------------------------------------- kernels and mistakes


class KernelFailed(LessonError):
    """A kernel cannot be launched, or stopped with an error; names its line where that is known."""


class KernelByName:
    """A kernel of `_l09_kernels`, perhaps with other words in its source; made when it is first used.

    A planted mistake is a line or two of `changes`, from what is right to what is wrong, so it cannot drift from the
    rest of the kernel. Launched as a kernel is: `kernel[grid](...)`.
    """

    def __init__(self, name: str, *changes: tuple[str, str]) -> None:
        self.__name__ = name
        self.changes = changes

    @cached_property
    def fn(self) -> Function:
        """The Python function that the kernel is made from."""
        return self.kernel.fn

    @cached_property
    def kernel(self) -> Any:
        """What Triton makes of it. Raises `LessonError` if a line to change is not there."""
        right = getattr(_kernels(), self.__name__)
        if not self.changes:
            return right
        source = textwrap.dedent(inspect.getsource(right.fn))
        for old, new in self.changes:
            if old not in source:
                raise LessonError(f"{old!r} is not in {self.__name__}; change its planted mistakes as well")
            source = source.replace(old, new)
        file = f"<{self.__name__} with a mistake, {id(self)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Triton reads the source
        space = dict(vars(_kernels()))
        with interpreting():
            exec(compile(source, file, "exec"), space)
        return space[self.__name__]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Function:
        return self.kernel[grid]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raises `KernelFailed`: a kernel has a grid."""
        raise KernelFailed(f"a kernel is launched with a grid: {self.__name__}[grid](...)")


def _kernels() -> Any:
    """The module of kernels. Raises `LessonError` where there is no Triton, or one that was imported too early."""
    if not has_triton():
        raise LessonError("Triton is not installed; it exists for Linux and WSL (pip install triton) and on Colab")
    with interpreting():
        kernels, library = import_module("minillm.teaching.exercises._l09_kernels"), import_module("triton.language")
    if type(kernels.decode_kernel) is not type(library.sum):  # which is a kernel too, made when Triton was imported
        raise LessonError(
            "Triton was imported before TRITON_INTERPRET=1 was set, and can now neither compile nor interpret; restart "
            "the notebook's kernel and run it from its first cell"
        )
    return kernels


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
    """Run a learner's kernel on `args`, which are on the GPU if there is one.

    Raises `NotImplementedError` for a stub, `KernelFailed` for what is no kernel or stops with an error.
    """
    kernel = getattr(kernel, "kernel", kernel)
    plain = getattr(kernel, "fn", kernel)
    name = getattr(plain, "__name__", "this")
    if "raise NotImplementedError" in _source_of(plain):
        raise NotImplementedError(f"write {name} here, then run its check")
    if not hasattr(kernel, "fn"):
        raise KernelFailed(f"{name} is no kernel: put @triton.jit on the line above its def")
    if type(kernel) is not type(_kernels().decode_kernel):
        raise KernelFailed("TRITON_INTERPRET=1 was not set when this kernel was defined; run the notebook from the top")
    failure = ""
    with interpreting(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about NaN
        try:
            kernel[grid](*args, **constants)
        except Exception as error:
            failure = _in_words(error, name)
    if failure:
        raise KernelFailed(failure)


def _source_of(function: Function) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _in_words(error: BaseException, name: str) -> str:
    """What stopped the kernel, and the last of its own lines that Python saw."""
    own: list[traceback.FrameSummary] = []
    while True:
        own += [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == name and frame.line]
        if error.__cause__ is None:
            break
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    where = f" (in the line `{own[-1].line}`)" if own else ""
    return f"{type(error).__name__}: {lines[-1]}{where}"


def _remembering(drive: Function) -> Function:
    """`drive`, but a kernel of ours that has answered a case before is not interpreted again: it takes 10 ms a time."""
    answers: dict[tuple[object, ...], Any] = {}

    @wraps(drive)
    def run(kernel: Function, *inputs: Any) -> Any:
        if not isinstance(kernel, KernelByName):
            return drive(kernel, *inputs)
        key = id(kernel), *(repr(x.tolist() if isinstance(x, Tensor) else x) for x in inputs)
        if key not in answers:
            answers[key] = drive(kernel, *inputs)
        return deepcopy(answers[key])

    return run


def _poisoned(
    seed: int, seq_lens: list[int], tables: list[list[int]], heads: int, num_kv: int, block_size: int = 4, dim: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int], int]:
    """Queries, pools whose unused slots hold NaN, block tables padded with their first block, lengths."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = (1 + max(map(max, tables))) * block_size
    keys, values = (torch.full((num_slots, num_kv, dim), torch.nan) for _ in "kv")
    for length, table in zip(seq_lens, tables, strict=True):
        slots = [table[i // block_size] * block_size + i % block_size for i in range(length)]
        keys[slots], values[slots] = torch.randn(2, length, num_kv, dim, generator=generator)
    longest = max(map(len, tables))
    padded = torch.tensor([table + table[:1] * (longest - len(table)) for table in tables])
    q = torch.randn(len(tables), heads, dim, generator=generator)
    return q, keys, values, padded, seq_lens, block_size


def _sizes(q: Tensor, num_kv: int, block_size: int) -> dict[str, int]:
    group = q.shape[1] // num_kv
    pad_group = 1 << (group - 1).bit_length()
    return {"NUM_KV": num_kv, "GROUP": group, "PAD_GROUP": pad_group, "DIM": q.shape[2], "BLOCK_SIZE": block_size}


# ------------------------------------------------------------------------------------------------------ decode_kernel


def _run_decode(
    kernel: Function,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    block_size: int,
) -> Tensor:
    """Launch on a grid of requests by KV heads; what the kernel does not write stays NaN."""
    q, keys, values, tables = (x.to(DEVICE) for x in (q, keys, values, block_tables))
    out = torch.full_like(q, torch.nan)
    num_kv = keys.shape[1]
    args = (q, keys, values, tables, torch.tensor(seq_lens, device=DEVICE), out, tables.stride(0), q.shape[2] ** -0.5)
    launch(kernel, (len(q), num_kv), *args, **_sizes(q, num_kv, block_size))
    return out.cpu()


def _decode_cases() -> list[Case]:
    large = _poisoned(5, [4], [[1]], 1, 1)
    return [
        Case("one request, one full block", _poisoned(1, [4], [[1]], 1, 1)),
        Case("the last block holds two of four", _poisoned(1, [6], [[2, 0]], 1, 1)),
        Case("two requests of different lengths", _poisoned(2, [3, 6], [[4], [2, 0]], 1, 1)),
        Case("three query heads share each of two KV heads", _poisoned(4, [3], [[1]], 6, 2)),
        Case("scores of several thousand", (large[0] * 4000, *large[1:])),
    ]


_SKIPS_SLOTS = "tl.load(k_ptr + at, mask=exists[:, None], other=0.0)", "tl.load(k_ptr + at)"
_SKIPS_VALUES = "tl.load(v_ptr + at, mask=exists[:, None], other=0.0)", "tl.load(v_ptr + at)"
_NO_WHERE = 'tl.where(exists[None, :], score, float("-inf"))', "score"

_DECODE = Exercise(
    name="l09.decode_kernel",
    reference=KernelByName("decode_kernel"),
    cases=_decode_cases,
    hints=(
        "It is your merge, block by block: (m, l, o) of what came before, and the scores and values of one block more.",
        "Turn number `first // BLOCK_SIZE` of the loop loads one block id from the table, then BLOCK_SIZE rows of k "
        "and of v from slot block · BLOCK_SIZE + place on. Rows that do not exist need two masks: one for the loads, "
        "and -inf for their scores.",
        "score = tl.sum(q[:, None, :] * k[None, :, :], 2), then tl.where(exists[None, :], score, -inf); m_new = "
        "tl.maximum(m, tl.max(score, 1)); weight = tl.exp(score - m_new[:, None]); keep = tl.exp(m - m_new); total = "
        "total · keep + tl.sum(weight, 1); out = out · keep[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1).",
    ),
    wrong=(
        WrongVersion(
            "gives weight to rows of the last block that do not exist: a score of 0 is not -inf",
            KernelByName("decode_kernel", _NO_WHERE),
        ),
        WrongVersion(
            "loads slots that nobody has written; a weight of 0 does not help, for 0 · NaN is NaN",
            KernelByName("decode_kernel", _SKIPS_VALUES),
        ),
        WrongVersion(
            "reads the blocks 0, 1, 2 … instead of those in the table",
            KernelByName(
                "decode_kernel",
                ("tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)", "first // BLOCK_SIZE"),
                # so that it reads numbers where it should not look at all, and not only NaN
                ("* BLOCK_SIZE + place) *", "* BLOCK_SIZE + place) % 8 *"),
            ),
        ),
        WrongVersion(
            "reads the table of the first request for all of them",
            KernelByName("decode_kernel", ("request * table_stride + ", "")),
        ),
        WrongVersion(
            "does not correct what it has summed when a larger score turns up",
            KernelByName("decode_kernel", ("keep = tl.exp(m - m_new)", "keep = tl.where(m > m_new, m, 1.0)")),
        ),
        WrongVersion(
            "takes no maximum, so a large score becomes infinite",
            KernelByName("decode_kernel", ("tl.maximum(m, tl.max(score, 1))", "tl.max(score, 1) * 0.0")),
        ),
        WrongVersion(
            "does not divide by the sum of the weights", KernelByName("decode_kernel", (" / total[:, None]", ""))
        ),
        WrongVersion("forgets the factor 1/√d of the scores", KernelByName("decode_kernel", (" * scale", ""))),
        WrongVersion(
            "reads KV head 0 for every query head",
            KernelByName("decode_kernel", ("* NUM_KV + kv_head)[:, None]", "* NUM_KV)[:, None]")),
        ),
    ),
    drive=_remembering(_run_decode),
)

# ------------------------------------------------------------------------------------------------------- split_kernel


def _run_split(
    kernel: Function,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    block_size: int,
    splits: int,
) -> dict[str, Tensor]:
    """Launch on a grid of requests by KV heads by parts; what the kernel does not write stays NaN."""
    q, keys, values, tables = (x.to(DEVICE) for x in (q, keys, values, block_tables))
    part = torch.full((*q.shape[:2], splits, q.shape[2]), torch.nan, device=DEVICE)
    lse = torch.full((*q.shape[:2], splits), torch.nan, device=DEVICE)
    num_kv = keys.shape[1]
    lengths = torch.tensor(seq_lens, device=DEVICE)
    args = (q, keys, values, tables, lengths, part, lse, tables.stride(0), q.shape[2] ** -0.5)
    launch(kernel, (len(q), num_kv, splits), *args, **_sizes(q, num_kv, block_size), SPLITS=splits)
    return {"part": part.cpu(), "lse": lse.cpu()}


_SPLIT = Exercise(
    name="l09.split_kernel",
    reference=KernelByName("split_kernel"),
    cases=lambda: [
        Case("four blocks in two parts", (*_poisoned(1, [16], [[3, 0, 4, 1]], 1, 1), 2)),
        Case("three blocks in two parts, the last block filled in part", (*_poisoned(2, [10], [[2, 0, 3]], 1, 1), 2)),
        Case("one block in two parts: one has nothing to do", (*_poisoned(3, [3], [[1]], 1, 1), 2)),
        Case(
            "two requests, three query heads share a KV head",
            (*_poisoned(4, [5, 3], [[4, 0], [1]], 3, 1), 2),
        ),
    ],
    hints=(
        "Start from your decode_kernel. Only where the loop begins and ends is new, and what is stored at the end.",
        "Give every part the same whole number of blocks: tl.cdiv(tl.cdiv(length, BLOCK_SIZE), SPLITS) of them, and "
        "cut the last part at length. Store out / total, and beside it log Σ exp(score) = m + log(total).",
        "begin = split · keys_of_a_part; end = tl.minimum(begin + keys_of_a_part, length). A part without keys has "
        "total 0 and m -inf: divide by tl.where(total == 0, 1, total) and it stores 0 and -inf. Row r of part s lies "
        "at (r · SPLITS + s) · DIM.",
    ),
    wrong=(
        WrongVersion(
            "has every part walk over all keys",
            KernelByName(
                "split_kernel", ("begin = split * keys_of_a_part", "begin = 0"), ("begin + keys_of_a_part", "length")
            ),
        ),
        WrongVersion(
            "rounds the size of a part down, so that the last blocks belong to nobody",
            KernelByName(
                "split_kernel",
                ("tl.cdiv(tl.cdiv(length, BLOCK_SIZE), SPLITS)", "tl.cdiv(length, BLOCK_SIZE) // SPLITS"),
            ),
        ),
        WrongVersion(
            "stores the sum o instead of o / l",
            KernelByName("split_kernel", ("out / divisor[:, None]", "out")),
        ),
        WrongVersion(
            "stores the maximum alone, without the log of the sum",
            KernelByName("split_kernel", ("m + tl.log(divisor)", "m")),
        ),
        WrongVersion(
            "divides 0 by 0 in a part that has no keys",
            KernelByName("split_kernel", ("tl.where(total == 0.0, 1.0, total)", "total")),
        ),
        WrongVersion(
            "stores the parts of a head where those of another belong",
            KernelByName(
                "split_kernel", ("row * SPLITS + split", "split * (NUM_KV * GROUP * tl.num_programs(0)) + row")
            ),
        ),
    ),
    drive=_remembering(_run_split),
)

# ------------------------------------------------------------------------------------------------------- merge_kernel


def _run_merge(kernel: Function, part: Tensor, lse: Tensor) -> Tensor:
    """Launch one program per row."""
    part, lse = part.to(DEVICE), lse.to(DEVICE)
    out = torch.full((part.shape[0], part.shape[2]), torch.nan, device=DEVICE)
    launch(kernel, (len(part),), part, lse, out, DIM=part.shape[2], SPLITS=part.shape[1])
    return out.cpu()


def _merge_kernel_cases() -> list[Case]:
    part = torch.tensor([[[1.0, 0.0], [0.0, 8.0]]])
    four = torch.arange(16.0).view(2, 4, 2)
    return [
        Case("two parts that weigh the same", (part, torch.tensor([[1.0, 1.0]]))),
        Case("one part weighs three times the other", (part, torch.tensor([[2.0 + np.log(3.0).item(), 2.0]]))),
        Case("a part without keys", (part * torch.tensor([1.0, 0.0])[:, None], torch.tensor([[0.5, -torch.inf]]))),
        Case("scores of several hundred", (part, torch.tensor([[401.0, 400.0]]))),
        Case("two rows of four parts", (four, torch.tensor([[0.0, 1.0, 2.0, 0.5], [3.0, -1.0, 0.0, 2.5]]))),
    ]


_MERGE_KERNEL = Exercise(
    name="l09.merge_kernel",
    reference=KernelByName("merge_kernel"),
    cases=_merge_kernel_cases,
    hints=(
        "A part whose scores were larger has more of the whole softmax. Its lse says exactly how much.",
        "exp(lse) is the part's own sum of exp(score). The weights are those sums divided by their sum: a softmax over "
        "the parts. Subtract the largest lse first.",
        "weight = tl.exp(lse - tl.max(lse, 0)); out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0).",
    ),
    wrong=(
        WrongVersion(
            "averages the parts, as if each held as much of the softmax as any other",
            KernelByName("merge_kernel", ("tl.exp(lse - tl.max(lse, 0))", "tl.where(lse == lse, 1.0, 0.0)")),
        ),
        WrongVersion(
            "takes exp(lse) without subtracting the largest first",
            KernelByName("merge_kernel", (" - tl.max(lse, 0)", "")),
        ),
        WrongVersion(
            "does not divide by the sum of the weights", KernelByName("merge_kernel", (" / tl.sum(weight, 0)", ""))
        ),
        WrongVersion(
            "weights by lse itself instead of exp(lse)",
            KernelByName("merge_kernel", ("tl.exp(lse - tl.max(lse, 0))", "lse")),
        ),
        WrongVersion(
            "reads the parts of the first row in every program",
            KernelByName("merge_kernel", ("part_ptr + (row * SPLITS + split)", "part_ptr + split")),
        ),
    ),
    drive=_remembering(_run_merge),
)

# -------------------------------------------------------------------------------------------------------- int8_kernel


def _run_int8(
    kernel: Function,
    q: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    block_size: int,
) -> Tensor:
    """Launch on a grid of requests by KV heads; what the kernel does not write stays NaN."""
    pools = [x.to(DEVICE) for x in (key_codes, key_scales, value_codes, value_scales)]
    q, tables = q.to(DEVICE), block_tables.to(DEVICE)
    out = torch.full_like(q, torch.nan)
    num_kv = key_codes.shape[1]
    args = (q, *pools, tables, torch.tensor(seq_lens, device=DEVICE), out, tables.stride(0), q.shape[2] ** -0.5)
    launch(kernel, (len(q), num_kv), *args, **_sizes(q, num_kv, block_size))
    return out.cpu()


def _int8_case(label: str, seed: int, seq_lens: list[int], tables: list[list[int]], heads: int, num_kv: int) -> Case:
    """Scales of unused slots are NaN; rows differ in size, so that the scale of another row is wrong."""
    q, keys, values, padded, _, block_size = _poisoned(seed, seq_lens, tables, heads, num_kv)
    sizes = 1 + torch.arange(keys.shape[0] * num_kv).view(-1, num_kv, 1) % 5
    k, v = (quantize_symmetric(x * sizes, INT8_LEVELS) for x in (keys, values))
    return Case(label, (q, *k, *v, padded, seq_lens, block_size))


_K_SCALED, _V_SCALED = " * k_scale[None, :]", " * v_scale[:, None]"

_INT8 = Exercise(
    name="l09.int8_kernel",
    reference=KernelByName("int8_kernel"),
    cases=lambda: [
        _int8_case("one request, one full block", 1, [4], [[1]], 1, 1),
        _int8_case("the last block holds two of four", 2, [6], [[2, 0]], 1, 1),
        _int8_case("two requests, two KV heads", 3, [3, 6], [[4], [2, 0]], 2, 2),
    ],
    hints=(
        "Start from your decode_kernel. A code times its scale is a number; the rest does not change.",
        "The scale of a row lies at slot · NUM_KV + kv_head: the same number as in `at`, without · DIM + channel. Load "
        "BLOCK_SIZE of them for the keys and as many for the values, masked like the rows.",
        "All channels of a key share one factor, so multiply the score by it: score = tl.sum(…, 2) * k_scale[None, :]. "
        "The values: v = codes.to(tl.float32) * v_scale[:, None].",
    ),
    wrong=(
        WrongVersion("forgets the scales of the keys", KernelByName("int8_kernel", (_K_SCALED, ""))),
        WrongVersion("forgets the scales of the values", KernelByName("int8_kernel", (_V_SCALED, ""))),
        WrongVersion(
            "takes the scales by position in the text instead of by slot",
            KernelByName(
                "int8_kernel",
                ("k_scale_ptr + row", "k_scale_ptr + (first + place) * NUM_KV + kv_head"),
                ("v_scale_ptr + row", "v_scale_ptr + (first + place) * NUM_KV + kv_head"),
            ),
        ),
        WrongVersion(
            "takes the scale of KV head 0 for every head",
            KernelByName("int8_kernel", ("_scale_ptr + row,", "_scale_ptr + row - kv_head,")),
        ),
        WrongVersion(
            "takes one scale for the whole block",
            KernelByName("int8_kernel", ("_scale_ptr + row,", "_scale_ptr + row - place * NUM_KV,")),
        ),
        WrongVersion(
            "gives weight to rows of the last block that do not exist: a score of 0 is not -inf",
            KernelByName("int8_kernel", _NO_WHERE),
        ),
    ),
    drive=_remembering(_run_int8),
)

EXERCISES = [_MERGE, _DECODE, _SPLIT, _MERGE_KERNEL, _INT8]
