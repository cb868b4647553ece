"""Lesson 09: mistakes in one place of a right answer, as edits of its source: {what it does wrong: (right, wrong)}."""

from __future__ import annotations

from minillm.teaching.source import Edits

MERGE: Edits = {
    "subtracts the second sum of weights instead of adding it": ("+ l_b", "- l_b"),
    "subtracts the second sum of values instead of adding it": ("+ o_b", "- o_b"),
    "leaves the second set out of l": (" + l_b * factor_b", ""),
    "leaves the first set out of l": ("l_a * factor_a + ", ""),
    "leaves the second set out of o": (" + o_b * factor_b[:, None]", ""),
    "leaves the first set out of o": ("o_a * factor_a[:, None] + ", ""),
    "divides the first sum of weights by its factor": ("l_a * factor_a", "l_a / factor_a"),
    "divides the second sum of weights by its factor": ("l_b * factor_b", "l_b / factor_b"),
    "divides the first sum of values by its factor": ("o_a * factor_a", "o_a / factor_a"),
    "divides the second sum of values by its factor": ("o_b * factor_b", "o_b / factor_b"),
    "rescales the second sum of weights only": ("l_a * factor_a", "l_a"),
    "rescales the first sum of weights only": ("l_b * factor_b", "l_b"),
    "rescales the second sum of values only": ("o_a * factor_a[:, None]", "o_a"),
    "rescales the first sum of values only": ("o_b * factor_b[:, None]", "o_b"),
    "gives the first sum of weights the factor of the second": ("l_a * factor_a", "l_a * factor_b"),
    "gives the second sum of weights the factor of the first": ("l_b * factor_b", "l_b * factor_a"),
    "gives the first sum of values the factor of the second": ("o_a * factor_a", "o_a * factor_b"),
    "gives the second sum of values the factor of the first": ("o_b * factor_b", "o_b * factor_a"),
    "uses the smaller of the two maxima as m": ("torch.maximum", "torch.minimum"),
    "has no exponential in the factors": ("torch.exp(x - m)", "x - m"),
    "computes exp of a set's own maximum, without subtracting the common one": ("torch.exp(x - m)", "torch.exp(x)"),
    "subtracts a set's maximum from the common one: the sign is wrong": ("x - m)", "m - x)"),
    "adds the two maxima in the exponent; it must be their difference": ("torch.exp(x - m)", "torch.exp(x + m)"),
    "gives the factor 2 to the set with the larger maximum; it must be 1": ("m, 1.0", "m, 2.0"),
    "gives the factor 0 to the set with the larger maximum; it must be 1": ("m, 1.0", "m, 0.0"),
    "gives the factor 1 to the set whose maximum is not the common one": ("x == m", "x != m"),
    "returns l first and m second": (
        "return m, l_a * factor_a + l_b * factor_b",
        "return l_a * factor_a + l_b * factor_b, m",
    ),
}


def _loop(begin: str, end: str) -> Edits:
    """Mistakes in the walk over the blocks, for a kernel whose loop is `range(begin, end, BLOCK_SIZE)`."""
    loop = f"range({begin}, {end}, BLOCK_SIZE)"
    return {
        "walks over the last two blocks only": (
            loop,
            f"range(tl.maximum({begin}, ({end} - 1) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE), {end}, BLOCK_SIZE)",
        ),
        "stops after two blocks": (loop, f"range({begin}, tl.minimum({end}, {begin} + 2 * BLOCK_SIZE), BLOCK_SIZE)"),
        "stops after eight keys": (loop, f"range({begin}, tl.minimum({end}, {begin} + 8), BLOCK_SIZE)"),
        "divides by 4 for the number of the block; a block has BLOCK_SIZE rows": (
            "first // BLOCK_SIZE)",
            "first // 4)",
        ),
        "goes through the table in larger and larger steps from the third block on": (
            "first // BLOCK_SIZE)",
            "first // BLOCK_SIZE * (1 + first // (2 * BLOCK_SIZE) * 100))",
        ),
        "leaves out a last block that holds one row (the end of the range is one too small)": (
            loop,
            f"range({begin}, {end} - 1, BLOCK_SIZE)",
        ),
        "begins with the second block": (loop, f"range({begin} + BLOCK_SIZE, {end}, BLOCK_SIZE)"),
        "reads the first block of the table every time": (" + first // BLOCK_SIZE)", ")"),
        "compares the offset within the block with the length, without the beginning of the block": (
            "first + place < length",
            "place < length",
        ),
        "loads the values instead of the keys": ("tl.load(k_ptr + at", "tl.load(v_ptr + at"),
    }


OTHER_ROWS: Edits = {
    "loads the rows that do not exist instead of those that do": ("first + place < length", "first + place >= length"),
}

DECODE: Edits = {
    **_loop("0", "length"),
    **OTHER_ROWS,
    "swaps the request and the KV head of the program": ("request, kv_head =", "kv_head, request ="),
    "divides the queries by 1/√DIM instead of multiplying": ("* scale", "/ scale"),
    "divides the queries by the keys; a score is a product": ("q[:, None, :] * k", "q[:, None, :] / k"),
    "forgets the exponential of the scores": ("tl.exp(score - m_new[:, None])", "score - m_new[:, None]"),
    "does not subtract the maximum before the exponential of the scores": ("score - m_new[:, None]", "score"),
    "subtracts the scores from the maximum; it must be the other way round": (
        "score - m_new[:, None]",
        "m_new[:, None] - score",
    ),
    "keeps the weights of the last block only": ("total * rescale + tl.sum(weight, 1)", "tl.sum(weight, 1)"),
    "subtracts the weights of a block, or its values, instead of adding them": (
        "rescale + tl.sum(weight, 1)",
        "rescale - tl.sum(weight, 1)",
    ),
    "adds the factor to the sum of the weights instead of multiplying": ("total * rescale", "total + rescale"),
    "keeps the values of the last block only": ("out * rescale[:, None] + tl.sum(", "tl.sum("),
    "divides the values by their weights": ("weight[:, :, None] * v", "weight[:, :, None] / v"),
    "adds up the values without their weights": (
        "weight[:, :, None] * v[None, :, :]",
        "weight[:, :, None] * 0 + v[None, :, :]",
    ),
    "adds up the weights, without the values": (
        "weight[:, :, None] * v[None, :, :]",
        "weight[:, :, None] + 0 * v[None, :, :]",
    ),
    "does not keep the new maximum for the next block": ("    m = m_new\n", ""),
    "multiplies by the sum of the weights instead of dividing": ("out / total", "out * total"),
    "divides the sum of the weights by the result: the quotient is inverted": (
        "out / total[:, None]",
        "total[:, None] / out",
    ),
    "stores every request at the place of the first one": (
        "out_ptr + q_at, out",
        "out_ptr + q_at - request * NUM_KV * GROUP * DIM, out",
    ),
    "fills rows that do not exist with a number such as -100 or -10000, which is more than low scores; they must be "
    "-inf": ('score, float("-inf")', "score, -10000.0"),
    "takes the length of this request's own block table as the distance of rows; it must be table_stride": (
        "request * table_stride",
        "request * tl.cdiv(length, BLOCK_SIZE)",
    ),
}

SPLIT: Edits = {
    **_loop("begin", "end"),
    **OTHER_ROWS,
    "begins every part where the second one begins": ("begin = split * keys_of_a_part", "begin = keys_of_a_part"),
    "begins each part one key after the previous one": ("begin = split * keys_of_a_part", "begin = split"),
    "ends every part at the end of the keys or beyond (maximum instead of minimum)": ("tl.minimum(", "tl.maximum("),
    "subtracts the log of the sum from the maximum instead of adding it": ("m + tl.log", "m - tl.log"),
    "multiplies by the sum instead of dividing": ("out / divisor", "out * divisor"),
    "divides the sum by the result: the quotient is inverted": ("out / divisor[:, None]", "divisor[:, None] / out"),
    "replaces the sums that are not 0 by 1, and keeps those that are 0": ("total == 0.0", "total != 0.0"),
    "stores every part at the place of the first one": ("row * SPLITS + split", "row * SPLITS"),
    "stores the parts of all heads where those of the first belong": ("row * SPLITS + split", "0 * row + split"),
}

MERGE_KERNEL: Edits = {
    "adds up the parts without their weights": ("weight[:, None] * part", "part"),
    "multiplies by the sum of the weights instead of dividing": ("/ tl.sum(weight", "* tl.sum(weight"),
    "gives the part with the largest lse the smallest weight": ("lse - tl.max(lse, 0)", "tl.max(lse, 0) - lse"),
    "subtracts the lse of the first part instead of the largest one, so that large differences overflow": (
        "tl.max(lse, 0)",
        "tl.load(lse_ptr + row * SPLITS)",
    ),
    "subtracts the smallest lse or a mean instead of the largest one, so that large differences overflow": (
        "tl.max(",
        "tl.min(",
    ),
    "uses lse minus the largest as the weight, without the exponential": (
        "tl.exp(lse - tl.max(lse, 0))",
        "lse - tl.max(lse, 0)",
    ),
    "divides the parts by their weights instead of multiplying": ("weight[:, None] * part", "part / weight[:, None]"),
    "stores every row at the place of the first one": ("out_ptr + row * DIM", "out_ptr"),
    "lets the rows of out begin one element apart": ("out_ptr + row * DIM", "out_ptr + row"),
}

INT8: Edits = {
    **_loop("0", "length"),
    "divides by the scales of the values instead of multiplying": ("v * v_scale", "v / v_scale"),
    "multiplies the result by the sum of the weights instead of dividing": ("out / total", "out * total"),
    "does not divide by the sum of the weights": ("out / total[:, None]", "out"),
    "multiplies the values by the scales of the keys": ("v * v_scale", "v * k_scale"),
    "multiplies the scores by the scales of the values": ("2) * k_scale", "2) * v_scale"),
    "adds the scales of the keys instead of multiplying": ("2) * k_scale", "2) + k_scale"),
    "adds the scales of the values instead of multiplying": ("v * v_scale", "v + v_scale"),
}
