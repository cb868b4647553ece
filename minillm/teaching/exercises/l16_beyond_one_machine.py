"""Lesson 16, beyond one machine: split products, the heads of a rank, the time of an all-reduce, routing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minillm.teaching.drives import l16 as drive
from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l16_mistakes as mistakes
from minillm.teaching.exercises._facts import about_tensor, unless
from minillm.teaching.exercises._l16_reference import (
    all_reduce_seconds,
    column_parallel,
    heads_of_rank,
    route,
    row_parallel,
)
from minillm.teaching.source import body_of


def _about_outputs(attempt: Attempt) -> str | None:
    got, expected = (part["returned"] for part in (attempt.got, attempt.expected))  # type: ignore[index]
    if isinstance(got, Tensor) and got.dim() == 2 and got.shape != expected.shape:
        return f"rank {attempt.case.args[3]} of {attempt.case.args[4]} has {expected.shape[1]} of the outputs"
    return about_tensor(expected, got, ("token", "output")) or unless(
        attempt, "own outputs only", "the products are more than those of the rank's own outputs"
    )


def _about_sums(attempt: Attempt) -> str | None:
    got, expected = (part["returned"] for part in (attempt.got, attempt.expected))  # type: ignore[index]
    return about_tensor(expected, got, ("token", "output")) or unless(
        attempt, "a product for each rank", "a product adds up the inputs of several ranks"
    )


def _column_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(16)

    def case(text: str, tokens: int, inputs: int, outputs: int, rank: int, size: int) -> Case:
        shapes = ((tokens, inputs), (outputs, inputs), (outputs,))
        return Case(text, (*(torch.randn(*shape, generator=draw) for shape in shapes), rank, size))

    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    return [
        Case("the first of two ranks", (torch.tensor([[1.0, 1.0]]), whole, torch.tensor([10.0, 20.0]), 0, 2)),
        Case("the second of two ranks", (torch.tensor([[1.0, 1.0]]), whole, torch.tensor([10.0, 20.0]), 1, 2)),
        case("one rank has everything", 2, 3, 4, 0, 1),
        case("the second of three ranks", 3, 4, 6, 1, 3),
        case("the third of four ranks", 2, 5, 8, 2, 4),
        case("the last of four ranks", 1, 6, 12, 3, 4),
        case("as many inputs as outputs", 4, 4, 4, 1, 2),
    ]


_COLUMN = Exercise(
    name="l16.column_parallel",
    reference=column_parallel,
    cases=_column_cases,
    hints=(
        "Which rows of `weight`, which has the shape [out, in], does one output need?",
        "A rank has out / size outputs, and those of rank r begin at r · out / size. It multiplies all of x by these "
        "rows of the weight, and adds these numbers of the bias.",
        "own = slice(…, …)\nreturn x @ weight[own].T + …",
        body_of(column_parallel),
    ),
    wrong=mistakes.COLUMN,
    fallback_diagnosis=_about_outputs,
    run_case=drive.own_outputs,
)


def _row_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(17)

    def case(text: str, tokens: int, width: int, outputs: int, size: int) -> Case:
        parts = [torch.randn(tokens, width, generator=draw) for _ in range(size)]
        weight, bias = torch.randn(outputs, width * size, generator=draw), torch.randn(outputs, generator=draw)
        return Case(text, (parts, weight, bias))

    ones = [torch.tensor([[1.0]]), torch.tensor([[2.0]])]
    return [
        Case("two ranks with one input each", (ones, torch.tensor([[3.0, 5.0]]), torch.tensor([100.0]))),
        case("one rank has everything", 2, 3, 4, 1),
        case("two ranks", 3, 2, 4, 2),
        case("three ranks", 2, 3, 5, 3),
        case("four ranks, as many inputs as outputs", 2, 2, 8, 4),
        case("one token, a wide part", 1, 7, 2, 2),
    ]


_ROW = Exercise(
    name="l16.row_parallel",
    reference=row_parallel,
    cases=_row_cases,
    hints=(
        "y is a sum over all inputs. Which part of that sum can a rank compute from the inputs that it has?",
        "Rank r has inputs r · width to (r + 1) · width, and needs these columns of the weight. Its product has the "
        "shape of the whole result, but it is only a part of each sum: add those of all ranks. Add the bias once.",
        "width = parts[0].shape[1]\npartial = [part @ weight[:, …].T for r, part in enumerate(parts)]\n"
        "return sum(…) + …",
        body_of(row_parallel),
    ),
    wrong=mistakes.ROW,
    fallback_diagnosis=_about_sums,
    run_case=drive.sums_of_parts,
)


def _about_heads(attempt: Attempt) -> str | None:
    num_heads, num_kv_heads, _, size = attempt.case.args
    got, expected = attempt.got, attempt.expected
    if expected is None:
        uneven = "query" if num_heads % size else "KV"
        return f"the {uneven} heads cannot be split evenly over {size} ranks, so the result is None"
    if got is None:
        return f"{num_heads} query heads and {num_kv_heads} KV heads can be split over {size} ranks"
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(part, range) for part in got)):
        return "return two ranges: the query heads and the KV heads"
    heads, kv_heads = got
    if not heads or not kv_heads:
        return "every rank needs a query head and the KV head that it reads"
    if min(heads[0], kv_heads[0]) < 0 or heads[-1] >= num_heads or kv_heads[-1] >= num_kv_heads:
        return f"there are query heads 0 to {num_heads - 1} and KV heads 0 to {num_kv_heads - 1}"
    group = num_heads // num_kv_heads
    missing = [head for head in heads if head // group not in kv_heads]
    if missing:
        return f"query head {missing[0]} reads KV head {missing[0] // group}, which is not on this rank"
    return None


_HEADS = Exercise(
    name="l16.heads_of_rank",
    reference=heads_of_rank,
    cases=[
        Case("two ranks, as many KV heads", (6, 2, 0, 2)),
        Case("the second of two", (6, 2, 1, 2)),
        Case("one rank has everything", (6, 2, 0, 1)),
        Case("eight KV heads, four ranks", (32, 8, 3, 4)),
        Case("multi-head attention", (8, 8, 2, 4)),
        Case("two ranks for each KV head: the second of a pair", (8, 2, 1, 4)),
        Case("two ranks for each KV head: the first of the other pair", (8, 2, 2, 4)),
        Case("one KV head for all", (8, 1, 5, 8)),
        Case("a rank for each query head", (6, 2, 4, 6)),
        Case("query heads that do not divide", (6, 2, 1, 4)),
        Case("query heads that do not divide, KV heads that do", (9, 4, 0, 4)),
        Case("KV heads that neither divide nor are divided", (12, 4, 1, 3)),
        Case("more ranks than KV heads, but no multiple of them", (12, 4, 2, 6)),
        Case("more ranks than heads", (2, 2, 1, 4)),
    ],
    hints=(
        "Query head h reads KV head h // (num_heads / num_kv_heads). Which KV heads do the query heads of a rank read?",
        "The query heads must divide evenly. KV heads are split if size divides them; if instead they divide size, "
        "every rank holds one, and size / num_kv_heads ranks the same one. In both cases the first KV head is "
        "rank · num_kv_heads // size.",
        "if num_heads % size or (… and …):\n    return None\nheads, kv_heads = …, max(1, …)\nfirst = …\n"
        "return range(rank * heads, …), range(first, …)",
        body_of(heads_of_rank),
    ),
    wrong=mistakes.HEADS,
    fallback_diagnosis=_about_heads,
    parts=("query heads", "KV heads"),
)


def _about_seconds(attempt: Attempt) -> str | None:
    num_bytes, size, bandwidth, latency = attempt.case.args
    got = attempt.got
    if not isinstance(got, int | float) or isinstance(got, bool):
        return "return a number of seconds"
    if size == 1:
        return "a rank that is alone has nobody to send to: 0 seconds"
    most = 2 * (size - 1)
    return (
        f"{most} steps of {latency + num_bytes / size / bandwidth:g} s each take {attempt.expected:g} s; "
        f"{got:g} s are {got / attempt.expected:.3g} times that"
    )


_SECONDS = Exercise(
    name="l16.all_reduce_seconds",
    reference=all_reduce_seconds,
    cases=[
        Case("two ranks, nothing but bytes", (1000.0, 2, 100.0, 0.0)),
        Case("two ranks, nothing but latency", (0.0, 2, 100.0, 3.0)),
        Case("two ranks, both", (1000.0, 2, 100.0, 3.0)),
        Case("four ranks", (1000.0, 4, 100.0, 3.0)),
        Case("eight ranks and many bytes: nearly twice the bytes over the bandwidth", (8e9, 8, 4e9, 1e-5)),
        Case("three ranks", (600.0, 3, 50.0, 0.5)),
        Case("three ranks, chunks of a third of 1000 bytes", (1000.0, 3, 50.0, 0.5)),
        Case("alone", (1000.0, 1, 100.0, 3.0)),
    ],
    hints=(
        "How many chunks is the tensor cut into? How often does a rank send one, and how long does one take?",
        "First every chunk is summed on its way around the ring, then the sums go around: size - 1 steps each. In each "
        "step every rank sends one chunk of num_bytes / size: latency plus bytes over bandwidth.",
        "steps = 2 * (…)\nreturn steps * (latency + … / bandwidth)",
        body_of(all_reduce_seconds),
    ),
    wrong=mistakes.SECONDS,
    fallback_diagnosis=_about_seconds,
)


def _about_route(attempt: Attempt) -> str | None:
    blocks, cached, queued = attempt.case.args
    got, expected = attempt.got, attempt.expected
    if not isinstance(got, int | np.integer) or isinstance(got, bool) or not 0 <= got < len(cached):
        return f"return the number of a replica, from 0 to {len(cached) - 1}"

    def hits(replica: int) -> int:
        return next((i for i, block in enumerate(blocks) if block not in cached[replica]), len(blocks))

    if hits(got) != hits(expected):
        return (
            f"replica {got} has the first {hits(got)} blocks of the prompt, replica {expected} the first "
            f"{hits(expected)}"
        )
    if queued[got] != queued[expected]:
        return (
            f"both have the first {hits(got)} blocks; replica {got} has {queued[got]} requests queued, replica "
            f"{expected} has {queued[expected]}"
        )
    return f"replicas {expected} and {got} are equally good; take the first"


_ROUTE = Exercise(
    name="l16.route",
    reference=route,
    cases=[
        Case("one replica has the beginning", ([7, 8, 9], [{1}, {7, 8}], [0, 0])),
        Case("both have a beginning: the longer one", ([7, 8, 9], [{7, 8, 9}, {7}], [5, 0])),
        Case("nobody has anything: the shortest queue", ([7, 8], [{1}, {2}, {3}], [2, 1, 4])),
        Case("equally long beginnings: the shortest queue", ([7, 8], [{7, 1}, {7, 2}], [3, 2])),
        Case("equal but for other blocks: the first", ([7], [{7, 1, 2}, {7}], [0, 0])),
        Case("equal in everything: the first", ([7, 8], [{7}, {7}, {7}], [1, 1, 1])),
        Case("later blocks without the first are useless", ([7, 8, 9], [{8, 9}, {7}], [0, 3])),
        Case("a gap ends the beginning", ([7, 8, 9, 10], [{7, 9, 10}, {7, 8}], [0, 3])),
        Case("later blocks without the first do not outweigh a queue", ([7, 8, 9], [{8, 9}, set()], [5, 0])),
        Case("the last block counts, too", ([7, 8], [{7}, {7, 8}], [0, 4])),
        Case("a long queue does not outweigh a block", ([7, 8, 9], [set(), {7}], [0, 99])),
        Case("three different beginnings", ([7, 8, 9], [{7, 8}, {7}, set()], [5, 0, 3])),
        Case("a beginning of two and a short queue are not enough", ([7, 8, 9], [{7, 8, 9}, set(), {7, 8}], [9, 1, 2])),
        Case("a prompt shorter than a block", ([], [{7}, {8}], [2, 1])),
        Case("many blocks of others", ([7], [{1, 2, 3, 4}, {7}], [0, 0])),
        Case("one replica", ([7, 8], [set()], [3])),
        Case("a block that stands twice", ([7, 7, 8], [{7}, {7, 8}], [0, 1])),
        Case("the second of three has most", ([3, 4, 5], [{3}, {3, 4, 5}, {3, 4}], [0, 9, 0])),
    ],
    hints=(
        "Of which blocks can a replica use the keys and values, if one in the middle is missing?",
        "Count blocks from the first on, and stop at the first that is not in cached[r]. Take the replica with the "
        "highest count; among equals the one with the lowest queued[r], and among those the first.",
        "def hits(replica):\n    count = 0\n    while …:\n        count += 1\n    return count\n\n"
        "return min(range(len(cached)), key=lambda r: (…, …))",
        body_of(route),
    ),
    wrong=mistakes.ROUTE,
    fallback_diagnosis=_about_route,
)

EXERCISES = [_COLUMN, _ROW, _HEADS, _SECONDS, _ROUTE]
