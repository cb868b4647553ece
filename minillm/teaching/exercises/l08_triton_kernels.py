"""Lesson 08, Triton, first kernels: lanes and masks, a copy with strides, softmax, RMSNorm, INT8 dequantisation."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minillm.teaching.drives.l08 import run_copy, run_dequantise, run_rms_norm, run_softmax
from minillm.teaching.drives.lazy_kernel import LazyKernel, wrong_kernel, wrong_kernels
from minillm.teaching.exercise import Attempt, Case, Exercise, WrongVersion
from minillm.teaching.exercises import _l08_slips
from minillm.teaching.exercises._facts import about_tensor
from minillm.teaching.source import wrong_versions

_planted = partial(wrong_kernel, "l08")


def loads_without_mask(attempt: Attempt) -> str | None:
    """A message if the only mistake is a load without a mask; else None."""
    loads = attempt.got["blocks loaded without a mask"]
    rest = [key for key in attempt.got if key not in ("out", "blocks loaded without a mask")]
    if not loads or any(attempt.got[key] != attempt.expected[key] for key in rest):
        return None
    if not torch.allclose(attempt.got["out"], attempt.expected["out"], 1e-4, 1e-5, equal_nan=True):
        return None
    return f"{loads[0]} has no mask: if a lane of it leaves the tensor, a GPU may stop with an error; use mask="


def about_rows(attempt: Attempt) -> str | None:
    """What the kernel wrote outside of its result, or else which rows or columns are wrong."""
    for name in ("numbers written outside of out", "input numbers overwritten"):
        if count := attempt.got[name]:
            counted = name if count > 1 else name.replace("numbers", "number")
            return f"{count} {counted}: look at the address and the mask of the store"
    if attempt.got["numbers of the last program written by others"]:
        return "without the last program, its elements are written all the same: a program writes its own block only"
    return about_tensor(attempt.expected["out"], attempt.got["out"], ("row", "column"), "out")


def about_lanes(attempt: Attempt) -> str | None:
    """Which of the two numbers is wrong."""
    (programs, idle), (got_programs, got_idle) = attempt.expected, attempt.got
    if got_programs == programs:
        return "the number of programs is right, the number of masked lanes is wrong"
    return f"{'too many' if got_programs > programs else 'too few'} programs" + (
        "" if got_idle != idle else " (the number of masked lanes is right)"
    )


# --------------------------------------------------------------------------------------------------------------- lanes


def lanes(rows: int, columns: int, block: int) -> tuple[int, int]:
    """Return (programs, masked lanes) when each program handles `block` columns of one row."""
    programs = rows * -(-columns // block)
    return programs, programs * block - rows * columns


def _rounds_down(rows: int, columns: int, block: int) -> tuple[int, int]:
    programs = rows * (columns // block)
    return programs, max(0, programs * block - rows * columns)


def _one_more(rows: int, columns: int, block: int) -> tuple[int, int]:
    programs = rows * (columns // block + 1)
    return programs, programs * block - rows * columns


def _flat(rows: int, columns: int, block: int) -> tuple[int, int]:
    programs = -(-rows * columns // block)
    return programs, programs * block - rows * columns


def _one_row_of_lanes(rows: int, columns: int, block: int) -> tuple[int, int]:
    return rows * -(-columns // block), -columns % block


def _busy_lanes(rows: int, columns: int, block: int) -> tuple[int, int]:
    return rows * -(-columns // block), rows * columns


_LANES = Exercise(
    name="l08.lanes",
    reference=lanes,
    cases=[
        Case("one row, one block", (1, 8, 8)),
        Case("one row, two blocks and a remainder", (1, 21, 8)),
        Case("five rows of thirteen", (5, 13, 8)),
        Case("a row narrower than its block", (3, 5, 64)),
        Case("rows of 384 in blocks of 512", (4, 384, 512)),
    ],
    hints=(
        "How many blocks does one row need? A block that is not full counts too.",
        "Blocks per row: columns / block, rounded up. Each row has that many programs, with `block` lanes each. "
        "Of all lanes, rows · columns have an element to work on; the others are masked.",
        "programs = rows * …  # -(-a // b) is a / b, rounded up\nreturn programs, programs * block - …",
        "programs = rows * -(-columns // block)\nreturn programs, programs * block - rows * columns",
    ),
    wrong=(
        WrongVersion("rounds down, so that no program handles the last columns", _rounds_down),
        WrongVersion("always adds a block, even where columns divide evenly", _one_more),
        WrongVersion("lets a block continue in the next row", _flat),
        WrongVersion("counts the masked lanes of one row only", _one_row_of_lanes),
        WrongVersion("counts the lanes that are on, not those that are masked", _busy_lanes),
        *wrong_versions(lanes, _l08_slips.LANES),
    ),
    fallback_diagnosis=about_lanes,
    parts=("programs", "lanes"),
)

# ---------------------------------------------------------------------------------------------------------------- copy


def _grid_of(rows: int, columns: int) -> Tensor:
    """A tensor whose elements encode their position: row 2, column 3 holds 2.3."""
    return torch.arange(rows)[:, None] + torch.arange(columns)[None, :] / 10


_COPY = Exercise(
    name="l08.copy_kernel",
    reference=LazyKernel("l08", "copy_kernel"),
    cases=lambda: [
        Case("one row of two whole blocks", (_grid_of(1, 8), 8, 8, 4)),
        Case("the last block is not full", (_grid_of(1, 6), 6, 6, 4)),
        Case("three rows", (_grid_of(3, 4), 4, 4, 4)),
        Case("rows of a wider tensor: 5 columns, stride 7", (_grid_of(2, 5), 7, 5, 4)),
        Case("rows of a wider result: 5 columns, stride 9", (_grid_of(2, 5), 5, 9, 4)),
        Case("every tensor ends where its memory ends", (_grid_of(3, 6), 6, 6, 4, True)),
        Case("the same with gaps between the rows: 6 columns, strides 8 and 9", (_grid_of(3, 6), 8, 9, 4, True)),
    ],
    run_case=run_copy,
    hints=(
        "Which row does this program handle, and which columns of it? Then: at which address do they begin, in x and "
        "in out?",
        "row = tl.program_id(0); column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK). A row begins at "
        "row * stride, and each of the two tensors has its own stride. Pass mask=column < columns to tl.load and to "
        "tl.store, so that lanes past the end are off.",
        "The shape of it:\n"
        "row = tl.program_id(0)\n"
        "column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)\n"
        "inside = …\n"
        "x = tl.load(x_ptr + …, mask=inside)\n"
        "tl.store(out_ptr + …, x, mask=inside)",
        "The whole of it:\n"
        "row = tl.program_id(0)\n"
        "column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)\n"
        "inside = column < columns\n"
        "x = tl.load(x_ptr + row * x_stride + column, mask=inside)\n"
        "tl.store(out_ptr + row * out_stride + column, x, mask=inside)",
    ),
    wrong=(
        _planted(
            "copy_kernel", "has no mask, so that the last block of a row goes past its end", (", mask=inside", "")
        ),
        _planted(
            "copy_kernel",
            "loads without a mask",
            ("x_stride + column, mask=inside", "x_stride + column"),
            expected_message="use mask=",
        ),
        _planted(
            "copy_kernel",
            "loads past the end of x: the mask of its load is missing, or has <= instead of <",
            ("x_stride + column, mask=inside", "x_stride + column, mask=column <= columns"),
        ),
        _planted(
            "copy_kernel",
            "swaps the strides of x and out",
            ("x_ptr + row * x_stride", "x_ptr + row * out_stride"),
            ("out_ptr + row * out_stride", "out_ptr + row * x_stride"),
        ),
        _planted(
            "copy_kernel",
            "copies whole blocks only and leaves out the remainder",
            ("column < columns", "column < columns // BLOCK * BLOCK"),
        ),
        _planted(
            "copy_kernel",
            "copies the first block in every program: program_id(1) is missing",
            ("tl.program_id(1) * BLOCK + ", ""),
        ),
        _planted(
            "copy_kernel",
            "uses the number of columns instead of the strides",
            ("row * x_stride", "row * columns"),
            ("row * out_stride", "row * columns"),
        ),
        _planted("copy_kernel", "uses the stride of x for out as well", ("row * out_stride", "row * x_stride")),
        _planted(
            "copy_kernel",
            "swaps the two program ids",
            ("row = tl.program_id(0)", "row = tl.program_id(1)"),
            ("column = tl.program_id(1)", "column = tl.program_id(0)"),
        ),
        *wrong_kernels("l08", "copy_kernel", _l08_slips.COPY),
    ),
    diagnose=loads_without_mask,
    fallback_diagnosis=about_rows,
)

# ------------------------------------------------------------------------------------------------------------- softmax


_SOFTMAX = Exercise(
    name="l08.softmax_kernel",
    reference=LazyKernel("l08", "softmax_kernel"),
    cases=lambda: [
        Case("one row that fills its block", (torch.tensor([[0.0, 1.0, 2.0, -1.0]]), 4)),
        Case("three columns in a block of four", (torch.tensor([[1.0, 2.0, 3.0]]), 4)),
        Case("three rows of five columns", (_grid_of(3, 5) * torch.tensor([1.0, -2.0, 3.0, 1.0, -1.0]), 8)),
        Case("large scores: e^1000 is infinite", (torch.tensor([[1000.0, 999.0, 998.0]]), 4)),
        Case("large scores in a block that is full", (torch.tensor([[0.0, 1000.0, 999.0, 998.0]]), 4)),
        Case("scores near -1000: e^-1000 is zero", (torch.tensor([[-1000.0, -1001.0, -1000.5]]), 4)),
        Case("a key with the score -inf", (torch.tensor([[0.5, -float("inf"), 1.5]]), 4)),
        Case("every tensor ends where its memory ends", (_grid_of(2, 5), 8, True)),
    ],
    run_case=run_softmax,
    hints=(
        "The sum and the maximum run over all lanes of the block, the masked ones too. Which value in a masked lane "
        "changes neither?",
        "Load with other=-float('inf'): it is never the maximum, and its exponential is 0. Subtract the maximum "
        "before the exponential (tl.exp); the quotient stays the same and nothing overflows.",
        "The shape of it:\n"
        "row, column = tl.program_id(0), tl.arange(0, BLOCK)\n"
        "inside = column < columns\n"
        "x = tl.load(x_ptr + row * columns + column, mask=inside, other=…)\n"
        "e = tl.exp(…)\n"
        "tl.store(out_ptr + row * columns + column, e / …, mask=inside)",
        "The whole of it:\n"
        "row, column = tl.program_id(0), tl.arange(0, BLOCK)\n"
        "inside = column < columns\n"
        "x = tl.load(x_ptr + row * columns + column, mask=inside, other=-float('inf'))\n"
        "e = tl.exp(x - tl.max(x, 0))\n"
        "tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)",
    ),
    wrong=(
        _planted(
            "softmax_kernel", "does not subtract the maximum, so that large scores overflow", (" - tl.max(x, 0)", "")
        ),
        _planted(
            "softmax_kernel", "counts masked lanes in the sum: they must hold -inf, not 0", ('-float("inf")', "0.0")
        ),
        _planted(
            "softmax_kernel",
            "counts masked lanes in the maximum: they must hold -inf, not 0",
            ('-float("inf")', "0.0"),
            ("tl.exp(x - tl.max(x, 0))", "tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)"),
        ),
        _planted("softmax_kernel", "has no mask at all", (', other=-float("inf")', ""), (", mask=inside", "")),
        _planted(
            "softmax_kernel", "stores without a mask, into the next row", ("tl.sum(e, 0), mask=inside", "tl.sum(e, 0)")
        ),
        _planted(
            "softmax_kernel", "uses BLOCK as the distance between rows; it is columns", ("row * columns", "row * BLOCK")
        ),
        _planted("softmax_kernel", "computes powers of 2 instead of e", ("tl.exp(", "tl.exp2(")),
        _planted(
            "softmax_kernel", "does not divide by the sum (or by the maximum, which is 1)", ("e / tl.sum(e, 0)", "e")
        ),
        *wrong_kernels("l08", "softmax_kernel", _l08_slips.SOFTMAX),
    ),
    diagnose=loads_without_mask,
    fallback_diagnosis=about_rows,
)

# ------------------------------------------------------------------------------------------------------------- RMSNorm


def _rms_cases() -> list[Case]:
    ones = torch.ones(5)
    half = torch.tensor([[300.0, -280.0, 310.0, 290.0, 1.0]], dtype=torch.float16)
    return [
        Case("one row that fills its block", (torch.tensor([[1.0, -2.0, 3.0, 0.5]]), torch.ones(4), 1e-5, 4)),
        Case("five columns in a block of eight", (torch.tensor([[1.0, -2.0, 3.0, 0.5, 1.5]]), ones, 1e-5, 8)),
        Case("a weight per column, two rows", (_grid_of(2, 3) + 1, torch.tensor([1.0, 0.5, -2.0]), 1e-5, 4)),
        Case("a row so small that eps counts", (1e-3 * torch.tensor([[1.0, -2.0, 1.0, 3.0, 2.0]]), ones, 1e-5, 8)),
        Case("float16 numbers whose squares do not fit: 300² > 65504", (half, ones.half(), 1e-5, 8)),
        Case("every tensor ends where its memory ends", (_grid_of(2, 5) + 1, ones, 1e-5, 8, True)),
    ]


_RMS_NORM = Exercise(
    name="l08.rms_norm_kernel",
    reference=LazyKernel("l08", "rms_norm_kernel"),
    cases=_rms_cases,
    run_case=run_rms_norm,
    hints=(
        "Load the row and cast it to float32 before you square it. Which value in a masked lane does not change a sum "
        "of squares, and over how many elements is the mean?",
        "x = tl.load(…, mask=inside, other=0.0).to(tl.float32); the mean is tl.sum(x * x, 0) / columns, never / BLOCK; "
        "add eps to the mean, under the square root (tl.sqrt). The weight is one row, the same for all programs.",
        "The shape of it:\n"
        "row, column = tl.program_id(0), tl.arange(0, BLOCK)\n"
        "inside = column < columns\n"
        "x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)\n"
        "weight = tl.load(…, mask=inside, other=0.0).to(tl.float32)\n"
        "mean = tl.sum(…, 0) / …\n"
        "tl.store(out_ptr + row * columns + column, …, mask=inside)",
        "The whole of it:\n"
        "row, column = tl.program_id(0), tl.arange(0, BLOCK)\n"
        "inside = column < columns\n"
        "x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)\n"
        "weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)\n"
        "mean = tl.sum(x * x, 0) / columns\n"
        "tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)",
    ),
    wrong=(
        _planted(
            "rms_norm_kernel", "divides the sum by BLOCK instead of the number of columns", ("/ columns", "/ BLOCK")
        ),
        _planted("rms_norm_kernel", "forgets eps", ("mean + eps", "mean")),
        _planted(
            "rms_norm_kernel",
            "adds eps to every square, also in masked lanes; it must be added to the mean",
            ("x * x", "x * x + eps"),
            ("mean + eps", "mean"),
        ),
        _planted(
            "rms_norm_kernel",
            "adds eps after the square root and not under it",
            ("tl.sqrt(mean + eps)", "(tl.sqrt(mean) + eps)"),
        ),
        _planted("rms_norm_kernel", "forgets the square root", ("tl.sqrt(mean + eps)", "(mean + eps)")),
        _planted("rms_norm_kernel", "uses the sum of the squares instead of their mean", (" / columns", "")),
        _planted("rms_norm_kernel", "forgets the weight", (" * weight", "")),
        _planted(
            "rms_norm_kernel",
            "reads other weights for every row; all rows share one row of weights",
            ("weight_ptr + column", "weight_ptr + row * columns + column"),
        ),
        _planted(
            "rms_norm_kernel",
            "squares in float16, where 300² is infinite",
            (".to(tl.float32)", ""),
            ("x * x", "(x * x).to(tl.float32)"),
        ),
        _planted(
            "rms_norm_kernel",
            "loads without a mask, so that memory after the row counts in the sum",
            (", mask=inside, other=0.0", ""),
        ),
        _planted(
            "rms_norm_kernel",
            "subtracts the mean first, as LayerNorm does",
            ("mean = ", "x = tl.where(inside, x - tl.sum(x, 0) / columns, 0.0)\n    mean = "),
        ),
        _planted(
            "rms_norm_kernel",
            "loads x with a mask and without other, so that undefined lanes count in the sum",
            ("columns + column, mask=inside, other=0.0", "columns + column, mask=inside"),
            expected_message="the result depends on masked lanes of",
        ),
        *wrong_kernels("l08", "rms_norm_kernel", _l08_slips.RMS_NORM),
    ),
    diagnose=loads_without_mask,
    fallback_diagnosis=about_rows,
)

# ---------------------------------------------------------------------------------------------------------- dequantise


def _dequantise_cases() -> list[Case]:
    codes = torch.tensor([[1, -2, 3, 4], [10, 20, -30, 40], [5, 0, 0, 7], [-1, 1, -1, 1], [9, 8, -7, 6]])
    codes = codes.to(torch.int8)
    scale = torch.tensor([0.5, 0.25, 2.0, 4.0, 0.125])
    six = torch.tensor([[1, 2, 3, 4, 5, 6], [-1, -2, -3, -4, -5, -6]], dtype=torch.int8)
    return [
        Case("one row", (codes[:1], scale[:1], 1, 4)),
        Case("two rows, each with its own scale", (codes[:2], scale[:2], 2, 4)),
        Case("five rows in tiles of four", (codes, scale, 4, 4)),
        Case("five rows in tiles of two", (codes, scale, 2, 4)),
        Case("six columns in a block of eight", (six, scale[:2], 2, 8)),
        Case("three columns in a block of four, in tiles of two rows", (codes[:, :3], scale, 2, 4)),
        Case("large codes and a scale of 2", (torch.tensor([[127, -127, 100]]).to(torch.int8), scale[2:3], 1, 4)),
        Case(
            "scales in bfloat16: 101 · 0.3 has more digits than bfloat16 can hold",
            (
                torch.tensor([[101, -57, 3], [11, 97, -119]], dtype=torch.int8),
                torch.tensor([0.3, 0.7]).bfloat16(),
                2,
                4,
            ),
        ),
        Case("every tensor ends where its memory ends", (codes[:3, :3], scale[:3], 2, 4, True)),
    ]


_DEQUANTISE = Exercise(
    name="l08.dequantise_kernel",
    reference=LazyKernel("l08", "dequantise_kernel"),
    cases=_dequantise_cases,
    run_case=run_dequantise,
    hints=(
        "A program handles a tile. Its row indices are row[:, None], its column indices column[None, :]; broadcast, "
        "each pair of them is one element. Which of the two does a scale depend on?",
        "row = tl.program_id(0) * ROWS + tl.arange(0, ROWS); place = row[:, None] * columns + column[None, :]; mask: "
        "(row < rows)[:, None] & (column < columns)[None, :]. Scales are loaded at scale_ptr + row, with a mask too.",
        "The shape of it:\n"
        "row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n"
        "column = tl.arange(0, BLOCK)\n"
        "inside = (row < rows)[:, None] & (column < columns)[None, :]\n"
        "place = row[:, None] * columns + column[None, :]\n"
        "codes = tl.load(codes_ptr + place, mask=inside, other=0)\n"
        "scale = tl.load(…, mask=…, other=0.0)\n"
        "tl.store(out_ptr + place, …, mask=inside)",
        "The whole of it:\n"
        "row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n"
        "column = tl.arange(0, BLOCK)\n"
        "inside = (row < rows)[:, None] & (column < columns)[None, :]\n"
        "place = row[:, None] * columns + column[None, :]\n"
        "codes = tl.load(codes_ptr + place, mask=inside, other=0)\n"
        "scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)\n"
        "tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)",
    ),
    wrong=(
        _planted(
            "dequantise_kernel",
            "uses one scale for the whole tensor",
            ("scale_ptr + row, mask=row < rows, other=0.0", "scale_ptr"),
            ("scale.to(tl.float32)[:, None]", "scale.to(tl.float32)"),
        ),
        _planted(
            "dequantise_kernel",
            "uses one scale for all rows of a tile",
            ("scale_ptr + row, mask=row < rows, other=0.0", "scale_ptr + tl.program_id(0) * ROWS"),
            ("scale.to(tl.float32)[:, None]", "scale.to(tl.float32)"),
        ),
        _planted(
            "dequantise_kernel",
            "indexes the scales by program and not by row",
            ("scale_ptr + row, mask=row < rows, other=0.0", "scale_ptr + tl.program_id(0)"),
            ("scale.to(tl.float32)[:, None]", "scale.to(tl.float32)"),
        ),
        _planted(
            "dequantise_kernel",
            "divides by the scale",
            ("codes.to(tl.float32) * scale", "codes.to(tl.float32) / scale"),
        ),
        _planted(
            "dequantise_kernel",
            "uses a scale per column and not per row",
            ("scale_ptr + row, mask=row < rows", "scale_ptr + column, mask=column < rows"),
            ("scale.to(tl.float32)[:, None]", "scale.to(tl.float32)[None, :]"),
        ),
        _planted(
            "dequantise_kernel",
            "multiplies as int8, where 100 · 2 is -56",
            (
                "codes.to(tl.float32) * scale.to(tl.float32)[:, None]",
                "(codes * scale.to(tl.int8)[:, None]).to(tl.float32)",
            ),
        ),
        _planted(
            "dequantise_kernel",
            "reads the codes as unsigned, so -1 becomes 255",
            ("other=0)", "other=0).to(tl.int32) & 255"),
        ),
        _planted("dequantise_kernel", "masks columns and not rows", ("row < rows", "row >= 0")),
        _planted("dequantise_kernel", "masks rows and not columns", ("column < columns", "column >= 0")),
        _planted("dequantise_kernel", "handles the first tile in every program", ("tl.program_id(0) * ROWS + ", "")),
        _planted(
            "dequantise_kernel",
            "loads scales without a mask",
            ("scale_ptr + row, mask=row < rows, other=0.0", "scale_ptr + row"),
            expected_message="use mask=",
        ),
        *wrong_kernels("l08", "dequantise_kernel", _l08_slips.DEQUANTISE),
    ),
    diagnose=loads_without_mask,
    fallback_diagnosis=about_rows,
)

EXERCISES = [_LANES, _COPY, _SOFTMAX, _RMS_NORM, _DEQUANTISE]
