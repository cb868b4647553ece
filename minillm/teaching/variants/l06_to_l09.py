"""Makers for the lessons 06 to 09."""

from __future__ import annotations

import torch

from minillm.teaching.drives.l06 import TEXT
from minillm.teaching.exercise import Case
from minillm.teaching.exercises.l09_paged_attention import coded, poisoned
from minillm.teaching.variants.random_numbers import Draw, Maker


def _allocate(d: Draw) -> Case:
    blocks = d.int(3, 8)
    free = d.some(range(blocks), d.int(1, blocks))
    counts = [0 if block in free else d.int(1, 3) for block in range(blocks)]
    count = d.int(1, len(free))
    return Case(f"{count} of {len(free)} free blocks", (free, counts, count))


def _release(d: Draw) -> Case:
    blocks = d.int(4, 8)
    free = d.some(range(blocks), d.int(0, blocks - 3))
    counts = [0 if block in free else d.int(1, 2) for block in range(blocks)]
    owned = [block for block in range(blocks) if block not in free]
    return Case("other blocks", (free, counts, d.some(owned, d.int(2, len(owned)))))


def _slots(d: Draw) -> Case:
    size, blocks = d.int(2, 7), d.int(2, 4)
    start = d.int(0, size * blocks - 2)
    count = d.int(1, size * blocks - start)
    return Case(f"blocks of {size} tokens", (d.some(range(12), blocks), start, count, size))


def _gather(d: Draw) -> Case:
    size, group, kv_heads = d.int(2, 5), d.int(1, 2), d.int(1, 2)
    table = d.some(range(5), d.int(1, 3))
    length = d.int(size * (len(table) - 1) + 1, size * len(table))
    pools = torch.full((2, 5 * size, kv_heads, 2), float("nan"))
    slots = [table[i // size] * size + i % size for i in range(length)]
    pools[:, slots] = d.normal(2, length, kv_heads, 2)
    q = d.normal(d.int(1, min(3, length)), kv_heads * group, 2)
    label = f"{length} tokens in blocks of {size}, {kv_heads * group} query heads, {kv_heads} KV heads"
    return Case(label, (q, *pools, table, length, size))


def _find(d: Draw) -> Case:
    keys = ["tokens 11 to 14", "tokens 21 to 24 after those", "tokens 31 to 34 after those"]
    known = dict(zip(keys, d.some(range(9), 3), strict=True))
    for key in d.some(keys, d.int(0, 2)):
        del known[key]
    return Case("other blocks known", (known, TEXT[: d.int(5, 12)], d.one_of("", "", "carol")))


def _own(d: Draw) -> Case:
    table = d.some((0, 1, 2, 4, 5), d.int(1, 3))
    index = d.int(0, len(table) - 1)
    counts = [d.int(1, 3) if block in table else 0 for block in range(7)]
    return Case("another table", (table, index, counts))


def _static(d: Draw) -> Case:
    return Case("other lengths", ([d.int(1, 30) for _ in range(d.int(3, 9))], d.int(2, 4)))


def _budget(d: Draw) -> Case:
    wanted = [d.one_of(1, d.int(2, 40)) for _ in range(d.int(2, 5))]
    return Case("other requests", (wanted, d.int(len(wanted), 50)))


def _admit(d: Draw) -> Case:
    waiting = [d.int(1, 30) for _ in range(d.int(2, 5))]
    return Case("another queue", (waiting, d.int(4, 64), d.int(1, 5), d.int(1, 20), d.int(2, 8)))


def _victim(d: Draw) -> Case:
    arrivals = d.some(range(30), d.int(3, 6))
    return Case("other requests", ([(d.int(0, 2), arrival) for arrival in arrivals],))


def _lanes(d: Draw) -> Case:
    return Case("other sizes", (d.int(1, 9), d.int(3, 200), 1 << d.int(2, 7)))


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _copy(d: Draw) -> Case:
    rows, columns = d.int(2, 3), d.int(5, 9)  # more than one block: no program may copy the block of another
    strides = columns + d.int(0, 3), columns + d.int(0, 3)
    return Case(f"{rows} rows of {columns}", (d.normal(rows, columns), *strides, d.one_of(2, 4)))


def _softmax(d: Draw) -> Case:
    columns = d.int(3, 9)
    scores = 5 * d.normal(d.int(1, 3), columns) + d.one_of(-1000, 0, 1000)
    return Case(f"{columns} columns", (scores, _power(columns)))


def _rms(d: Draw) -> Case:
    columns = d.int(3, 9)
    return Case(f"{columns} columns", (d.normal(d.int(1, 3), columns), d.normal(columns), 1e-5, _power(columns)))


def _dequantise(d: Draw) -> Case:
    rows, columns = d.int(3, 5), d.one_of(3, 5, 6, 7)  # two tiles or more, and lanes beyond the columns
    codes, scale = d.integers(-127, 127, rows, columns, dtype=torch.int8), d.normal(rows).abs() + 0.01
    dtype = d.one_of(torch.float32, torch.bfloat16)
    label = f"{rows} rows of {columns}, scales in {str(dtype).removeprefix('torch.')}"
    return Case(label, (codes, scale.to(dtype), d.one_of(1, 2), _power(columns)))


def _merge(d: Draw) -> Case:
    rows, width = d.int(1, 3), d.int(2, 3)
    parts = [part for _ in "ab" for part in (3 * d.normal(rows), d.normal(rows).abs() + 1, d.normal(rows, width))]
    return Case(f"{rows} queries", tuple(parts))


def _paged(d: Draw) -> tuple[object, ...]:
    """Inputs of the paged kernels: a request of three or four scattered blocks, and perhaps one of one to four."""
    size, num_kv = d.one_of(2, 4, 8), d.int(1, 2)
    counts = [d.int(3, 4), *(d.int(1, 4) for _ in range(d.int(0, 1)))]
    blocks = d.some(range(9), sum(counts))
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    lengths = [d.int(size * (len(table) - 1) + 1, size * len(table)) for table in tables]
    heads = num_kv * d.int(1, 3)
    return poisoned(d.int(0, 1 << 30), lengths, tables, heads, num_kv, size, d.one_of(4, 8))


def _decode(d: Draw) -> Case:
    return Case("other requests", _paged(d))


def _split(d: Draw) -> Case:
    splits = d.one_of(1, 2)
    return Case(f"other requests in {splits} parts", (*_paged(d), splits))


def _merge_kernel(d: Draw) -> Case:
    rows, parts, width = d.int(1, 3), d.one_of(2, 4), d.one_of(2, 4)
    return Case(f"{rows} rows of {parts} parts", (d.normal(rows, parts, width), 2 * d.normal(rows, parts)))


def _int8(d: Draw) -> Case:
    return Case("other requests", coded(_paged(d)))


MAKERS: dict[str, Maker] = {
    "l06.allocate": _allocate,
    "l06.release": _release,
    "l06.slot_mapping": _slots,
    "l06.gather_attention": _gather,
    "l06.find_prefix": _find,
    "l06.own_block": _own,
    "l07.static_steps": _static,
    "l07.share_budget": _budget,
    "l07.admit": _admit,
    "l07.choose_victim": _victim,
    "l08.lanes": _lanes,
    "l08.copy_kernel": _copy,
    "l08.softmax_kernel": _softmax,
    "l08.rms_norm_kernel": _rms,
    "l08.dequantise_kernel": _dequantise,
    "l09.merge": _merge,
    "l09.decode_kernel": _decode,
    "l09.split_kernel": _split,
    "l09.merge_kernel": _merge_kernel,
    "l09.int8_kernel": _int8,
}
