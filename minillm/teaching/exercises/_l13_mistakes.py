"""Lesson 13, planted mistakes: wrong versions of each exercise, with the sentence that names them."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l13_reference import (
    absorb_centres,
    commutation_error,
    kept_channels,
    kept_clusters,
    low_rank,
)
from minillm.teaching.source import wrong_versions

# ------------------------------------------------------------------------------------------------------ kept_channels

_OF_QUERIES = "queries.square().unflatten(1, (keys.shape[1], -1)).mean((0, 2))"
_OF_KEYS = "keys.square().mean(0)"
_SCORE = "(of_queries * of_keys)"
_SORTED = "best.sort(dim=1).values"


def _first_channels(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    return torch.arange(count).expand(keys.shape[1], -1)


def _dropped(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    rest = keys.shape[2] - count
    of_all = (queries.square().unflatten(1, (keys.shape[1], -1)).mean((0, 2)) * keys.square().mean(0)).argsort(dim=1)
    return of_all[:, :rest].sort(dim=1).values


def _one_set(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    of_queries = queries.square().unflatten(1, (keys.shape[1], -1)).mean((0, 2))
    scores = (of_queries * keys.square().mean(0)).sum(0)
    best = scores.argsort(descending=True, stable=True)[:count].sort().values
    return best.expand(keys.shape[1], -1)


CHANNELS = (
    WrongVersion("returns the first channels, whatever the scores", _first_channels),
    WrongVersion("returns the channels to be dropped; return those that stay", _dropped),
    WrongVersion("chooses one set of channels for all KV heads; each has its own", _one_set),
    *wrong_versions(
        kept_channels,
        {
            "keeps the channels with the lowest scores": ("descending=True", "descending=False"),
            "scores by the keys alone; a channel that no query uses adds nothing to a score": (_SCORE, "of_keys"),
            "scores by the queries alone; a channel in which all keys are small adds nothing": (_SCORE, "of_queries"),
            "adds the two means; the square of a product is a product of squares": (_SCORE, "(of_queries + of_keys)"),
            "uses absolute values of the queries instead of squares": (
                _OF_QUERIES,
                _OF_QUERIES.replace("square", "abs"),
            ),
            "uses absolute values of the keys instead of squares": (_OF_KEYS, "keys.abs().mean(0)"),
            "averages the queries before squaring: positive and negative ones cancel": (
                _OF_QUERIES,
                "queries.unflatten(1, (keys.shape[1], -1)).mean((0, 2)).square()",
            ),
            "averages the keys before squaring: positive and negative ones cancel": (
                _OF_KEYS,
                "keys.mean(0).square()",
            ),
            "takes the largest square of the queries instead of their mean": (
                _OF_QUERIES,
                _OF_QUERIES.replace("mean", "amax"),
            ),
            "takes the largest square of the keys instead of their mean": (_OF_KEYS, "keys.square().amax(0)"),
            "uses the last query only": (_OF_QUERIES, _OF_QUERIES.replace("queries.square", "queries[-1:].square")),
            "uses the last key only": (_OF_KEYS, "keys[-1].square()"),
            "uses the first query head of each group only; all of them read this KV head": (
                _OF_QUERIES,
                "queries.square().unflatten(1, (keys.shape[1], -1))[:, :, 0].mean(0)",
            ),
            "deals the query heads out in turn; neighbours share a KV head": (
                _OF_QUERIES,
                "queries.square().unflatten(1, (-1, keys.shape[1])).mean((0, 1))",
            ),
            "returns the channels in the order of their scores, not ascending": (_SORTED, "best"),
            "takes the last of equals; the earlier channel should win": (
                f"{_SCORE}.argsort(dim=1, descending=True, stable=True)[:, :count]",
                f"keys.shape[2] - 1 - {_SCORE}.flip(1).argsort(dim=1, descending=True, stable=True)[:, :count]",
            ),
            "keeps one channel too few": ("[:, :count]", "[:, : count - 1]"),
            "keeps one channel too many": ("[:, :count]", "[:, : count + 1]"),
            "returns int16; indices for `gather` are int64": (_SORTED, f"{_SORTED}.to(torch.int16)"),
        },
    ),
)

# ----------------------------------------------------------------------------------------------------------- low_rank

_SVD = "torch.linalg.svd(weight, full_matrices=False).U[:, :rank]"
_RETURN = "return basis, out @ of_heads.repeat_interleave(group, 0)"


def _only_first_head(weight: Tensor, out: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    basis, _ = low_rank(weight, out, rank)
    return basis, out @ basis[: out.shape[2]]


def _swapped(weight: Tensor, out: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    basis, absorbed = low_rank(weight, out, rank)
    return absorbed, basis


def _out_through_the_basis(weight: Tensor, out: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    basis, absorbed = low_rank(weight, out, rank)
    of_heads = basis.unflatten(0, (-1, out.shape[2])).repeat_interleave(len(out) // (len(basis) // out.shape[2]), 0)
    return basis, absorbed @ of_heads.transpose(1, 2)


LOW_RANK = (
    WrongVersion("absorbs the part of the first KV head into all query heads", _only_first_head),
    WrongVersion("returns the absorbed projection first", _swapped),
    WrongVersion(
        "multiplies the basis in and its transpose again: that restores values; with the basis alone, `out` takes the "
        "coordinates themselves",
        _out_through_the_basis,
    ),
    *wrong_versions(
        low_rank,
        {
            "takes the last singular vectors instead of the first": (_SVD, _SVD.replace("[:, :rank]", "[:, -rank:]")),
            "scales the vectors by the singular values; a basis has vectors of length 1": (
                _SVD,
                f"{_SVD} * torch.linalg.svdvals(weight)[:rank]",
            ),
            "returns the right singular vectors: they span what goes into the projection, not what comes out": (
                _SVD,
                "torch.linalg.svd(weight, full_matrices=False).Vh[:rank].T",
            ),
            "keeps one vector too few": ("[:, :rank]", "[:, : rank - 1]"),
            "keeps all vectors: nothing is truncated": ("[:, :rank]", ""),
            "takes the first rows of the vectors instead of the first vectors": ("[:, :rank]", "[:rank]"),
            "returns the basis transposed": (_RETURN, _RETURN.replace("basis,", "basis.T,")),
            "gives the query heads the KV heads in turn; neighbours share one": (
                ".repeat_interleave(group, 0)",
                ".repeat(group, 1, 1)",
            ),
            "returns `out` unchanged: nothing is absorbed": (_RETURN, "return basis, out"),
            "absorbs the weight's own columns instead of the basis": (
                "of_heads = basis.unflatten",
                "of_heads = weight[:, :rank].unflatten",
            ),
        },
    ),
)

# -------------------------------------------------------------------------------------------------- commutation_error

_COS_SIN = "cos, sin = (position * frequencies).cos().diag(), (position * frequencies).sin().diag()"
_ROTATION = "rotation = torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))"
_ERROR = "(rotation @ matrix - matrix @ rotation).norm() / matrix.norm()"

ERROR = wrong_versions(
    commutation_error,
    {
        "rotates the pairs (0, 1), (2, 3), …; here pair i is channels i and i + d / 2": (
            _ROTATION,
            "order = torch.arange(len(matrix)).view(-1, 2).T.flatten()\n"
            "        rotation = torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))"
            "[order.argsort()][:, order.argsort()]",
        ),
        "does not divide by the norm of the matrix": (_ERROR, "(rotation @ matrix - matrix @ rotation).norm()"),
        "compares R M with M instead of with M R": (_ERROR, "(rotation @ matrix - matrix).norm() / matrix.norm()"),
        "compares R M with M Rᵀ; both sides have the same rotation": (
            _ERROR,
            "(rotation @ matrix - matrix @ rotation.T).norm() / matrix.norm()",
        ),
        "compares R M Rᵀ with M Rᵀ": (
            _ERROR,
            "(rotation @ matrix @ rotation.T - matrix @ rotation.T).norm() / (2 * matrix.norm())",
        ),
        "adds R M and M R instead of subtracting": (
            _ERROR,
            "(rotation @ matrix + matrix @ rotation).norm() / matrix.norm()",
        ),
        "takes the largest entry instead of the Frobenius norm": (
            _ERROR,
            "(rotation @ matrix - matrix @ rotation).abs().max() / matrix.abs().max()",
        ),
        "forgets the root in the norm": (
            _ERROR,
            "(rotation @ matrix - matrix @ rotation).square().sum() / matrix.square().sum()",
        ),
        "returns the mean over the positions instead of the largest": (
            "return max(errors)",
            "return sum(errors) / len(errors)",
        ),
        "returns the smallest error instead of the largest": ("return max(errors)", "return min(errors)"),
        "returns the error at the last position": ("return max(errors)", "return errors[-1]"),
        "returns the error at the first position": ("return max(errors)", "return errors[0]"),
        "adds the errors up": ("return max(errors)", "return sum(errors)"),
        "turns all pairs by the angle of the first pair": (
            _COS_SIN,
            _COS_SIN.replace("position * frequencies", "position * frequencies[:1].expand_as(frequencies)"),
        ),
        "turns by the frequencies alone, at every position": (
            _COS_SIN,
            _COS_SIN.replace("position * frequencies", "frequencies"),
        ),
        "divides the position by the frequencies instead of multiplying": (
            _COS_SIN,
            _COS_SIN.replace("position * frequencies", "position / frequencies"),
        ),
        "has the sine with the same sign twice: that is no rotation": (_ROTATION, _ROTATION.replace("-sin", "sin")),
        "leaves the sines out": (
            _ROTATION,
            _ROTATION.replace("-sin", "0 * sin").replace("(sin,", "(0 * sin,"),
        ),
        "swaps sine and cosine": (
            _COS_SIN,
            "sin, cos = (position * frequencies).cos().diag(), (position * frequencies).sin().diag()",
        ),
    },
)

# ----------------------------------------------------------------------------------------------------- absorb_centres

_HALVES = "qx, qy = query.chunk(2)"
_CENTRES = "x, y = centres.chunk(2, dim=1)"
_TABLE = "torch.stack((qx * x + qy * y, qy * x - qx * y))"


def _summed(query: Tensor, centres: Tensor) -> Tensor:
    return absorb_centres(query, centres).sum(2)


CENTRES = (
    WrongVersion("sums over the pairs; every pair turns by an angle of its own, so keep them apart", _summed),
    *wrong_versions(
        absorb_centres,
        {
            "has the sign of the sine's row wrong: it turns to the other side": (
                "qy * x - qx * y",
                "qx * y - qy * x",
            ),
            "subtracts in the cosine's row: at angle 0 the score is the dot product": (
                "qx * x + qy * y",
                "qx * x - qy * y",
            ),
            "adds in the sine's row": ("qy * x - qx * y", "qy * x + qx * y"),
            "returns the sine's row first": (_TABLE, "torch.stack((qy * x - qx * y, qx * x + qy * y))"),
            "takes neighbouring channels as pairs; here pair i is channels i and i + d / 2": (
                f"{_HALVES}\n    {_CENTRES}",
                "qx, qy = query[0::2], query[1::2]\n    x, y = centres[:, 0::2], centres[:, 1::2]",
            ),
            "takes neighbouring channels of the centres as pairs, but not of the query": (
                _CENTRES,
                "x, y = centres[:, 0::2], centres[:, 1::2]",
            ),
            "swaps the halves of the query": (_HALVES, "qy, qx = query.chunk(2)"),
            "swaps the halves of the centres": (_CENTRES, "y, x = centres.chunk(2, dim=1)"),
            "multiplies the halves one by one, which leaves out how a rotation mixes them": (
                _TABLE,
                "torch.stack((qx * x, qy * y))",
            ),
            "leaves out the second half of the query": (_TABLE, "torch.stack((qx * x, -qx * y))"),
            "divides by the root of d; scores are divided later": (_TABLE, f"{_TABLE} / len(query) ** 0.5"),
            "returns the table with the centres first, not cosine and sine": (_TABLE, f"{_TABLE}.transpose(0, 1)"),
        },
    ),
)

# ------------------------------------------------------------------------------------------------------ kept_clusters

_SCORES = "scores = queries @ centroids.T * queries.shape[1] ** -0.5"
_TOTAL = "total = (scores + sizes.log()).logsumexp(1, keepdim=True)"
_WEIGHTS = "weights = (scores - total).exp().mean(0)"
_KEPT = "weights * sizes.sum() >= threshold"


def _best_only(queries: Tensor, centroids: Tensor, sizes: Tensor, threshold: float) -> Tensor:
    scores = (queries @ centroids.T).mean(0)
    return scores == scores.max()


def _as_floats(queries: Tensor, centroids: Tensor, sizes: Tensor, threshold: float) -> Tensor:
    return kept_clusters(queries, centroids, sizes, threshold).float()


CLUSTERS = (
    WrongVersion("keeps the nearest cluster only, whatever the threshold", _best_only),
    WrongVersion("returns numbers; a mask is bool", _as_floats),
    *wrong_versions(
        kept_clusters,
        {
            "ignores the sizes in the sum: a cluster of 20 keys counts like one of 2": (
                _TOTAL,
                "total = scores.logsumexp(1, keepdim=True)",
            ),
            "adds the sizes instead of their logarithms: n · e^s is e^(s + log n)": (
                _TOTAL,
                "total = (scores + sizes).logsumexp(1, keepdim=True)",
            ),
            "compares the weight of the whole cluster with that of one key; large clusters then always stay": (
                _KEPT,
                "weights * sizes * sizes.sum() >= threshold",
            ),
            "does not divide the scores by the root of head_dim": (_SCORES, "scores = queries @ centroids.T"),
            "divides the scores by head_dim instead of by its root": (
                _SCORES,
                "scores = queries @ centroids.T / queries.shape[1]",
            ),
            "uses the first query head only": (
                _WEIGHTS,
                "weights = (scores - total).exp()[0]",
            ),
            "takes the largest weight of any query head instead of the mean": (
                _WEIGHTS,
                "weights = (scores - total).exp().amax(0)",
            ),
            "takes the smallest weight of any query head instead of the mean": (
                _WEIGHTS,
                "weights = (scores - total).exp().amin(0)",
            ),
            "adds the query heads up instead of averaging": (_WEIGHTS, "weights = (scores - total).exp().sum(0)"),
            "averages the query heads before the exponential": (_WEIGHTS, "weights = (scores - total).mean(0).exp()"),
            "returns the clusters to be left out": (_KEPT, "weights * sizes.sum() < threshold"),
            "keeps only clusters above the threshold; those exactly at it stay, too": (
                _KEPT,
                "weights * sizes.sum() > threshold",
            ),
            "compares with the number of clusters; equal weights are 1 / (number of keys)": (
                _KEPT,
                "weights * len(sizes) >= threshold",
            ),
            "compares the weight itself with the threshold; multiply it by the number of keys": (
                _KEPT,
                "weights >= threshold",
            ),
            "compares the score before the exponential with the threshold": (_KEPT, "scores.mean(0) >= threshold"),
            "subtracts one maximum for all query heads: the exponentials of the others underflow to 0": (
                f"{_TOTAL}\n    {_WEIGHTS}",
                "parts = (scores - scores.max()).exp()\n"
                "    weights = (parts / (parts * sizes).sum(1, keepdim=True)).mean(0)",
            ),
            "limits the scores before the exponential: larger ones then count as equal; subtract in the exponent": (
                f"{_TOTAL}\n    {_WEIGHTS}",
                "parts = scores.clamp(max=80).exp()\n"
                "    weights = (parts / (parts * sizes).sum(1, keepdim=True)).mean(0)",
            ),
            "overflows: subtract in the exponent, not after it": (
                f"{_TOTAL}\n    {_WEIGHTS}",
                "total = (scores.exp() * sizes).sum(1, keepdim=True)\n    weights = (scores.exp() / total).mean(0)",
            ),
        },
    ),
)
