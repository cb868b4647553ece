"""Makers for lesson 17."""

from __future__ import annotations

from minillm.teaching.exercise import Case
from minillm.teaching.variants.random_numbers import Draw, Maker


def _lse(d: Draw) -> Case:
    n, m, width, tile = d.int(1, 3), d.int(12, 24), d.int(2, 3), d.int(3, 4)
    return Case(f"{m} rows in tiles of {tile}", (d.normal(n, width), d.normal(m, width), d.float(0.1, 2), tile))


def _backward(d: Draw) -> Case:
    width, chunks, start = d.int(2, 3), [], 0
    for _ in range(d.int(2, 5)):
        chunks.append((start, start + d.int(1, 4)))
        start = chunks[-1][1]
    return Case(f"{len(chunks)} chunks", (d.normal(start, width), d.normal(width, width), chunks))


def _blast(d: Draw) -> Case:
    blocks, high, wide, rank = d.int(2, 4), d.int(2, 5), d.int(2, 5), d.int(1, 3)
    parts = (d.normal(blocks, high, rank), d.normal(blocks, blocks, rank), d.normal(blocks, wide, rank))
    return Case(f"{blocks} blocks of rank {rank}", (d.normal(d.int(1, 3), blocks * wide), *parts))


def _one_bit(d: Draw) -> Case:
    rows, columns = d.int(2, 4), d.int(3, 8)
    count = d.int(0, rows * columns // 2)
    return Case(f"{count} exact weights", (d.normal(rows, columns), count))


def _centroids(d: Draw) -> Case:
    n, width, k = d.int(4, 12), d.int(1, 3), d.int(2, 4)
    return Case(f"{n} points, {k} centroids", (d.normal(n, width), d.chances(n) * n, d.normal(k, width)))


MAKERS: dict[str, Maker] = {
    "l17.tiled_lse": _lse,
    "l17.backward_in_chunks": _backward,
    "l17.blast_apply": _blast,
    "l17.one_bit_and_exact": _one_bit,
    "l17.centroid_step": _centroids,
}
