"""Lesson 09, paged attention in Triton: merge partial attentions, walk a block table, split the keys, read INT8.

The kernels are in `_l09_kernels`; how they are launched is in `drives/l09_launch.py`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from minillm.ops.kv_quant import INT8_LEVELS, quantize_symmetric
from minillm.teaching.drives.l09 import run_decode, run_int8, run_merge, run_split
from minillm.teaching.drives.lazy_kernel import LazyKernel, wrong_kernel, wrong_kernels
from minillm.teaching.exercise import Attempt, Case, Exercise, WrongVersion
from minillm.teaching.exercises import _l09_slips
from minillm.teaching.exercises._facts import about_tensor
from minillm.teaching.source import wrong_versions

Decode = tuple[Tensor, Tensor, Tensor, Tensor, list[int], int]
UNDEFINED = "the result depends on masked lanes of"

# -------------------------------------------------------------------------------------------------------------- merge


def merge(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    """Attention over two sets of keys from the attention over each (Milakov & Gimelshein 2018, section 3).

    Per query: `m` is the largest score, `l = Σ exp(score - m)`, `o = Σ exp(score - m) · value`. `m`, `l`:
    `[num_queries]`; `o`: `[num_queries, head_dim]`. Returns m, l and o of both sets together. A set without keys has
    m = -inf, l = 0, o = 0; two such sets together give the same.
    """
    m = torch.maximum(m_a, m_b)
    factor_a, factor_b = (torch.where(x == m, 1.0, torch.exp(x - m)) for x in (m_a, m_b))  # exp(-inf + inf) is NaN
    return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]


def _nan_for_nothing(
    m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor
) -> tuple[Tensor, ...]:
    m = torch.maximum(m_a, m_b)
    factor_a, factor_b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]


def _any_is_all(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    if torch.isinf(m_a).any():
        return m_b, l_b, o_b
    if torch.isinf(m_b).any():
        return m_a, l_a, o_a
    return merge(m_a, l_a, o_a, m_b, l_b, o_b)


def _only_if_all_are_nothing(
    m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor
) -> tuple[Tensor, ...]:
    if torch.isinf(m_a).all():
        return m_b, l_b, o_b
    return _nan_for_nothing(m_a, l_a, o_a, m_b, l_b, o_b)


def _adds(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    return torch.maximum(m_a, m_b), l_a + l_b, o_a + o_b


def _averages(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    return torch.maximum(m_a, m_b), (l_a + l_b) / 2, (o_a + o_b) / 2


def _first_maximum(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    factor = torch.exp(m_b - m_a)
    return m_a, l_a + l_b * factor, o_a + o_b * factor[:, None]


def _l_only(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m, total, _ = merge(m_a, l_a, o_a, m_b, l_b, o_b)
    return m, total, o_a + o_b


def _o_only(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m, _, out = merge(m_a, l_a, o_a, m_b, l_b, o_b)
    return m, l_a + l_b, out


def _upside_down(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m = torch.maximum(m_a, m_b)
    factor_a, factor_b = torch.exp(m - m_a), torch.exp(m - m_b)
    return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]


def _swaps_factors(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m, total, out = merge(m_b, l_a, o_a, m_a, l_b, o_b)
    return m, total, out


def _smaller_maximum(
    m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor
) -> tuple[Tensor, ...]:
    m = torch.minimum(m_a, m_b)
    factor_a, factor_b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]


def _base_two(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m = torch.maximum(m_a, m_b)
    factor_a, factor_b = (torch.where(x == m, 1.0, torch.exp2(x - m)) for x in (m_a, m_b))
    return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]


def _divides(m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor) -> tuple[Tensor, ...]:
    m, total, out = merge(m_a, l_a, o_a, m_b, l_b, o_b)
    return m, total, out / total[:, None]


def _merge_cases() -> list[Case]:
    def one(m: float, total: float, *out: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor([m]), torch.tensor([total]), torch.tensor([out])

    nothing = one(-torch.inf, 0.0, 0.0, 0.0)
    some, other = one(1.5, 2.0, 3.0, 4.0), one(0.5, 1.0, 5.0, 2.0)
    return [
        Case("two keys with equal scores", (*one(2.0, 1.0, 1.0, 0.0), *one(2.0, 1.0, 0.0, 4.0))),
        Case("the larger score comes second", (*one(0.0, 2.0, 2.0, 1.0), *one(1.0, 1.0, 3.0, 5.0))),
        Case("the larger score comes first", (*one(3.0, 1.5, 6.0, 1.0), *one(1.0, 2.0, 2.0, 2.0))),
        Case("the first set has no keys", (*nothing, *one(1.5, 2.0, 3.0, 4.0))),
        Case("the second set has no keys", (*one(1.5, 2.0, 3.0, 4.0), *nothing)),
        Case("neither set has keys", (*nothing, *nothing)),
        Case("scores far apart", (*one(-200.0, 1.0, 1.0, 1.0), *one(300.0, 1.0, 2.0, 3.0))),
        Case(
            "two queries at once",
            (
                *(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
                *(torch.tensor([2.0, 4.0]), torch.tensor([3.0, 1.0]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])),
            ),
        ),
        Case(
            "three queries, for which one set, neither set and both sets have keys",
            tuple(
                torch.cat(parts) for parts in zip((*nothing, *some), (*nothing, *nothing), (*some, *other), strict=True)
            ),
        ),
    ]


_MERGE = Exercise(
    name="l09.merge",
    reference=merge,
    cases=_merge_cases,
    hints=(
        "Both sums are relative to their own maximum. What must you do with them before you may add them?",
        "m is the larger of the two maxima (`torch.maximum`). Multiply a sum of exp(score - m_a) by exp(m_a - m), and "
        "it is a sum of exp(score - m). Use the same factor for l and for o. If both maxima are -inf, their difference "
        "is NaN, so set the factor to 1 where m_a equals m (`torch.where`).",
        "The shape of it:\n"
        "m = torch.maximum(m_a, m_b)\n"
        "factor_a = torch.where(m_a == m, 1.0, torch.exp(…))\n"
        "factor_b = torch.where(m_b == m, 1.0, torch.exp(…))\n"
        "return m, l_a * factor_a + …, o_a * factor_a[:, None] + …",
        "The whole of it:\n"
        "m = torch.maximum(m_a, m_b)\n"
        "factor_a = torch.where(m_a == m, 1.0, torch.exp(m_a - m))\n"
        "factor_b = torch.where(m_b == m, 1.0, torch.exp(m_b - m))\n"
        "return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]",
    ),
    wrong=(
        WrongVersion("adds sums that are relative to different maxima", _adds),
        WrongVersion("averages the two parts", _averages),
        WrongVersion("keeps the first maximum, even if a larger score comes later or none came before", _first_maximum),
        WrongVersion("rescales l and forgets to rescale o", _l_only),
        WrongVersion("rescales o and forgets to rescale l", _o_only),
        WrongVersion("has the wrong sign in the factor: exp(m - m_a) instead of exp(m_a - m)", _upside_down),
        WrongVersion("gives each part the factor of the other", _swaps_factors),
        WrongVersion("takes the smaller of the two maxima", _smaller_maximum),
        WrongVersion("computes powers of 2 instead of e", _base_two),
        WrongVersion("divides o by l, so that the result cannot be merged again", _divides),
        WrongVersion("gives NaN for two sets without keys: -inf minus -inf is NaN", _nan_for_nothing),
        WrongVersion("returns the other set for all queries as soon as a set has no keys for one query", _any_is_all),
        WrongVersion(
            "treats two sets without keys specially only if that is so for all queries: -inf minus -inf is NaN",
            _only_if_all_are_nothing,
        ),
        *wrong_versions(merge, _l09_slips.MERGE),
    ),
    parts=("m", "l", "o"),
)

# -------------------------------------------------------------------------------------------------- kernel arguments


def poisoned(
    seed: int, seq_lens: list[int], tables: list[list[int]], heads: int, num_kv: int, block_size: int = 4, dim: int = 4
) -> Decode:
    """Queries, pools whose unused slots hold NaN, block tables padded with their first block, lengths, block size."""
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


def _about_heads(attempt: Attempt) -> str | None:
    return about_tensor(attempt.expected, attempt.got, ("request", "query head", "channel"))


# ------------------------------------------------------------------------------------------------------ decode_kernel


def _falling(case: Decode) -> Decode:
    """Negate the keys of every second block, so that its scores lie far below those of the first."""
    q, keys, values, tables, lengths, block_size = case
    keys = torch.nan_to_num(keys.abs() + 0.5)
    keys[tables[0, 1::2].repeat_interleave(block_size) * block_size + torch.arange(block_size).repeat(1)] *= -1
    return q.abs() + 100, keys, values, tables, lengths, block_size


def _far_apart(case: Decode) -> Decode:
    """Give the heads of a group scores of several hundred, of about 1, and of tens of thousands below zero."""
    q, keys, *rest = case
    return q.abs() * torch.tensor([[400.0], [1.0], [-40000.0]]), keys.abs() + 0.5, *rest


def _decode_cases() -> list[Case]:
    large = poisoned(5, [4], [[1]], 1, 1)
    return [
        Case("one request, one full block", poisoned(1, [4], [[1]], 1, 1)),
        Case("the last block holds one of four", poisoned(1, [5], [[2, 0]], 1, 1)),
        Case("two requests of different lengths", poisoned(2, [3, 6], [[4], [2, 0]], 1, 1)),
        Case("the first of two requests is the longer one", poisoned(2, [6, 3], [[2, 0], [4]], 1, 1)),
        Case(
            "three query heads of eight channels share each of two KV heads",
            poisoned(4, [3], [[1]], 6, 2, dim=8),
        ),
        Case(
            "two requests share a block: one sees three rows of it, the other four",
            poisoned(9, [3, 4], [[1], [1]], 1, 1),
        ),
        Case("four blocks of eight rows, three in the last one", _four_blocks(10, 1)),
        Case("three blocks of two rows", poisoned(11, [6], [[2, 0, 1]], 1, 1, block_size=2)),
        Case("scores of several thousand", (large[0] * 4000, *large[1:])),
        Case("the second block's scores are hundreds below the first's", _falling(poisoned(6, [8], [[1, 0]], 1, 1))),
        Case(
            "heads of one group with scores far apart, three of four rows in the block",
            _far_apart(poisoned(7, [3], [[0]], 3, 1)),
        ),
        Case("every tensor ends where its memory ends", (*_everything(), True)),
    ]


def _four_blocks(seed: int, heads: int) -> Decode:
    """A request whose blocks are more than two, larger than elsewhere, and in no order."""
    return poisoned(seed, [27], [[5, 0, 3, 1]], heads, 1, block_size=8)


def _everything() -> Decode:
    """Padding heads, a partly filled block, and a last request that fills its blocks."""
    return poisoned(8, [6, 8], [[3, 0], [1, 2]], 6, 2)


_ROWS = "((request * NUM_KV + kv_head) * GROUP + head[:, None])"
_SUM_L, _SUM_O = "total * rescale", "out * rescale[:, None]"
_NO_WHERE = 'tl.where(exists[None, :], score, float("-inf"))', "score"
_decode_wrong = partial(wrong_kernel, "l09", "decode_kernel")

_DECODE = Exercise(
    name="l09.decode_kernel",
    reference=LazyKernel("l09", "decode_kernel"),
    cases=_decode_cases,
    hints=(
        "It is your merge, block by block: merge (m, l, o) of the previous blocks with the scores and values of the "
        "next block.",
        "Turn first // BLOCK_SIZE of the loop loads one block id from the request's row of the table, then BLOCK_SIZE "
        "rows of k and of v; row `place` lies in slot block · BLOCK_SIZE + place. Mask rows that do not exist twice: "
        "in the loads, and with -inf as their score (tl.where).",
        "The shape of it:\n"
        "for first in range(0, length, BLOCK_SIZE):\n"
        "    block = tl.load(table_ptr + …)\n"
        "    exists = first + place < length\n"
        "    at = ((block * BLOCK_SIZE + place) * NUM_KV + kv_head)[:, None] * DIM + channel[None, :]\n"
        "    k = tl.load(k_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)\n"
        "    v = …\n"
        '    score = tl.where(exists[None, :], …, float("-inf"))\n'
        "    m_new, weight, rescale = …  # as in your merge, with tl.maximum, tl.max(score, 1) and tl.exp\n"
        "    total = …\n"
        "    out = …\n"
        "    m = m_new\n"
        "tl.store(out_ptr + q_at, …, mask=is_head)",
        "The whole of it:\n"
        "for first in range(0, length, BLOCK_SIZE):\n"
        "    block = tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)\n"
        "    exists = first + place < length\n"
        "    at = ((block * BLOCK_SIZE + place) * NUM_KV + kv_head)[:, None] * DIM + channel[None, :]\n"
        "    k = tl.load(k_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)\n"
        "    v = tl.load(v_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)\n"
        '    score = tl.where(exists[None, :], tl.sum(q[:, None, :] * k[None, :, :], 2), float("-inf"))\n'
        "    m_new = tl.maximum(m, tl.max(score, 1))\n"
        "    weight = tl.exp(score - m_new[:, None])\n"
        "    rescale = tl.exp(m - m_new)\n"
        "    total = total * rescale + tl.sum(weight, 1)\n"
        "    out = out * rescale[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1)\n"
        "    m = m_new\n"
        "tl.store(out_ptr + q_at, out / total[:, None], mask=is_head)",
    ),
    wrong=(
        _decode_wrong("gives weight to rows of the last block that do not exist: a score of 0 is not -inf", _NO_WHERE),
        _decode_wrong(
            "loads slots that were never written; a weight of 0 does not help, because 0 · NaN is NaN",
            ("tl.load(v_ptr + at, mask=exists[:, None], other=0.0)", "tl.load(v_ptr + at)"),
        ),
        _decode_wrong(
            "includes rows that do not exist (<= length)", ("first + place < length", "first + place <= length")
        ),
        _decode_wrong(
            "leaves out the last block if it is not full",
            ("range(0, length, BLOCK_SIZE)", "range(0, length // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE)"),
        ),
        _decode_wrong("stops after the first block", ("range(0, length, BLOCK_SIZE)", "range(0, 1, BLOCK_SIZE)")),
        _decode_wrong(
            "reads the blocks 0, 1, 2 … instead of those in the table",
            ("tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)", "first // BLOCK_SIZE"),
            # % 8: so that it also finds numbers in slots that it must not read, and not only NaN
            ("* BLOCK_SIZE + place) *", "* BLOCK_SIZE + place) % 8 *"),
        ),
        _decode_wrong("reads the table of the first request for all of them", ("request * table_stride + ", "")),
        _decode_wrong(
            "rescales neither sum when a block has a larger score", ("tl.exp(m - m_new)", "tl.exp(m_new - m_new)")
        ),
        _decode_wrong("rescales the sum of the weights and forgets that of the values", (_SUM_O, "out")),
        _decode_wrong("rescales the sum of the values and forgets that of the weights", (_SUM_L, "total")),
        _decode_wrong(
            "has the wrong sign in the factor: exp(m_new - m) instead of exp(m - m_new)",
            ("tl.exp(m - m_new)", "tl.exp(tl.where(m > -1e30, m_new - m, -1e9))"),
        ),
        _decode_wrong(
            "does not subtract the maximum, so that large scores overflow",
            ("tl.maximum(m, tl.max(score, 1))", "tl.max(score, 1) * 0.0"),
        ),
        _decode_wrong(
            "takes the maximum of this block only, so that the factor becomes infinite when scores fall",
            ("tl.maximum(m, tl.max(score, 1))", "tl.max(score, 1)"),
        ),
        _decode_wrong(
            "takes one maximum for all heads, so that a head with low scores has only weights of 0",
            ("tl.max(score, 1)", "tl.max(score)"),
        ),
        _decode_wrong("computes powers of 2 instead of e", ("tl.exp(", "tl.exp2(")),
        _decode_wrong("does not divide by the sum of the weights", (" / total[:, None]", "")),
        _decode_wrong("leaves out the factor 1/√DIM of the scores", (" * scale", "")),
        _decode_wrong(
            "multiplies the result by 1/√DIM instead of the scores",
            (" * scale", ""),
            ("out / total[:, None]", "out / total[:, None] * scale"),
        ),
        _decode_wrong("reads KV head 0 for every query head", ("* NUM_KV + kv_head)[:, None]", "* NUM_KV)[:, None]")),
        _decode_wrong(
            "uses every NUM_KV-th head as a group; heads that share a KV head are adjacent",
            (_ROWS, "(request * NUM_KV * GROUP + head[:, None] * NUM_KV + kv_head)"),
        ),
        _decode_wrong("forgets that a slot holds a row per KV head", ("* NUM_KV + kv_head)[:, None]", ")[:, None]")),
        _decode_wrong("loads the keys instead of the values", ("tl.load(v_ptr + at", "tl.load(k_ptr + at")),
        _decode_wrong(
            "stores without a mask: the padding of a group overwrites the next head",
            (", mask=is_head)", ")"),
            expected_message="outside of",
        ),
        _decode_wrong(
            "loads queries without a mask, so that it reads past the end of q",
            (", mask=is_head, other=0.0)", ")"),
            expected_message="beyond the end of",
        ),
        _decode_wrong(
            "loads values with a mask and without other; a weight of 0 does not help if the masked lane holds NaN",
            ("tl.load(v_ptr + at, mask=exists[:, None], other=0.0)", "tl.load(v_ptr + at, mask=exists[:, None])"),
            expected_message=UNDEFINED,
        ),
        _decode_wrong(
            "reads the rows before q as well, and does not use them",
            ("is_head = head", "before = tl.load(q_ptr - 1 - channel)\n    is_head = head"),
            expected_message="before the beginning of q",
        ),
        *wrong_kernels("l09", "decode_kernel", _l09_slips.DECODE),
    ),
    fallback_diagnosis=_about_heads,
    run_case=run_decode,
)

# ------------------------------------------------------------------------------------------------------- split_kernel


_split_wrong = partial(wrong_kernel, "l09", "split_kernel")
_BLOCKS_OF_A_PART = "tl.cdiv(tl.cdiv(length, BLOCK_SIZE), SPLITS)"
_BEGIN, _END = "begin = split * keys_of_a_part", "tl.minimum(begin + keys_of_a_part, length)"


def _about_parts(attempt: Attempt) -> str | None:
    axes = "request", "query head", "part", "channel"
    return next(
        (said for name, x in attempt.expected.items() if (said := about_tensor(x, attempt.got[name], axes, name))), None
    )


_SPLIT = Exercise(
    name="l09.split_kernel",
    reference=LazyKernel("l09", "split_kernel"),
    cases=lambda: [
        Case("four blocks in two parts", (*poisoned(1, [16], [[3, 0, 4, 1]], 1, 1), 2)),
        Case("three blocks in two parts, one row in the last block", (*poisoned(2, [9], [[2, 0, 3]], 1, 1), 2)),
        Case("one block in four parts: three have no keys", (*poisoned(3, [3], [[1]], 1, 1), 4)),
        Case("six blocks in four parts of two, two, two and no blocks", (*poisoned(6, [23], [[*range(6)]], 1, 1), 4)),
        Case("four blocks of eight rows in one part", (*_four_blocks(7, 1), 1)),
        Case("six blocks of two rows in two parts", (*poisoned(8, [11], [[3, 0, 4, 1, 5, 2]], 1, 1, block_size=2), 2)),
        Case(
            "two requests, three query heads of eight channels share a KV head",
            (*poisoned(4, [5, 3], [[4, 0], [1]], 3, 1, dim=8), 2),
        ),
        Case("every tensor ends where its memory ends", (*_everything(), 2, True)),
    ],
    hints=(
        "The loop over the blocks is given. Where does it begin and end for part `split`, and what is stored after it?",
        "Give every part the same whole number of blocks: the number of blocks divided by SPLITS, rounded up (tl.cdiv, "
        "not -(-a // b)). No part goes beyond length. Store out / total, and also log Σ exp(score) = m + log(total), "
        "with tl.log.",
        "The shape of it. A part without keys has total 0 and m -inf, and must store 0 and -inf:\n"
        "keys_of_a_part = tl.cdiv(tl.cdiv(length, BLOCK_SIZE), SPLITS) * BLOCK_SIZE\n"
        "begin = …\n"
        "end = tl.minimum(…, length)\n"
        "… the loop …\n"
        "divisor = tl.where(total == 0.0, 1.0, total)\n"
        "part_row = …  # part s of row r is number r * SPLITS + s\n"
        "tl.store(part_ptr + part_row[:, None] * DIM + channel[None, :], …, mask=head[:, None] < GROUP)\n"
        "tl.store(lse_ptr + part_row, …, mask=head < GROUP)",
        "The whole of it:\n"
        "keys_of_a_part = tl.cdiv(tl.cdiv(length, BLOCK_SIZE), SPLITS) * BLOCK_SIZE\n"
        "begin = split * keys_of_a_part\n"
        "end = tl.minimum(begin + keys_of_a_part, length)\n"
        "… the loop …\n"
        "divisor = tl.where(total == 0.0, 1.0, total)\n"
        "part_row = row * SPLITS + split\n"
        "tl.store(part_ptr + part_row[:, None] * DIM + channel[None, :], out / divisor[:, None], "
        "mask=head[:, None] < GROUP)\n"
        "tl.store(lse_ptr + part_row, m + tl.log(divisor), mask=head < GROUP)",
    ),
    wrong=(
        _split_wrong("lets every part walk over all keys", (_BEGIN, "begin = 0"), ("begin + keys_of_a_part", "length")),
        _split_wrong(
            "rounds the size of a part down, so that the last blocks belong to no part",
            (_BLOCKS_OF_A_PART, "(tl.cdiv(length, BLOCK_SIZE) // SPLITS)"),
        ),
        _split_wrong(
            "counts full blocks only, so that a partly filled block belongs to no part",
            (_BLOCKS_OF_A_PART, "tl.cdiv(length // BLOCK_SIZE, SPLITS)"),
        ),
        _split_wrong(
            "rounds down twice, as -(-a // b) does in a kernel, where // rounds towards zero; tl.cdiv(a, b) rounds up",
            (_BLOCKS_OF_A_PART, "-(-(-(-length // BLOCK_SIZE)) // SPLITS)"),
        ),
        _split_wrong(
            "splits blocks: a part must begin at the beginning of a block",
            (_BLOCKS_OF_A_PART + " * BLOCK_SIZE", "tl.cdiv(length, SPLITS)"),
        ),
        _split_wrong("lets every part continue to the end of the keys", (_END, "length")),
        _split_wrong(
            "cuts only the last part at the end of the keys; parts before it may lie beyond that end, too",
            (_END, "tl.where(split == SPLITS - 1, length, begin + keys_of_a_part)"),
        ),
        _split_wrong(
            "lets every part begin at the first key",
            (_BEGIN, "begin = 0"),
            (_END, "tl.minimum((split + 1) * keys_of_a_part, length)"),
        ),
        _split_wrong("stores the sum o instead of o / l", ("out / divisor[:, None]", "out")),
        _split_wrong("stores the maximum alone, without the log of the sum", ("m + tl.log(divisor)", "m")),
        _split_wrong(
            "stores the log of the sum alone, without the maximum", ("m + tl.log(divisor)", "tl.log(divisor)")
        ),
        _split_wrong("computes the logarithm to base 2", ("tl.log(divisor)", "tl.log2(divisor)")),
        _split_wrong("stores the sum itself instead of its logarithm", ("m + tl.log(divisor)", "m + divisor")),
        _split_wrong("divides 0 by 0 in a part that has no keys", ("tl.where(total == 0.0, 1.0, total)", "total")),
        _split_wrong(
            "stores part by part; the parts of one head must be adjacent",
            ("row * SPLITS + split", "split * (NUM_KV * GROUP * tl.num_programs(0)) + row"),
        ),
        _split_wrong(
            "stores without a mask: the padding of a group overwrites the next head",
            (", mask=head[:, None] < GROUP)", ")"),
            (", mask=head < GROUP)", ")"),
            expected_message="outside of",
        ),
        _split_wrong(
            "loads values with a mask and without other; a weight of 0 does not help if the masked lane holds NaN",
            ("tl.load(v_ptr + at, mask=exists[:, None], other=0.0)", "tl.load(v_ptr + at, mask=exists[:, None])"),
            expected_message=UNDEFINED,
        ),
        *wrong_kernels("l09", "split_kernel", _l09_slips.SPLIT),
    ),
    fallback_diagnosis=_about_parts,
    run_case=run_split,
)

# ------------------------------------------------------------------------------------------------------- merge_kernel


def _merge_kernel_cases() -> list[Case]:
    part = torch.tensor([[[1.0, 0.0], [0.0, 8.0]]])
    four = torch.arange(16.0).view(2, 4, 2)
    lse_of_four = torch.tensor([[0.0, 1.0, 2.0, 0.5], [3.0, -1.0, 0.0, 2.5]])
    return [
        Case("two parts with equal weights", (part, torch.tensor([[1.0, 1.0]]))),
        Case(
            "one part has three times the weight of the other", (part, torch.tensor([[2.0 + np.log(3.0).item(), 2.0]]))
        ),
        Case("a part without keys", (part * torch.tensor([1.0, 0.0])[:, None], torch.tensor([[0.5, -torch.inf]]))),
        Case(
            "the first part has no keys", (part * torch.tensor([0.0, 1.0])[:, None], torch.tensor([[-torch.inf, 0.5]]))
        ),
        Case("scores of several hundred", (part, torch.tensor([[401.0, 400.0]]))),
        Case("scores of several hundred below zero", (part, torch.tensor([[-401.0, -400.0]]))),
        Case("the second part has an lse that is hundreds larger", (part, torch.tensor([[0.0, 200.0]]))),
        Case("two rows of four parts", (four, lse_of_four)),
        Case("every tensor ends where its memory ends", (four, lse_of_four, True)),
    ]


_merge_wrong = partial(wrong_kernel, "l09", "merge_kernel")
_WEIGHT = "tl.exp(lse - tl.max(lse, 0))"

_MERGE_KERNEL = Exercise(
    name="l09.merge_kernel",
    reference=LazyKernel("l09", "merge_kernel"),
    cases=_merge_kernel_cases,
    hints=(
        "A part with larger scores holds more of the whole softmax. Its lse says exactly how much.",
        "exp(lse) is the part's own sum of exp(score). The weights are these sums divided by their total: a softmax "
        "over the parts. Subtract the largest lse first.",
        "The shape of it:\n"
        "row = tl.program_id(0)\n"
        "split, channel = tl.arange(0, SPLITS), tl.arange(0, DIM)\n"
        "lse = tl.load(lse_ptr + row * SPLITS + split)\n"
        "part = tl.load(part_ptr + …)  # [SPLITS, DIM]\n"
        "weight = tl.exp(…)\n"
        "out = tl.sum(weight[:, None] * part, 0) / …\n"
        "tl.store(out_ptr + row * DIM + channel, out)",
        "The whole of it:\n"
        "row = tl.program_id(0)\n"
        "split, channel = tl.arange(0, SPLITS), tl.arange(0, DIM)\n"
        "lse = tl.load(lse_ptr + row * SPLITS + split)\n"
        "part = tl.load(part_ptr + (row * SPLITS + split)[:, None] * DIM + channel[None, :])\n"
        "weight = tl.exp(lse - tl.max(lse, 0))\n"
        "out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0)\n"
        "tl.store(out_ptr + row * DIM + channel, out)",
    ),
    wrong=(
        _merge_wrong(
            "averages the parts, as if each held the same share of the softmax",
            (_WEIGHT, "tl.where(lse == lse, 1.0, 0.0)"),
        ),
        _merge_wrong("computes exp(lse) without subtracting the largest lse first", (" - tl.max(lse, 0)", "")),
        _merge_wrong("does not divide by the sum of the weights", (" / tl.sum(weight, 0)", "")),
        _merge_wrong("weights by lse itself instead of exp(lse)", (_WEIGHT, "lse")),
        _merge_wrong("computes powers of 2 instead of e", ("tl.exp(", "tl.exp2(")),
        _merge_wrong(
            "reads the parts of the first row in every program", ("(row * SPLITS + split)[:, None]", "split[:, None]")
        ),
        _merge_wrong(
            "reads the lse of the first row in every program", ("lse_ptr + row * SPLITS + split", "lse_ptr + split")
        ),
        *wrong_kernels("l09", "merge_kernel", _l09_slips.MERGE_KERNEL),
    ),
    fallback_diagnosis=lambda attempt: about_tensor(attempt.expected, attempt.got, ("row", "channel")),
    run_case=run_merge,
)

# -------------------------------------------------------------------------------------------------------- int8_kernel


def coded(case: Decode) -> tuple[object, ...]:
    """`case` in INT8. Scales of unused slots are NaN; rows differ in size, so that another row's scale is wrong."""
    q, keys, values, *rest = case
    sizes = 1 + torch.arange(keys.shape[0] * keys.shape[1]).view(-1, keys.shape[1], 1) % 5
    k, v = (quantize_symmetric(x * sizes, INT8_LEVELS) for x in (keys, values))
    return q, *k, *v, *rest


_int8_wrong = partial(wrong_kernel, "l09", "int8_kernel")
_K_SCALED, _V_SCALED = " * k_scale[None, :]", " * v_scale[:, None]"

_INT8 = Exercise(
    name="l09.int8_kernel",
    reference=LazyKernel("l09", "int8_kernel"),
    cases=lambda: [
        Case("one request, one full block", coded(poisoned(1, [4], [[1]], 1, 1))),
        Case("the last block holds one of four", coded(poisoned(2, [5], [[2, 0]], 1, 1))),
        Case("two full blocks, in reverse order in memory", coded(poisoned(5, [8], [[1, 0]], 1, 1))),
        Case("two requests, two KV heads of eight channels", coded(poisoned(3, [3, 6], [[4], [2, 0]], 2, 2, dim=8))),
        Case("four blocks of eight rows, three in the last one", coded(_four_blocks(11, 1))),
        Case("three blocks of two rows", coded(poisoned(12, [6], [[2, 0, 1]], 1, 1, block_size=2))),
        Case("heads of one group with scores far apart", coded(_far_apart(poisoned(7, [3], [[0]], 3, 1)))),
        Case("every tensor ends where its memory ends", (*coded(_everything()), True)),
    ],
    hints=(
        "Dequantising is code times scale; the rest does not change. Which scales belong to the rows of this block?",
        "The scale of a row lies at (block · BLOCK_SIZE + place) · NUM_KV + kv_head, which is `slot` here. Load "
        "BLOCK_SIZE scales for the keys and BLOCK_SIZE for the values, masked like the rows.",
        "The shape of it:\n"
        "k = tl.load(k_ptr + at, mask=exists[:, None], other=0).to(tl.float32)\n"
        "v = …\n"
        "k_scale = tl.load(k_scale_ptr + …, mask=exists, other=0.0).to(tl.float32)\n"
        "v_scale = …\n"
        "score = tl.sum(q[:, None, :] * k[None, :, :], 2) * …\n"
        "m, total, out = add_block(score, v * …, exists, m, total, out)",
        "The whole of it:\n"
        "k = tl.load(k_ptr + at, mask=exists[:, None], other=0).to(tl.float32)\n"
        "v = tl.load(v_ptr + at, mask=exists[:, None], other=0).to(tl.float32)\n"
        "k_scale = tl.load(k_scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)\n"
        "v_scale = tl.load(v_scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)\n"
        "score = tl.sum(q[:, None, :] * k[None, :, :], 2) * k_scale[None, :]\n"
        "m, total, out = add_block(score, v * v_scale[:, None], exists, m, total, out)",
    ),
    wrong=(
        _int8_wrong("leaves out the scales of the keys", (_K_SCALED, "")),
        _int8_wrong("leaves out the scales of the values", (_V_SCALED, "")),
        _int8_wrong(
            "swaps the scales of keys and values",
            ("k_scale_ptr +", "x_scale_ptr +"),
            ("v_scale_ptr +", "k_scale_ptr +"),
            ("x_scale_ptr +", "v_scale_ptr +"),
        ),
        _int8_wrong("divides by the scales instead of multiplying", (_K_SCALED, " / k_scale[None, :]")),
        _int8_wrong(
            "indexes the scales by token position instead of by slot",
            ("k_scale_ptr + slot", "k_scale_ptr + (first + place) * NUM_KV + kv_head"),
            ("v_scale_ptr + slot", "v_scale_ptr + (first + place) * NUM_KV + kv_head"),
        ),
        _int8_wrong(
            "uses the scale of KV head 0 for every head", ("_scale_ptr + slot,", "_scale_ptr + slot - kv_head,")
        ),
        _int8_wrong(
            "uses one scale for the whole block", ("_scale_ptr + slot,", "_scale_ptr + slot - place * NUM_KV,")
        ),
        _int8_wrong(
            "loads scales of rows that do not exist; a weight of 0 does not help, because 0 · NaN is NaN",
            ("tl.load(v_scale_ptr + slot, mask=exists, other=0.0)", "tl.load(v_scale_ptr + slot)"),
        ),
        _int8_wrong(
            "reads the codes as unsigned, so that -1 becomes 255",
            ("other=0).to(tl.float32)", "other=0).to(tl.uint8, bitcast=True).to(tl.float32)"),
        ),
        _int8_wrong(
            "loads scales of values with a mask and without other; a weight of 0 does not help if the lane holds NaN",
            ("tl.load(v_scale_ptr + slot, mask=exists, other=0.0)", "tl.load(v_scale_ptr + slot, mask=exists)"),
            expected_message=UNDEFINED,
        ),
        *wrong_kernels("l09", "int8_kernel", _l09_slips.INT8),
    ),
    fallback_diagnosis=_about_heads,
    run_case=run_int8,
)

EXERCISES = [_MERGE, _DECODE, _SPLIT, _MERGE_KERNEL, _INT8]
