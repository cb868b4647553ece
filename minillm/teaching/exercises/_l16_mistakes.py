"""Lesson 16, planted mistakes: wrong versions of each exercise, with the sentence that names them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l16_reference import (
    all_reduce_seconds,
    column_parallel,
    heads_of_rank,
    route,
    row_parallel,
)
from minillm.teaching.source import wrong_versions

_OWN = "own = slice(rank * len(weight) // size, (rank + 1) * len(weight) // size)"
_PRODUCT = "return x @ weight[own].T + bias[own]"


def _splits_inputs(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    own = slice(rank * x.shape[1] // size, (rank + 1) * x.shape[1] // size)
    return x[:, own] @ weight[:, own].T + bias


def _interleaved(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    return x @ weight[rank::size].T + bias[rank::size]


def _padded(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    out = torch.zeros(len(x), len(weight))
    own = slice(rank * len(weight) // size, (rank + 1) * len(weight) // size)
    out[:, own] = x @ weight[own].T + bias[own]
    return out


def _computes_all(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    return (x @ weight.T + bias).chunk(size, dim=1)[rank]


COLUMN = (
    WrongVersion("computes all outputs and then takes the rank's own: nothing is split", _computes_all),
    WrongVersion("splits the inputs; here every rank has all inputs and computes some of the outputs", _splits_inputs),
    WrongVersion("gives a rank every size-th output; its outputs stand side by side", _interleaved),
    WrongVersion("returns all outputs, with zeros for those of other ranks; return the rank's own only", _padded),
    *wrong_versions(
        column_parallel,
        {
            "returns the whole product, whatever the rank": (_OWN, "own = slice(None)"),
            "gives every rank the outputs of rank 0": (_OWN, "own = slice(0, len(weight) // size)"),
            "counts ranks from 1": (
                _OWN,
                "own = slice(max(rank - 1, 0) * len(weight) // size, max(rank, 1) * len(weight) // size)",
            ),
            "counts ranks from the end": (
                _OWN,
                "own = slice((size - 1 - rank) * len(weight) // size, (size - rank) * len(weight) // size)",
            ),
            "leaves the bias out": (_PRODUCT, "return x @ weight[own].T"),
            "adds the bias of rank 0's outputs to every rank's": (
                _PRODUCT,
                "return x @ weight[own].T + bias[: len(weight) // size]",
            ),
            "divides the bias by the number of ranks; each output is computed on one rank only": (
                _PRODUCT,
                "return x @ weight[own].T + bias[own] / size",
            ),
            "subtracts the bias": (_PRODUCT, "return x @ weight[own].T - bias[own]"),
        },
    ),
)

_SUM = "return sum(partial[1:], partial[0]) + bias"


def _bias_on_every_rank(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    return row_parallel(parts, weight, len(parts) * bias)


def _same_columns(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    return sum(part @ weight[:, : part.shape[1]].T for part in parts) + bias


def _partial(parts: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    columns = weight.split(parts[0].shape[1], dim=1)
    return [part @ own.T for part, own in zip(parts, columns, strict=True)]


def _side_by_side(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(_partial(parts, weight), dim=1) + bias.repeat(len(parts))


def _multiplied(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    return torch.stack(_partial(parts, weight)).prod(0) + bias


def _backwards(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    return row_parallel(parts[::-1], weight, bias)


def _side_by_side_first(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(list(parts), dim=1) @ weight.T + bias


ROW = (
    WrongVersion("puts the parts together before the product: no rank has all inputs", _side_by_side_first),
    WrongVersion("adds the bias on every rank, so the sum has it as often as there are ranks", _bias_on_every_rank),
    WrongVersion("multiplies every part by the columns of rank 0", _same_columns),
    WrongVersion("puts the partial results side by side; they are parts of one sum", _side_by_side),
    WrongVersion("multiplies the partial results with one another", _multiplied),
    WrongVersion("pairs the parts with the columns in reverse order", _backwards),
    *wrong_versions(
        row_parallel,
        {
            "leaves out the sum over ranks, and returns what rank 0 has": (_SUM, "return partial[0] + bias"),
            "leaves out what rank 0 has": (
                _SUM,
                "return sum(partial[1:], 0 * partial[0]) + bias",
            ),
            "averages over ranks; the parts of a sum are added": (
                _SUM,
                "return sum(partial[1:], partial[0]) / len(parts) + bias",
            ),
            "leaves the bias out": (_SUM, "return sum(partial[1:], partial[0])"),
            "subtracts the bias": (_SUM, "return sum(partial[1:], partial[0]) - bias"),
            "divides the bias by the number of ranks": (
                _SUM,
                "return sum(partial[1:], partial[0]) + bias / len(parts)",
            ),
        },
    ),
)

_GUARD = "if num_heads % size or (num_kv_heads % size and size % num_kv_heads):"
_FIRST = "first = rank * num_kv_heads // size"
_COUNTS = "heads, kv_heads = num_heads // size, max(1, num_kv_heads // size)"
_RANGES = "return range(rank * heads, (rank + 1) * heads), range(first, first + kv_heads)"

HEADS = wrong_versions(
    heads_of_rank,
    {
        "splits heads that do not divide: some heads belong to no rank": (_GUARD, "if False:"),
        "does not look at the KV heads when it decides whether the heads can be split": (
            _GUARD,
            "if num_heads % size:",
        ),
        "does not look at the query heads when it decides whether the heads can be split": (
            _GUARD,
            "if num_kv_heads % size and size % num_kv_heads:",
        ),
        "refuses more ranks than KV heads; several ranks can hold the same KV head": (
            _GUARD,
            "if num_heads % size or num_kv_heads % size:",
        ),
        "gives every rank the first KV heads": (_FIRST, "first = 0"),
        "takes the rank for the KV head; where several ranks share one, its number is smaller": (
            _FIRST,
            "first = rank * kv_heads",
        ),
        "gives neighbouring ranks different KV heads; ranks with neighbouring query heads share one": (
            _FIRST,
            "first = rank * kv_heads % num_kv_heads",
        ),
        "gives no KV head to a rank where there are fewer KV heads than ranks": (
            _COUNTS,
            "heads, kv_heads = num_heads // size, num_kv_heads // size",
        ),
        "gives every rank all KV heads": (
            _RANGES,
            "return range(rank * heads, (rank + 1) * heads), range(num_kv_heads)",
        ),
        "gives every rank all query heads": (_RANGES, "return range(num_heads), range(first, first + kv_heads)"),
        "gives every rank the first query heads": (_RANGES, "return range(heads), range(first, first + kv_heads)"),
        "gives a rank every size-th query head": (
            _RANGES,
            "return range(rank, num_heads, size), range(first, first + kv_heads)",
        ),
        "returns one query head too many": (
            _RANGES,
            "return range(rank * heads, (rank + 1) * heads + 1), range(first, first + kv_heads)",
        ),
        "returns the KV heads first": (
            _RANGES,
            "return range(first, first + kv_heads), range(rank * heads, (rank + 1) * heads)",
        ),
    },
)

_SECONDS = "return 2 * (size - 1) * (latency + num_bytes / size / bandwidth)"

SECONDS = wrong_versions(
    all_reduce_seconds,
    {
        "counts one round of the ring; there are two: sums are collected, then handed out": (
            _SECONDS,
            "return (size - 1) * (latency + num_bytes / size / bandwidth)",
        ),
        "counts a step for each rank; the last chunk is complete after one step less": (
            _SECONDS,
            "return 2 * size * (latency + num_bytes / size / bandwidth)",
        ),
        "sends all bytes in every step; a step sends a chunk of one size-th": (
            _SECONDS,
            "return 2 * (size - 1) * (latency + num_bytes / bandwidth)",
        ),
        "counts the latency once; every step waits for it": (
            _SECONDS,
            "return latency + 2 * (size - 1) * num_bytes / size / bandwidth",
        ),
        "rounds the bytes of a chunk down": (
            _SECONDS,
            "return 2 * (size - 1) * (latency + num_bytes // size / bandwidth)",
        ),
        "rounds the bytes of a chunk up": (
            _SECONDS,
            "return 2 * (size - 1) * (latency + -(-num_bytes // size) / bandwidth)",
        ),
        "leaves the latency out": (_SECONDS, "return 2 * (size - 1) * num_bytes / size / bandwidth"),
        "leaves the bytes out": (_SECONDS, "return 2 * (size - 1) * latency"),
        "multiplies bytes by bandwidth; bytes over bytes per second are seconds": (
            _SECONDS,
            "return 2 * (size - 1) * (latency + num_bytes / size * bandwidth)",
        ),
        "divides the latency by the number of ranks; a smaller chunk does not arrive earlier": (
            _SECONDS,
            "return 2 * (size - 1) * (latency + num_bytes / bandwidth) / size",
        ),
        "multiplies the bytes by the number of ranks; each rank sends a part of its own": (
            _SECONDS,
            "return 2 * (size - 1) * (latency + num_bytes * size / bandwidth)",
        ),
        "lets every rank send to every other in the same step": (
            _SECONDS,
            "return 2 * (latency + num_bytes / size / bandwidth)",
        ),
    },
)

_WHILE = "while count < len(blocks) and blocks[count] in cached[replica]:"
_CHOICE = "return min(range(len(cached)), key=lambda r: (-hits(r), queued[r]))"


def _counts_all(blocks: Sequence[int], cached: Sequence[set[int]], queued: Sequence[int]) -> int:
    return min(range(len(cached)), key=lambda r: (-len(cached[r] & set(blocks)), queued[r]))


def _first_block_only(blocks: Sequence[int], cached: Sequence[set[int]], queued: Sequence[int]) -> int:
    return min(range(len(cached)), key=lambda r: (not blocks or blocks[0] not in cached[r], queued[r]))


def _only_whole(blocks: Sequence[int], cached: Sequence[set[int]], queued: Sequence[int]) -> int:
    return min(range(len(cached)), key=lambda r: (not cached[r].issuperset(blocks), queued[r]))


def _after_the_last_gap(blocks: Sequence[int], cached: Sequence[set[int]], queued: Sequence[int]) -> int:
    return route(blocks[::-1], cached, queued)


def _last_of_equals(blocks: Sequence[int], cached: Sequence[set[int]], queued: Sequence[int]) -> int:
    swapped = len(cached) - 1 - route(blocks, cached[::-1], queued[::-1])
    return swapped


def _by_hash(blocks: Sequence[int], cached: Sequence[set[int]], queued: Sequence[int]) -> int:
    return blocks[0] % len(cached) if blocks else 0


ROUTE = (
    WrongVersion("counts all cached blocks; those after the first missing one cannot be used", _counts_all),
    WrongVersion("looks at the first block only", _first_block_only),
    WrongVersion("sends a request to a cache only if all of its blocks are there", _only_whole),
    WrongVersion(
        "counts the cached blocks after the last missing one; those before the first count", _after_the_last_gap
    ),
    WrongVersion("takes the last of equals", _last_of_equals),
    WrongVersion("computes the replica from a hash, and looks neither at caches nor at queues", _by_hash),
    *wrong_versions(
        route,
        {
            "ignores the caches": (_CHOICE, "return min(range(len(cached)), key=lambda r: queued[r])"),
            "ignores the queues": (_CHOICE, "return min(range(len(cached)), key=lambda r: -hits(r))"),
            "looks at the queues first, and at the caches of equals only": (
                _CHOICE,
                "return min(range(len(cached)), key=lambda r: (queued[r], -hits(r)))",
            ),
            "takes the replica that has the shortest beginning": (
                _CHOICE,
                "return min(range(len(cached)), key=lambda r: (hits(r), queued[r]))",
            ),
            "takes the fullest queue of equals": (
                _CHOICE,
                "return min(range(len(cached)), key=lambda r: (-hits(r), -queued[r]))",
            ),
            "takes the replica with the most blocks, whatever they are": (
                _CHOICE,
                "return min(range(len(cached)), key=lambda r: (-len(cached[r]), queued[r]))",
            ),
            "weighs a cached block against a queued request; the cache comes first": (
                _CHOICE,
                "return min(range(len(cached)), key=lambda r: queued[r] - hits(r))",
            ),
            "leaves the last block out": (_WHILE, _WHILE.replace("len(blocks)", "len(blocks) - 1")),
        },
    ),
)
