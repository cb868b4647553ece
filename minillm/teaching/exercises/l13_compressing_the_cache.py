"""Lesson 13, compressing the cache: channels, a low rank, RoPE's commutator, centres in the query, kept clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.compare import values_match
from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l13_mistakes as mistakes
from minillm.teaching.exercises._facts import about_tensor
from minillm.teaching.exercises._l13_reference import (
    absorb_centres,
    commutation_error,
    kept_channels,
    kept_clusters,
    low_rank,
)
from minillm.teaching.source import body_of


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _about_channels(attempt: Attempt) -> str | None:
    got, expected = attempt.got, attempt.expected
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return None
    width = attempt.case.args[1].shape[2]
    for head, (mine, right) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)):
        if wrong := [channel for channel in mine if not 0 <= channel < width]:
            return f"there is no channel {wrong[0]}: a head has channels 0 to {width - 1}"
        if len(set(mine)) < len(mine):
            return f"KV head {head} keeps a channel twice"
        if mine != sorted(mine):
            return "the channels are not in ascending order"
        if set(mine) != set(right):
            missing = next(channel for channel in right if channel not in mine)
            return (
                f"KV head {head} drops channel {missing}, although it keeps one with no higher score (of equals, the "
                "earlier one stays)"
            )
    return None


def _channel_cases() -> list[Case]:
    steep = torch.tensor([0.1, 1.0, 3.0, 0.3, 2.0, 0.5])
    unused = (
        torch.tensor([[[0.125, 2.0, 4.0, 0.25, 8.0, 0.5]]]),
        torch.tensor([[[8.0, 4.0, 0.125, 1.0, 0.015625, 8.0]]]),
    )
    one_sided = torch.tensor([[[3.0, -1.0, 0.25, 0.5]], [[-3.0, -1.0, 0.25, 0.5]]])
    peak = torch.full((8, 1, 4), 0.5)
    peak[0, 0, 3], peak[:, 0, 1] = 1.25, 1.0
    even = torch.ones(2, 1, 4)
    two = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]])
    return [
        Case("one head, one query, one key", (torch.tensor([[[1.0, 2.0, 1.0]]]), torch.tensor([[[5.0, 1.0, 3.0]]]), 2)),
        Case("the best channels are not the first ones", (steep.view(1, 1, 6), torch.ones(1, 1, 6), 3)),
        Case("a channel is large in the keys, and the query hardly uses it", (*unused, 2)),
        Case("queries of both signs in one channel", (one_sided, torch.ones(2, 1, 4), 2)),
        Case("keys of both signs in one channel", (torch.ones(2, 1, 4), one_sided, 2)),
        Case("a single large query", (peak, torch.ones(3, 1, 4), 1)),
        Case("a single large key", (torch.ones(3, 1, 4), peak, 1)),
        Case("two KV heads with a choice of their own", (two, torch.ones(2, 2, 4), 2)),
        Case("four query heads share two KV heads", (_random(3, 4, 6, seed=1), _random(5, 2, 6, seed=2), 3)),
        Case("all channels equal: the earlier ones", (even, even, 2)),
        Case("all channels stay", (_random(3, 4, 4, seed=3), _random(5, 2, 4, seed=4), 4)),
        Case("one of eight stays", (_random(4, 6, 8, seed=5), _random(9, 3, 8, seed=6), 1)),
        Case("32 queries over 60 keys", (_random(32, 6, 16, seed=7), _random(60, 2, 16, seed=8), 7)),
    ]


_CHANNELS = Exercise(
    name="l13.kept_channels",
    reference=kept_channels,
    cases=_channel_cases,
    hints=(
        "A channel matters only if queries *and* keys are large in it. What is its part in q · k, squared?",
        "Square the queries; split their heads into groups, one for each KV head (`unflatten`); average over queries "
        "and group: `[num_kv_heads, head_dim]`. Multiply by the mean of the squared keys. Take the `count` highest per "
        "row, then sort their indices.",
        "of_queries = queries.square().unflatten(1, (…, -1)).mean((…, …))\nof_keys = …\n"
        "best = (…).argsort(dim=1, descending=True, stable=True)[:, :count]\nreturn best.sort(dim=1).values",
        body_of(kept_channels),
    ),
    wrong=mistakes.CHANNELS,
    fallback_diagnosis=_about_channels,
)


def _same_up_to_signs(expected: object, got: object) -> str | None:
    """Compare two answers to `low_rank`; a singular vector may point either way."""
    return values_match(expected, _aligned(expected, got))


def _aligned(expected: object, got: object) -> object:
    """`got` with the signs of its vectors turned to those of `expected`, where both have the same shapes."""
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(part, Tensor) for part in got)):
        return got
    if any(part.shape != right.shape or part.dtype != right.dtype for part, right in zip(got, expected, strict=True)):
        return got
    if got[0].dim() != 2 or got[1].shape[-1:] != got[0].shape[1:]:
        return got
    signs = torch.where((got[0] * expected[0]).sum(0) < 0, -1.0, 1.0).to(got[0].dtype)
    return got[0] * signs, got[1] * signs


def _about_low_rank(attempt: Attempt) -> str | None:
    weight, _, rank = attempt.case.args
    got = _aligned(attempt.expected, attempt.got)
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(part, Tensor) for part in got)):
        return "return two tensors: the basis and the absorbed projection"
    for name, part, right in zip(("basis", "absorbed matrix"), got, attempt.expected, strict=True):
        if part.shape != right.shape:
            return f"the {name} has shape {list(part.shape)}; it should have {list(right.shape)}"
    basis, absorbed = got
    if values_match(attempt.expected[0], basis) is None:
        fact = about_tensor(
            attempt.expected[1], absorbed, ("query head", "row", "coordinate"), "the absorbed projection"
        )
        return f"the basis is right; {fact}" if fact else None
    if values_match(torch.eye(rank, dtype=basis.dtype), basis.T @ basis) is not None:
        return "the vectors of the basis do not have length 1, or are not at right angles"
    lost = (weight - basis @ (basis.T @ weight)).norm() / weight.norm()
    least = (weight - attempt.expected[0] @ (attempt.expected[0].T @ weight)).norm() / weight.norm()
    return f"this basis loses {lost:.1%} of the weight, and the best one of rank {rank} loses {least:.1%}"


def _low_rank_cases() -> list[Case]:
    weight = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    same = _random(2, 3, 4, seed=1).repeat_interleave(2, 0)
    return [
        Case("a diagonal weight: the first vector is the first axis", (weight, torch.ones(1, 3, 2), 1)),
        Case("full rank: nothing is lost", (weight, torch.ones(1, 3, 2), 2)),
        Case("the large row comes last", (weight.flip(0), torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]), 1)),
        Case("a square weight that is not symmetric", (_random(4, 4, seed=2), _random(1, 4, 4, seed=3), 2)),
        Case("two KV heads, and a query head for each", (_random(6, 5, seed=4), _random(2, 5, 3, seed=5), 2)),
        Case("two KV heads with two query heads each", (_random(8, 5, seed=6), _random(4, 5, 4, seed=7), 3)),
        Case("query heads of a group with equal projections", (_random(8, 6, seed=8), same, 2)),
        Case("one KV head for three query heads", (_random(4, 9, seed=9), _random(3, 9, 4, seed=10), 3)),
        Case("as many vectors as a head has channels", (_random(8, 12, seed=11), _random(4, 12, 4, seed=12), 4)),
    ]


_LOW_RANK = Exercise(
    name="l13.low_rank",
    reference=low_rank,
    cases=_low_rank_cases,
    compare=_same_up_to_signs,
    hints=(
        "Every value is weight @ x, so it lies in the space that the columns of `weight` span. Which directions of "
        "that space does the SVD sort by size? Which part of them belongs to the KV head that a query head reads?",
        "The basis is U[:, :rank] of torch.linalg.svd(weight, full_matrices=False). Its rows are the channels of all "
        "KV heads: unflatten(0, (-1, head_dim)) gives one part per KV head. Repeat each part for the query heads that "
        "read it (repeat_interleave) and multiply `out` by it.",
        "basis = torch.linalg.svd(…).U[…]\nof_heads = basis.unflatten(0, (-1, …))   # [num_kv_heads, head_dim, rank]\n"
        "group = …\nreturn basis, out @ of_heads.repeat_interleave(…, 0)",
        body_of(low_rank),
    ),
    wrong=mistakes.LOW_RANK,
    fallback_diagnosis=_about_low_rank,
    parts=("basis", "absorbed"),
)


def _about_error(attempt: Attempt) -> str | None:
    matrix, frequencies, positions = attempt.case.args
    if not isinstance(attempt.got, int | float):
        return None
    if attempt.got < 0:
        return "a norm is never negative"
    if attempt.expected < 1e-5:
        return f"this matrix commutes with every rotation of RoPE, so the error is 0; {attempt.got:g} is not"
    if attempt.got < 1e-6:
        return f"this matrix does not commute with RoPE: at some position the error is {attempt.expected:g}"
    each = [commutation_error(matrix, frequencies, [position]) for position in positions]
    return "the errors at the positions are " + ", ".join(f"{error:.4g}" for error in each)


def _scaled_rotations(d: int, seed: int) -> Tensor:
    x, y = _random(2, d // 2, seed=seed)
    return torch.cat((torch.cat((x.diag(), -y.diag()), 1), torch.cat((y.diag(), x.diag()), 1)))


def _error_cases() -> list[Case]:
    two, four = torch.tensor([1.0, 0.25]), torch.tensor([1.0, 0.1, 0.01, 0.001])
    quarter = torch.tensor([torch.pi / 2])
    return [
        Case(
            "a quarter turn, and a matrix that stretches one axis",
            (torch.tensor([[2.0, 0.0], [0.0, 1.0]]), quarter, [1]),
        ),
        Case("the identity commutes with everything", (torch.eye(4), two, [1, 5])),
        Case("a scaled rotation of each pair commutes", (_scaled_rotations(4, 1), two, [1, 2, 7])),
        Case("position 0: RoPE does nothing", (_random(4, 4, seed=2), two, [0])),
        Case("a random matrix at one position", (_random(4, 4, seed=3), two, [3])),
        Case("the same, a thousand times as large", (1000 * _random(4, 4, seed=3), two, [3])),
        Case("several positions, the largest error in the middle", (_random(4, 4, seed=4), two, [1, 3, 6])),
        Case("the largest error first", (torch.tensor([[2.0, 0.0], [0.0, 1.0]]), quarter, [1, 2])),
        Case("a diagonal matrix that is equal within each pair", (torch.tensor([1.0, 2.0, 1.0, 2.0]).diag(), two, [4])),
        Case("a diagonal matrix that differs within a pair", (torch.tensor([1.0, 2.0, 3.0, 2.0]).diag(), two, [4])),
        Case("equal within (0, 1) and within (2, 3)", (torch.tensor([1.0, 1.0, 2.0, 2.0]).diag(), two, [4])),
        Case("a projection onto one direction", (torch.ones(8, 8) / 8, four, [1, 10, 100])),
        Case("slow pairs mixed with fast ones", (torch.eye(8).roll(1, 0), four, [2, 30])),
    ]


_ERROR = Exercise(
    name="l13.commutation_error",
    reference=commutation_error,
    cases=_error_cases,
    hints=(
        "RoPE at position p is a matrix, too. Which four blocks, each diagonal, does it have if pair i is channels i "
        "and i + d / 2?",
        "R = [[C, -S], [S, C]] with C and S the diagonal matrices of cos and sin of position · frequencies. Then the "
        "Frobenius norm (`.norm()`) of R M - M R, over that of M; the largest over the positions, as a float.",
        "for position in positions:\n    cos, sin = (…).cos().diag(), …\n"
        "    rotation = torch.cat((torch.cat((cos, …), 1), torch.cat((…, cos), 1)))\n"
        "    errors.append(float((… - …).norm() / …))\nreturn max(errors)",
        body_of(commutation_error),
    ),
    wrong=mistakes.ERROR,
    fallback_diagnosis=_about_error,
)


def _about_table(attempt: Attempt) -> str | None:
    got, expected = attempt.got, attempt.expected
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return None
    wrong = [values_match(expected[row], got[row]) is not None for row in (0, 1)]
    query, centres = attempt.case.args
    if wrong[0] and not wrong[1] and not torch.isclose(expected[0, 0].sum(), got[0, 0].sum(), rtol=1e-4):
        return (
            "the sine's row is right, the cosine's is not: at position 0 all angles are 0, so table[0] summed over "
            f"pairs is query · centre, {float(query @ centres[0]):g} for the first centre; yours gives "
            f"{float(got[0, 0].sum()):g}"
        )
    if wrong[1] and not wrong[0]:
        return (
            "the cosine's row is right, the sine's is not: it should be the query's product, pair by pair, with the "
            "centre turned by a quarter"
        )
    return about_tensor(expected, got, ("row", "centre", "pair"), "the table")


_CENTRES = Exercise(
    name="l13.absorb_centres",
    reference=absorb_centres,
    cases=lambda: [
        Case("one pair: query and centre on the first axis", (torch.tensor([2.0, 0.0]), torch.tensor([[3.0, 0.0]]))),
        Case("query on the first axis, centre on the second", (torch.tensor([2.0, 0.0]), torch.tensor([[0.0, 3.0]]))),
        Case("query on the second axis, centre on the first", (torch.tensor([0.0, 2.0]), torch.tensor([[3.0, 0.0]]))),
        Case("both on the second axis", (torch.tensor([0.0, 2.0]), torch.tensor([[0.0, 3.0]]))),
        Case("one pair in general", (torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 5.0]]))),
        Case(
            "two pairs: channels 0 and 2, channels 1 and 3",
            (torch.tensor([1.0, 2, 3, 4]), torch.tensor([[5.0, 6, 7, 9]])),
        ),
        Case("three centres", (_random(4, seed=1), _random(3, 4, seed=2))),
        Case("sixteen centres of 8 channels", (_random(8, seed=3), _random(16, 8, seed=4))),
        Case("a centre at the origin adds nothing", (_random(6, seed=5), torch.zeros(2, 6))),
    ],
    hints=(
        "Write out q · R(p) c for one pair: R(p) c is (x cos - y sin, x sin + y cos). Which products stand beside the "
        "cosine, which beside the sine?",
        "q · R(p) c = cos · (qx x + qy y) + sin · (qy x - qx y). The first halves of query and centres are x, the "
        "second halves y (`chunk`). Stack both rows; do not sum over the pairs.",
        "qx, qy = query.chunk(2)\nx, y = centres.chunk(2, dim=1)\nreturn torch.stack((qx * x + …, … - …))",
        body_of(absorb_centres),
    ),
    wrong=mistakes.CENTRES,
    fallback_diagnosis=_about_table,
)


def _about_kept(attempt: Attempt) -> str | None:
    queries, centroids, sizes, threshold = attempt.case.args
    got, expected = attempt.got, attempt.expected
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != torch.bool:
        return None
    scores = queries @ centroids.T * queries.shape[1] ** -0.5
    weights = (scores - (scores + sizes.log()).logsumexp(1, keepdim=True)).exp().mean(0) * sizes.sum()
    cluster = int((got != expected).nonzero()[0])
    word = "leaves out" if expected[cluster] else "keeps"
    return (
        f"it {word} cluster {cluster}, whose keys have {float(weights[cluster]):.3g} times the weight of equal "
        f"attention; the threshold is {threshold:g}"
    )


def _cluster_cases() -> list[Case]:
    near = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, 0.0]])
    sizes = torch.tensor([1.0, 2.0, 20.0])
    many, counts = _random(24, 8, seed=1) * 2, torch.arange(1.0, 25.0)
    crowd = torch.tensor([1.0, 1.0, 1.0, 1.0, 60.0])
    spread = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [-2.0, 0.0]])
    both = torch.tensor([[3.0, 0.0], [-3.0, 0.0]])
    apart = torch.tensor([[900.0, 0.0], [1.0, 0.0]])
    return [
        Case("three clusters, one query head", (torch.tensor([[1.0, 0.0]]), near, sizes, 1.0)),
        Case("threshold 0 keeps everything", (torch.tensor([[1.0, 0.0]]), near, sizes, 0.0)),
        Case("threshold 0 keeps even a weight of 0", (torch.tensor([[900.0, 0.0]]), near, sizes, 0.0)),
        Case("scores of many thousands", (torch.tensor([[9000.0, 0.0]]), near, sizes, 0.5)),
        Case(
            "two clusters with scores in the thousands",
            (torch.tensor([[900.0, 0.0]]), torch.tensor([[4.0, 0.0], [3.0, 0.0], [-4.0, 0.0]]), sizes, 0.5),
        ),
        Case("a large cluster with little weight per key", (torch.tensor([[1.0, 0.0]]), spread, crowd, 0.7)),
        Case("the same, a high threshold", (torch.tensor([[1.0, 0.0]]), spread, crowd, 2.5)),
        Case("equal weights, a threshold just below 1", (torch.zeros(1, 4), _random(5, 4, seed=2), crowd, 0.99)),
        Case("equal weights, a threshold just above 1", (torch.zeros(1, 4), _random(5, 4, seed=2), crowd, 1.01)),
        Case("two query heads that look to opposite sides", (both, spread, torch.ones(5), 0.6)),
        Case("the same, a higher threshold", (both, spread, torch.ones(5), 1.5)),
        Case("one query head has far larger scores than the other", (apart, spread[:4], torch.ones(4), 0.4)),
        Case("three query heads over 24 clusters", (_random(3, 8, seed=3), many, counts, 0.5)),
        Case("a lower threshold", (_random(3, 8, seed=3), many, counts, 0.1)),
        Case("a higher threshold", (_random(3, 8, seed=4), many, counts, 2.0)),
    ]


_CLUSTERS = Exercise(
    name="l13.kept_clusters",
    reference=kept_clusters,
    cases=_cluster_cases,
    hints=(
        "Suppose every key stood exactly on its centroid. What would softmax give one key of cluster i?",
        "scores = q · c / √d, `[g, num_clusters]`. The sum over all *keys* counts each cluster n times: n · e^s is "
        "e^(s + log n), so logsumexp over scores + log sizes is the sum's logarithm. Subtract it, exp, average over "
        "the query heads. Equal attention would give 1 / sizes.sum().",
        "scores = … * queries.shape[1] ** -0.5\ntotal = (scores + …).logsumexp(1, keepdim=True)\n"
        "weights = (…).exp().mean(0)\nreturn weights * … >= threshold",
        body_of(kept_clusters),
    ),
    wrong=mistakes.CLUSTERS,
    fallback_diagnosis=_about_kept,
)

EXERCISES = [_CHANNELS, _LOW_RANK, _ERROR, _CENTRES, _CLUSTERS]
