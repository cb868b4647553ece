"""Lesson 08: mistakes in one place of a right answer, as edits of its source: {what it does wrong: (right, wrong)}."""

from __future__ import annotations

from minillm.teaching.source import Edits


def _rows(verb: str, name: str, pointer: str, stride: str) -> Edits:
    """Mistakes in the address `pointer + row * stride + column` of a load or store."""
    begin = f"{pointer} + row * {stride}"
    return {
        f"{verb} the first row of {name} in every program": (begin, pointer),
        f"{verb} the second row of {name} in every program": (begin, f"{pointer} + {stride}"),
        f"{verb} rows of {name} that begin one element apart": (begin, f"{pointer} + row"),
        f"{verb} the rows of {name} backwards, from addresses before its first element": (
            begin,
            f"{pointer} - row * {stride}",
        ),
        f"{verb} the columns of {name} backwards, from addresses before the row": (
            f"{begin} + column",
            f"{begin} - column",
        ),
    }


LANES: Edits = {
    "returns the lanes first and the programs second": (
        "programs, programs * block - rows * columns",
        "programs * block - rows * columns, programs",
    ),
    "counts one program for each row": ("rows * -(-columns // block)", "rows"),
    "counts the programs of one row only": ("rows * -(-columns", "-(-columns"),
    "counts one program for each column": ("-(-columns // block)", "columns"),
    "multiplies the columns by the block instead of dividing": ("columns // block", "columns * block"),
    "adds the lanes that are on instead of subtracting them": ("block - rows", "block + rows"),
    "counts all lanes, and does not subtract those that are on": (" - rows * columns", ""),
    "subtracts all lanes from those that are on, so that the result is negative": (
        "programs * block - rows * columns",
        "rows * columns - programs * block",
    ),
    "uses the number of programs as the number of lanes: each program has block lanes": (
        "programs * block -",
        "programs -",
    ),
    "counts the lanes of one program": ("programs * block -", "block -"),
    "subtracts one lane for each row": ("- rows * columns", "- rows"),
    "subtracts the lanes of one row only": ("- rows * columns", "- columns"),
}

MASKS: Edits = {
    "leaves one lane too many on (<= instead of <)": ("column < columns", "column <= columns"),
    "masks the lanes that have a column, and leaves the others on": ("column < columns", "column >= columns"),
}

COPY: Edits = {
    **MASKS,
    "counts the lanes backwards": ("+ tl.arange", "- tl.arange"),
    "copies the whole row in every program; each must copy its own block only": (
        "tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
        "tl.arange(0, 2 * BLOCK)",
    ),
    "masks the load with the stride of x instead of the number of columns": (
        "x_stride + column, mask=inside",
        "x_stride + column, mask=column < x_stride",
    ),
    "begins each program one column after the previous one; it must be BLOCK columns": (
        "tl.program_id(1) * BLOCK",
        "tl.program_id(1)",
    ),
    "handles the second block in every program": ("tl.program_id(1) * BLOCK", "BLOCK"),
    "uses the row as the block: program_id(0) stands in both places": ("program_id(1)", "program_id(0)"),
    "uses the block as the row: program_id(1) stands in both places": ("program_id(0)", "program_id(1)"),
    "has no mask in the store, so that the last block goes past the end of out": (
        "column, x, mask=inside",
        "column, x",
    ),
    "stores nothing, or stores it into x": ("tl.store(out_ptr", "tl.store(x_ptr"),
    **_rows("loads", "x", "x_ptr", "x_stride"),
    **_rows("stores into", "out", "out_ptr", "out_stride"),
}

SOFTMAX: Edits = {
    **MASKS,
    "handles the first row only: its address has no row (program_id(1) is 0 in all programs), or its mask compares the "
    "place in the tensor, not the column, with columns": ("program_id(0)", "program_id(1)"),
    "loads +inf for masked lanes; they must be -inf": ('-float("inf")', 'float("inf")'),
    "loads -100 for masked lanes, which is more than low scores; they must be -inf": ('float("inf")', "100.0"),
    "loads -1000 for masked lanes, which low scores reach; they must be -inf": ('float("inf")', "1000.0"),
    "forgets the exponential": ("tl.exp(x - tl.max(x, 0))", "x - tl.max(x, 0)"),
    "subtracts the scores from the maximum; it must be the other way round": ("x - tl.max(x, 0)", "tl.max(x, 0) - x"),
    "subtracts every score from itself: the maximum is missing": ("x - tl.max(x, 0)", "x - x"),
    "subtracts the first score instead of the largest": ("tl.max(x, 0)", "tl.load(x_ptr + row * columns)"),
    "subtracts the smallest score instead of the largest": ("tl.max(", "tl.min("),
    "multiplies by the sum instead of dividing": ("e / tl.sum", "e * tl.sum"),
    "divides the sum by the exponentials: the quotient is inverted": ("e / tl.sum(e, 0)", "tl.sum(e, 0) / e"),
    "stores into x instead of out": ("tl.store(out_ptr", "tl.store(x_ptr"),
    **_rows("loads", "x", "x_ptr", "columns"),
    **_rows("stores into", "out", "out_ptr", "columns"),
}

RMS_NORM: Edits = {
    **MASKS,
    "handles the first row only: its address has no row (program_id(1) is 0 in all programs), or its mask compares the "
    "place in the tensor, not the column, with columns": ("program_id(0)", "program_id(1)"),
    "loads 1 for masked lanes of x, which counts in the sum of squares": (
        "columns + column, mask=inside, other=0.0",
        "columns + column, mask=inside, other=1.0",
    ),
    "loads the weight instead of x": ("x_ptr + row", "weight_ptr + row"),
    "loads x instead of the weight": ("tl.load(weight_ptr", "tl.load(x_ptr"),
    "loads the weight backwards, from addresses before its first element": (
        "weight_ptr + column",
        "weight_ptr - column",
    ),
    "multiplies the sum of squares by the number of columns instead of dividing": (") / columns", ") * columns"),
    "divides the number of columns by the sum of squares: the mean is inverted": (
        "tl.sum(x * x, 0) / columns",
        "columns / tl.sum(x * x, 0)",
    ),
    "computes the mean of x, without squaring": ("tl.sum(x * x", "tl.sum(x"),
    "divides by the weight instead of multiplying": ("* weight", "/ weight"),
    "stores the weight alone": ("x / tl.sqrt(mean + eps) * weight", "weight"),
    "multiplies by the square root instead of dividing": ("x / tl.sqrt", "x * tl.sqrt"),
    "does not divide by the square root": ("x / tl.sqrt(mean + eps)", "x"),
    "divides the square root by x: the quotient is inverted": ("x / tl.sqrt(mean + eps)", "tl.sqrt(mean + eps) / x"),
    "subtracts eps from the mean instead of adding it": ("mean + eps", "mean - eps"),
    "computes the square root of eps alone, without the mean": ("mean + eps", "eps"),
    "has no mask in the store, so that it writes past the end of the row": ("weight, mask=inside", "weight"),
    "stores into x instead of out": ("tl.store(out_ptr", "tl.store(x_ptr"),
    **_rows("loads", "x", "x_ptr", "columns"),
    **_rows("stores into", "out", "out_ptr", "columns"),
}

DEQUANTISE: Edits = {
    **MASKS,
    "multiplies in the type of the scale: with bfloat16 scales the product must be computed in float32": (
        "codes.to(tl.float32) * scale.to(tl.float32)[:, None]",
        "codes.to(scale.dtype) * scale[:, None]",
    ),
    "multiplies in bfloat16, whatever the type of the scale; it must be float32": (
        "codes.to(tl.float32) * scale.to(tl.float32)[:, None]",
        "codes.to(tl.bfloat16) * scale.to(tl.bfloat16)[:, None]",
    ),
    "masks by place < rows * columns alone, so that lanes beyond the end of a row write into the next row": (
        "(row < rows)[:, None] & (column < columns)[None, :]",
        "row[:, None] * columns + column[None, :] < rows * columns",
    ),
    "masks the rows that exist, and leaves the others on": ("(row < rows)[", "(row >= rows)["),
    "leaves one row too many on (<= instead of <)": ("(row < rows)[", "(row <= rows)["),
    "leaves lanes on that are outside the tensor: | instead of &, or no mask in the store": (
        ")[:, None] & (",
        ")[:, None] | (",
    ),
    "counts the rows of a tile backwards": ("ROWS + tl.arange", "ROWS - tl.arange"),
    "begins each program one row after the previous one; it must be ROWS rows": (
        "tl.program_id(0) * ROWS",
        "tl.program_id(0)",
    ),
    "handles the second tile in every program": ("tl.program_id(0) * ROWS", "ROWS"),
    "goes backwards through the columns of a row": ("+ column[None, :]", "- column[None, :]"),
    "lets rows begin one element apart: a row is columns elements long": (
        "row[:, None] * columns",
        "row[:, None]",
    ),
    "uses the second row for all rows": ("row[:, None] * columns", "0 * row[:, None] + columns"),
    "reads the codes backwards, from addresses before the first one": ("codes_ptr + place", "codes_ptr - place"),
    "reads the scales backwards, from addresses before the first one": ("scale_ptr + row", "scale_ptr - row"),
    "reads codes instead of scales": ("tl.load(scale_ptr", "tl.load(codes_ptr"),
    "reads scales instead of codes": ("tl.load(codes_ptr", "tl.load(scale_ptr"),
    "loads the scales of rows that do not exist, and 0 for those that do": ("mask=row < rows", "mask=row >= rows"),
    "stores the codes without their scale": (" * scale.to(tl.float32)[:, None]", ""),
    "stores the scales without the codes": ("codes.to(tl.float32) * scale", "0 * codes + scale"),
    "stores backwards, to addresses before the first element of out": ("out_ptr + place", "out_ptr - place"),
}
