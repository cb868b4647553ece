"""Lesson 08, slips in one place of the right kernel, as edits of its text: {what it does wrong: (right, wrong)}."""

from __future__ import annotations

Edits = dict[str, tuple[str, str]]


def _rows(verb: str, name: str, pointer: str, stride: str) -> Edits:
    """Wrong addresses of a load or store at `pointer + row * stride + column`."""
    begin = f"{pointer} + row * {stride}"
    return {
        f"{verb} the first row of {name} in every program": (begin, pointer),
        f"{verb} the second row of {name} in every program": (begin, f"{pointer} + {stride}"),
        f"{verb} rows of {name} that begin one number after each other": (begin, f"{pointer} + row"),
        f"{verb} the rows of {name} backwards, from before its beginning": (begin, f"{pointer} - row * {stride}"),
        f"{verb} the columns of {name} backwards, from before the row": (f"{begin} + column", f"{begin} - column"),
    }


LANES: Edits = {
    "returns the lanes first and the programs second": (
        "programs, programs * block - rows * columns",
        "programs * block - rows * columns, programs",
    ),
    "takes one program for each row": ("rows * -(-columns // block)", "rows"),
    "counts the programs of one row only": ("rows * -(-columns", "-(-columns"),
    "takes one program for each column": ("-(-columns // block)", "columns"),
    "multiplies the columns by the block instead of dividing": ("columns // block", "columns * block"),
    "adds the lanes that work instead of taking them off": ("block - rows", "block + rows"),
    "counts all lanes, and does not take off those that work": (" - rows * columns", ""),
    "takes all lanes off those that work, so that the rest is below 0": (
        "programs * block - rows * columns",
        "rows * columns - programs * block",
    ),
    "takes the programs for their lanes: each has block lanes": ("programs * block -", "programs -"),
    "counts the lanes of one program": ("programs * block -", "block -"),
    "takes off one working lane for each row": ("- rows * columns", "- rows"),
    "takes off the working lanes of one row": ("- rows * columns", "- columns"),
}

MASKS: Edits = {
    "lets one lane too many in (<= instead of <)": ("column < columns", "column <= columns"),
    "switches off the lanes that have a column, and lets the others work": ("column < columns", "column >= columns"),
}

COPY: Edits = {
    "switches off the lanes that have a column, and lets the others work": ("column < columns", "column >= columns"),
    "counts the lanes backwards": ("+ tl.arange", "- tl.arange"),
    "begins each program one column after the one before; it must be BLOCK columns": (
        "tl.program_id(1) * BLOCK",
        "tl.program_id(1)",
    ),
    "does the second block in every program": ("tl.program_id(1) * BLOCK", "BLOCK"),
    "takes the program's row for its block: program_id(0) stands in both places": ("program_id(1)", "program_id(0)"),
    "takes the program's block for its row: program_id(1) stands in both places": ("program_id(0)", "program_id(1)"),
    "has no mask in the store, so that the last block runs over the end of out": (
        "column, x, mask=inside",
        "column, x",
    ),
    "stores nothing, or stores it into x": ("tl.store(out_ptr", "tl.store(x_ptr"),
    **_rows("loads", "x", "x_ptr", "x_stride"),
    **_rows("stores into", "out", "out_ptr", "out_stride"),
}

SOFTMAX: Edits = {
    **MASKS,
    "takes program_id(1) for the row, which is 0 in all programs": ("program_id(0)", "program_id(1)"),
    "loads +inf for masked lanes; they must be -inf": ('-float("inf")', 'float("inf")'),
    "loads -100 for masked lanes, which is more than low scores; they must be -inf": ('float("inf")', "100.0"),
    "forgets the exponential": ("tl.exp(x - tl.max(x, 0))", "x - tl.max(x, 0)"),
    "subtracts the scores from the maximum; it must be the other way round": ("x - tl.max(x, 0)", "tl.max(x, 0) - x"),
    "takes every score off itself: the maximum is missing": ("x - tl.max(x, 0)", "x - x"),
    "takes the smallest score off instead of the largest": ("tl.max(", "tl.min("),
    "multiplies by the sum instead of dividing": ("e / tl.sum", "e * tl.sum"),
    "divides the sum by the exponentials: the quotient is upside down": ("e / tl.sum(e, 0)", "tl.sum(e, 0) / e"),
    "stores into x instead of out": ("tl.store(out_ptr", "tl.store(x_ptr"),
    **_rows("loads", "x", "x_ptr", "columns"),
    **_rows("stores into", "out", "out_ptr", "columns"),
}
del SOFTMAX["loads the first row of x in every program"]  # planted as a kernel

RMS_NORM: Edits = {
    **MASKS,
    "takes program_id(1) for the row, which is 0 in all programs": ("program_id(0)", "program_id(1)"),
    "loads 1 for masked lanes of x, which counts in the sum of squares": (
        "columns + column, mask=inside, other=0.0",
        "columns + column, mask=inside, other=1.0",
    ),
    "loads the weight in the place of x": ("x_ptr + row", "weight_ptr + row"),
    "loads x in the place of the weight": ("tl.load(weight_ptr", "tl.load(x_ptr"),
    "loads the weight backwards, from before its beginning": ("weight_ptr + column", "weight_ptr - column"),
    "multiplies the sum of squares by the number of columns instead of dividing": (") / columns", ") * columns"),
    "divides the number of columns by the sum of squares: the mean is upside down": (
        "tl.sum(x * x, 0) / columns",
        "columns / tl.sum(x * x, 0)",
    ),
    "takes the mean of x, without squaring": ("tl.sum(x * x", "tl.sum(x"),
    "divides by the weight instead of multiplying": ("* weight", "/ weight"),
    "stores the weight alone": ("x / tl.sqrt(mean + eps) * weight", "weight"),
    "multiplies by the root instead of dividing": ("x / tl.sqrt", "x * tl.sqrt"),
    "does not divide by the root": ("x / tl.sqrt(mean + eps)", "x"),
    "divides the root by x: the quotient is upside down": ("x / tl.sqrt(mean + eps)", "tl.sqrt(mean + eps) / x"),
    "takes eps off the mean instead of adding it": ("mean + eps", "mean - eps"),
    "takes the root of eps alone, without the mean": ("mean + eps", "eps"),
    "has no mask in the store, so that it runs over the end of the row": ("weight, mask=inside", "weight"),
    "stores into x instead of out": ("tl.store(out_ptr", "tl.store(x_ptr"),
    **_rows("loads", "x", "x_ptr", "columns"),
    **_rows("stores into", "out", "out_ptr", "columns"),
}

DEQUANTISE: Edits = {
    **MASKS,
    "switches off the rows that are there, and lets the others work": ("(row < rows)[", "(row >= rows)["),
    "lets one row too many in (<= instead of <)": ("(row < rows)[", "(row <= rows)["),
    "lets lanes work that are outside: | instead of &, or no mask in the store": (")[:, None] & (", ")[:, None] | ("),
    "counts the rows of a tile backwards": ("ROWS + tl.arange", "ROWS - tl.arange"),
    "begins each program one row after the one before; it must be ROWS rows": (
        "tl.program_id(0) * ROWS",
        "tl.program_id(0)",
    ),
    "does the second tile in every program": ("tl.program_id(0) * ROWS", "ROWS"),
    "goes backwards through the columns of a row": ("+ column[None, :]", "- column[None, :]"),
    "lets rows begin one number after each other: a row is columns numbers long": (
        "row[:, None] * columns",
        "row[:, None]",
    ),
    "does the second row for all rows": ("row[:, None] * columns", "columns"),
    "reads the codes backwards, from before their beginning": ("codes_ptr + place", "codes_ptr - place"),
    "reads the scales backwards, from before their beginning": ("scale_ptr + row", "scale_ptr - row"),
    "reads codes in the place of the scales": ("tl.load(scale_ptr", "tl.load(codes_ptr"),
    "reads scales in the place of the codes": ("tl.load(codes_ptr", "tl.load(scale_ptr"),
    "loads the scales of rows that are not there, and 0 for those that are": ("mask=row < rows", "mask=row >= rows"),
    "stores the codes without their scale": (" * scale.to(tl.float32)[:, None]", ""),
    "stores the scales without the codes": ("codes.to(tl.float32) * scale", "0 * codes + scale"),
    "stores backwards, from before the beginning of out": ("out_ptr + place", "out_ptr - place"),
}
