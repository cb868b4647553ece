"""Lesson 17, beside inference: a log-sum-exp in tiles, a backward pass in chunks, a block low-rank product, one bit per
weight, weighted k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.compare import values_match
from minillm.teaching.drives import l17 as drive
from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l17_mistakes as mistakes
from minillm.teaching.exercises._facts import about_tensor, unless
from minillm.teaching.exercises._l17_reference import (
    backward_in_chunks,
    blast_apply,
    centroid_step,
    one_bit_and_exact,
    tiled_lse,
)
from minillm.teaching.source import body_of


def _part_of(attempt: Attempt, name: str) -> tuple[object, object]:
    """The part of a driven answer that was expected, and the one that came."""
    return attempt.expected[name], attempt.got[name]  # type: ignore[index]


def _about_lse(attempt: Attempt) -> str | None:
    expected, got = _part_of(attempt, "returned")
    assert isinstance(expected, Tensor)
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return f"return one number for each of the {len(expected)} rows of x"
    return about_tensor(expected, got, ("row",)) or unless(
        attempt, "one tile at a time", "a tensor is larger than x and than what a tile needs"
    )


def _lse_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(17)

    def case(text: str, n: int, m: int, width: int, temperature: float, tile: int, size: float = 1.0) -> Case:
        x, y = (size * torch.randn(rows, width, generator=draw) for rows in (n, m))
        return Case(text, (x, y, temperature, tile))

    ones = torch.tensor([[1.0]])
    return [
        Case("one row, two tiles of one", (ones, torch.tensor([[2.0], [2.0]]), 1.0, 1)),
        Case("one row, one tile", (ones, torch.tensor([[0.5], [-1.0], [0.25]]), 0.5, 3)),
        case("three tiles of two", 3, 6, 4, 0.7, 2),
        case("the last tile is not full", 4, 7, 3, 1.3, 3),
        case("a tile that is larger than all", 2, 3, 3, 0.9, 8),
        case("similarities in the hundreds", 3, 9, 4, 0.01, 4),
        case("large negative similarities", 2, 5, 2, 0.02, 2, 2.0),
        case("many rows, small tiles", 6, 40, 2, 0.5, 4),
        case("one row, many tiles", 1, 40, 3, 0.5, 4),
        case("one row of y more than a tile", 2, 5, 4, 0.8, 4),
        case("eight tiles of three", 8, 24, 4, 0.6, 3),
        Case("similarities far below -100", (ones, torch.tensor([[-300.0], [-301.0], [-302.0]]), 1.0, 2)),
        Case("similarities far below -10000", (ones, torch.tensor([[-2e4], [-3e4], [-4e4]]), 1.0, 2)),
    ]


_LSE = Exercise(
    name="l17.tiled_lse",
    reference=tiled_lse,
    cases=_lse_cases,
    hints=(
        "Lesson 9 merges two parts of a softmax. What must be kept of a part where only the sum counts?",
        "Keep one number for each row of x: the log-sum-exp so far, at first -∞. For each tile of y compute the "
        "similarities, divide by the temperature, take the log-sum-exp of each row, and merge: torch.logaddexp(a, b) "
        "is log(e^a + e^b) without overflow.",
        "lse = torch.full((len(x),), -torch.inf)\nfor first in range(0, …, tile):\n    "
        "part = (x @ … / …).logsumexp(1)\n    lse = torch.logaddexp(…, …)\nreturn lse",
        body_of(tiled_lse),
    ),
    wrong=mistakes.LSE,
    fallback_diagnosis=_about_lse,
    run_case=drive.lse_of_tiles,
)


def _about_gradients(attempt: Attempt) -> str | None:
    expected, got = _part_of(attempt, "returned")
    assert isinstance(expected, Tensor)
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return f"return what was sent to the rows: {list(expected.shape)}, like kept"
    right, arrived = _part_of(attempt, "gradient of the weight")
    if not isinstance(arrived, Tensor):
        return "no gradient has arrived at the weight: is backward() called?"
    if fact := about_tensor(expected, got, ("row", "channel"), "what was sent"):
        return fact
    fact = about_tensor(right, arrived, ("row", "column"), "the gradient of the weight")  # type: ignore[arg-type]
    return fact or unless(attempt, "one graph at a time", "the graphs of several chunks exist at a time")


def _gradient_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(18)

    def case(text: str, width: int, *chunks: tuple[int, int]) -> Case:
        tokens = torch.randn(chunks[-1][1], width, generator=draw)
        return Case(text, (tokens, torch.randn(width, width, generator=draw), list(chunks)))

    return [
        case("two chunks of one token", 1, (0, 1), (1, 2)),
        case("one chunk: nothing is sent", 2, (0, 3)),
        case("two chunks", 2, (0, 2), (2, 4)),
        case("three chunks: the first is read twice", 2, (0, 2), (2, 4), (4, 6)),
        case("a short last chunk", 3, (0, 4), (4, 8), (8, 9)),
        case("chunks of different lengths", 3, (0, 1), (1, 4), (4, 6), (6, 11)),
        case("six chunks", 2, *((3 * i, 3 * i + 3) for i in range(6))),
    ]


_BACKWARD = Exercise(
    name="l17.backward_in_chunks",
    reference=backward_in_chunks,
    cases=_gradient_cases,
    hints=(
        "The rows of a chunk change its own loss, and the losses of all later chunks. Which of these gradients does "
        "loss.backward() of this chunk know?",
        "Go from the last chunk to the first. Give run a past that wants a gradient. Then call backward on the loss "
        "plus the sum of rows · what was sent to them: its derivative with respect to the rows is what was sent. "
        "At last add past.grad to what was sent to all rows before.",
        "sent = torch.zeros_like(kept)\nfor start, end in reversed(chunks):\n    past = kept[…].detach().requires_grad_"
        "()\n    loss, rows = run(start, end, past)\n    (loss + …).backward()\n    sent[…] += …\nreturn sent",
        body_of(backward_in_chunks),
    ),
    wrong=mistakes.BACKWARD,
    fallback_diagnosis=_about_gradients,
    run_case=drive.gradients,
)


def _about_product(attempt: Attempt) -> str | None:
    expected, got = _part_of(attempt, "returned")
    assert isinstance(expected, Tensor)
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return f"return {list(expected.shape)}: a row of all outputs for each row of x"
    return about_tensor(expected, got, ("row", "output")) or unless(
        attempt, "without the matrix", "a tensor is larger than the products with x need: no block of W is to be made"
    )


def _blast_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(19)

    def case(text: str, rows: int, blocks: int, high: int, wide: int, rank: int) -> Case:
        shapes = ((rows, blocks * wide), (blocks, high, rank), (blocks, blocks, rank), (blocks, wide, rank))
        return Case(text, tuple(torch.randn(*shape, generator=draw) for shape in shapes))

    def numbers(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    u, v = numbers(1, 1).view(2, 1, 1), numbers(1, 2).view(2, 1, 1)
    return [
        Case("two blocks of one number", (numbers(1, 10).view(1, 2), u, numbers(1, 2, 3, 4).view(2, 2, 1), v)),
        case("one block: a plain low rank", 2, 1, 3, 4, 2),
        case("two blocks of rank one", 1, 2, 3, 2, 1),
        case("two blocks of rank two", 3, 2, 3, 4, 2),
        case("three blocks, more outputs than inputs", 2, 3, 5, 2, 2),
        case("four blocks, square", 2, 4, 3, 3, 3),
        case("a large matrix of rank one", 1, 4, 20, 20, 1),
    ]


_BLAST = Exercise(
    name="l17.blast_apply",
    reference=blast_apply,
    cases=_blast_cases,
    hints=(
        "Which part of y_i = U_i Σ_j s_ij ⊙ (V_jᵀ x_j) does not depend on i? Compute it once for each j.",
        "First z_j = V_jᵀ x_j for every block of inputs: [n, blocks, rank]. Then for each i the sum over j of "
        "s_ij ⊙ z_j, again [n, blocks, rank]. Then U_i times that, and the blocks side by side.",
        'z = torch.einsum("njq,jqr->njr", x.unflatten(1, (…, -1)), v)\nmixed = torch.einsum("…,…->nir", s, z)\n'
        'return torch.einsum("…,…->nip", u, mixed).flatten(1)',
        body_of(blast_apply),
    ),
    wrong=mistakes.BLAST,
    fallback_diagnosis=_about_product,
    run_case=drive.product,
)


def _about_one_bit(attempt: Attempt) -> str | None:
    count = attempt.case.args[1]
    got, expected = attempt.got, attempt.expected
    shapes = [list(part.shape) for part in expected]  # type: ignore[attr-defined]
    if not isinstance(got, tuple) or [list(getattr(part, "shape", ())) for part in got] != shapes:
        return f"return the scales {shapes[0]} and the exact part {shapes[1]}"
    scales, exact = got
    if int((exact != 0).sum()) > count:
        return f"the exact part has {int((exact != 0).sum())} numbers that are not 0; {count} weights are exact"
    if values_match(expected[0], scales):  # type: ignore[index]
        fact = about_tensor(expected[0], scales, ("row",), "`scales`")  # type: ignore[index]
        return fact or "`scales` is wrong, and the exact part depends on it"
    return about_tensor(expected[1], exact, ("row", "column"), "the exact part")  # type: ignore[index]


def _one_bit_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(20)
    three = torch.tensor([[1.0, -3.0, 2.0]])
    sure = torch.tensor([[9.0, -8.0], [1.0, -2.0]])
    with_zero = torch.tensor([[0.0, 1.0, -2.0, 6.0], [0.5, 0.0, 0.0, -3.0]])
    return [
        Case("one row, nothing exact", (three, 0)),
        Case("one row, one exact weight", (torch.tensor([[1.0, -8.0, 2.0]]), 1)),
        Case("a row in which all weights are exact", (sure, 2)),
        Case("zeros", (with_zero, 2)),
        Case("a zero that is exact", (torch.tensor([[0.0, 4.0], [3.0, -2.0]]), 4)),
        Case("equal weights: any one of them is exact", (torch.tensor([[2.0, -2.0, 2.0, -2.0]]), 1)),
        Case("positive weights only", (torch.tensor([[1.0, 5.0, 2.0], [4.0, 0.5, 3.0]]), 2)),
        Case("the exact weights are all in one row", (torch.tensor([[1.0, 2.0, -1.5], [7.0, -9.0, 8.0]]), 2)),
        Case("a random matrix", (torch.randn(4, 6, generator=draw), 4)),
        Case("a wide random matrix", (torch.randn(3, 16, generator=draw), 6)),
    ]


_ONE_BIT = Exercise(
    name="l17.one_bit_and_exact",
    reference=one_bit_and_exact,
    cases=_one_bit_cases,
    hints=(
        "For which a is Σ (w - a · sign(w))² smallest? Set the derivative to 0. And which weights are in this sum?",
        "Mark the count largest |W| of the whole matrix. A row's scale is the sum of |W| over its other weights, "
        "divided by their number (at least 1). The exact part is, at the marked weights, W minus scale · sign, "
        "elsewhere 0.",
        "chosen = torch.zeros_like(weight, dtype=torch.bool)\nchosen.view(-1)[….topk(count).indices] = True\n"
        "scales = weight.abs().masked_fill(chosen, 0).sum(1) / …\n"
        "return scales, torch.where(chosen, weight - …, 0.0)",
        body_of(one_bit_and_exact),
    ),
    wrong=mistakes.ONE_BIT,
    fallback_diagnosis=_about_one_bit,
    parts=("scales", "exact part"),
)


def _about_centroids(attempt: Attempt) -> str | None:
    points, weights, centroids = attempt.case.args
    expected, got = attempt.expected, attempt.got
    assert isinstance(expected, Tensor)
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return f"return {list(expected.shape)}: as many centroids as there were"
    wrong = int((got - expected).abs().sum(1).nan_to_num(1.0).argmax())
    own = torch.cdist(points, centroids).argmin(1) == wrong
    if not own.any():
        return f"no point is nearest to centroid {wrong} (counted from 0), so it stays where it is"
    if torch.equal(got[wrong], centroids[wrong]):
        return f"centroid {wrong} (counted from 0) has not moved, although points are nearest to it"
    return (
        f"centroid {wrong} (counted from 0) has {int(own.sum())} points whose weights sum to "
        f"{float(weights[own].sum()):.4g}; it is not at their weighted mean"
    )


def _centroid_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(21)

    def case(text: str, n: int, width: int, k: int) -> Case:
        points, weights = torch.randn(n, width, generator=draw), 0.2 + 4 * torch.rand(n, generator=draw)
        return Case(text, (points, weights, torch.randn(k, width, generator=draw)))

    line = torch.tensor([[1.0], [2.0], [10.0]])
    square = torch.tensor([[0.0, 0.0], [0.0, 2.0], [5.0, 0.0], [5.0, 3.0]])
    return [
        Case("three points, one centroid", (line, torch.tensor([1.0, 1.0, 2.0]), torch.tensor([[4.0]]))),
        Case("two centroids", (line, torch.tensor([3.0, 1.0, 5.0]), torch.tensor([[0.0], [9.0]]))),
        Case("a centroid that no point is nearest to", (line, torch.ones(3), torch.tensor([[1.5], [99.0], [11.0]]))),
        Case(
            "points that differ in the second channel",
            (square, torch.tensor([1.0, 2.0, 3.0, 0.5]), torch.tensor([[2.0, 0.0], [2.0, 3.0]])),
        ),
        Case("weights that sum to less than 1", (line[:2], torch.tensor([0.2, 0.3]), torch.tensor([[4.0]]))),
        case("random points", 9, 2, 3),
        case("many random points in three dimensions", 24, 3, 5),
        case("as many centroids as points", 4, 2, 4),
    ]


_CENTROIDS = Exercise(
    name="l17.centroid_step",
    reference=centroid_step,
    cases=_centroid_cases,
    hints=(
        "Which point minimises Σ w · |p - c|² over some points p with weights w?",
        "torch.cdist(points, centroids) has the distances, [n, k]; argmin over the second dimension is each point's "
        "centroid. A centroid moves to Σ w p / Σ w over its own points, or stays if it has none.",
        "nearest = torch.cdist(…, …).argmin(1)\nmoved = centroids.clone()\nfor index in nearest.unique():\n"
        "    own = nearest == index\n    moved[index] = (points[own] * …).sum(0) / …\nreturn moved",
        body_of(centroid_step),
    ),
    wrong=mistakes.CENTROIDS,
    fallback_diagnosis=_about_centroids,
)

EXERCISES = [_LSE, _BACKWARD, _BLAST, _ONE_BIT, _CENTROIDS]
