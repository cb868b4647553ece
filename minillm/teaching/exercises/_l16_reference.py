"""Lesson 16, the references: a split product, the heads of a rank, the time of an all-reduce, and where to send a
request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def column_parallel(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    """Return what `rank` of `size` computes of y = x weightᵀ + bias with split outputs: its own, from all inputs.

    `x`: `[tokens, in]`, `weight`: `[out, in]`, `bias`: `[out]` → `[tokens, out / size]`.
    """
    own = slice(rank * len(weight) // size, (rank + 1) * len(weight) // size)
    return x @ weight[own].T + bias[own]


def row_parallel(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """Return y = x weightᵀ + bias from split inputs: `parts[r]` is on rank r. The sum over ranks is the all-reduce.

    `parts[r]`: `[tokens, in / len(parts)]`, `weight`: `[out, in]`, `bias`: `[out]` → `[tokens, out]`.
    """
    width = parts[0].shape[1]
    partial = [part @ weight[:, r * width : (r + 1) * width].T for r, part in enumerate(parts)]
    return sum(partial[1:], partial[0]) + bias


def heads_of_rank(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range] | None:
    """Return the query heads and the KV heads of a rank; None if the heads cannot be split over `size` ranks.

    With more ranks than KV heads, several ranks hold the same KV head.
    """
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        return None
    heads, kv_heads = num_heads // size, max(1, num_kv_heads // size)
    first = rank * num_kv_heads // size
    return range(rank * heads, (rank + 1) * heads), range(first, first + kv_heads)


def all_reduce_seconds(num_bytes: float, size: int, bandwidth: float, latency: float) -> float:
    """Return the time of a ring all-reduce of `num_bytes` on each of `size` ranks: 2 (size - 1) steps, in each of which
    every rank sends a chunk of `num_bytes` / `size` to the next one."""
    return 2 * (size - 1) * (latency + num_bytes / size / bandwidth)


def route(blocks: Sequence[int], cached: Sequence[set[int]], queued: Sequence[int]) -> int:
    """Return the replica for a request: the one that has the longest beginning of its blocks; among equals the one
    with the fewest waiting requests, and among those the first.

    `blocks`: hashes of the prompt's blocks; `cached[r]`: those that were sent to replica r; `queued[r]`: the number of
    its waiting requests.
    """

    def hits(replica: int) -> int:
        count = 0
        while count < len(blocks) and blocks[count] in cached[replica]:
            count += 1
        return count

    return min(range(len(cached)), key=lambda r: (-hits(r), queued[r]))
