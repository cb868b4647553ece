"""Makers for lesson 16."""

from __future__ import annotations

from minillm.teaching.exercise import Case
from minillm.teaching.variants.random_numbers import Draw, Maker


def _column(d: Draw) -> Case:
    size, tokens, inputs = d.int(2, 4), d.int(1, 3), d.int(2, 5)
    outputs, rank = size * d.int(1, 3), d.int(0, size - 1)
    arguments = (d.normal(tokens, inputs), d.normal(outputs, inputs), d.normal(outputs), rank, size)
    return Case(f"rank {rank} of {size}", arguments)


def _row(d: Draw) -> Case:
    size, tokens, width, outputs = d.int(2, 4), d.int(1, 3), d.int(1, 4), d.int(2, 5)
    parts = [d.normal(tokens, width) for _ in range(size)]
    return Case(f"{size} ranks", (parts, d.normal(outputs, width * size), d.normal(outputs)))


def _heads(d: Draw) -> Case:
    kv_heads, size = d.int(1, 8), d.int(1, 8)
    heads = kv_heads * d.int(1, 4)
    return Case(f"{heads} and {kv_heads} heads on {size} ranks", (heads, kv_heads, d.int(0, size - 1), size))


def _seconds(d: Draw) -> Case:
    size = d.int(2, 9)
    return Case(f"{size} ranks", (d.float(100, 9000), size, d.float(10, 900), d.float(0.1, 9)))


def _route(d: Draw) -> Case:
    blocks, count = [d.int(1, 9) for _ in range(d.int(1, 5))], d.int(2, 4)
    cached = [set(d.some(range(1, 10), d.int(0, 6))) for _ in range(count)]
    return Case(f"{count} replicas", (blocks, cached, [d.int(0, 3) for _ in range(count)]))


MAKERS: dict[str, Maker] = {
    "l16.column_parallel": _column,
    "l16.row_parallel": _row,
    "l16.heads_of_rank": _heads,
    "l16.all_reduce_seconds": _seconds,
    "l16.route": _route,
}
