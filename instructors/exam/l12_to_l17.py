"""Questions on the lessons 12 to 17."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from instructors.exam.question import Answer, Numbers, Question
from minillm.teaching.variants.random_numbers import Draw
from minillm.teaching.workshop.l12_costs import Machine, Shape

Function = Callable[..., Any]


def _context(d: Draw) -> Numbers:
    return {
        "billions": d.int(6, 40),
        "kib": d.one_of(64, 128, 160, 320),
        "mega": d.int(4, 12) / 10,
        "rows": d.int(1, 6),
        "peak": d.one_of(300, 500, 989),
        "bandwidth": d.one_of(2.0, 3.35, 4.8),
    }


def _context_answer(
    break_even: Function, billions: int, kib: int, mega: float, rows: int, peak: int, bandwidth: float
) -> Answer:
    shape = Shape(billions * 1e9, 2e9 * billions, kib * 1024, mega * 1e6)
    return {"tokens": float(break_even(rows, shape, Machine(peak * 1e12, bandwidth * 1e12)))}


def _view(d: Draw) -> Numbers:
    size, blocks = d.one_of(8, 16), d.int(6, 9)
    return {
        "table": d.some(range(50), blocks),
        "size": size,
        "tokens": size * (blocks - 1) + d.int(1, size),
        "most": d.int(2, 4),
    }


def _view_answer(sink_view: Function, table: list[int], size: int, tokens: int, most: int) -> Answer:
    seen, index, left_out = sink_view(list(table), tokens, size, most)
    return {"blocks read": list(seen), "index of the newest token": index, "tokens left out": left_out}


def _channels(d: Draw) -> Numbers:
    sizes = d.some(range(1, 9), 4), d.some(range(1, 9), 4)
    while len({a * b for a, b in zip(*sizes, strict=True)}) < 4:
        sizes = d.some(range(1, 9), 4), d.some(range(1, 9), 4)
    q, k = ([size * d.one_of(-1, 1) for size in row] for row in sizes)
    return {"q": q, "k": k, "count": d.int(1, 3)}


def _channels_answer(kept_channels: Function, q: list[int], k: list[int], count: int) -> Answer:
    kept = kept_channels(torch.tensor([[q]]).float(), torch.tensor([[k]]).float(), count)
    return {"channels": kept.flatten().tolist()}


def _rank(d: Draw) -> Numbers:
    return {"kv_heads": d.one_of(2, 4, 8), "head_dim": d.one_of(64, 128), "rank": 16 * d.int(2, 7)}


def _rank_answer(_: None, kv_heads: int, head_dim: int, rank: int) -> Answer:
    whole = kv_heads * head_dim
    return {"percent, values at this rank": 100 * rank / whole, "percent, keys and values": 50 + 50 * rank / whole}


def _load(d: Draw) -> Numbers:
    return {
        "kib": d.one_of(32, 64, 128),
        "bandwidth": d.int(2, 30) / 10,
        "latency": d.int(1, 20),
        "milliseconds": d.int(10, 80) / 100,
    }


def _load_answer(break_even: Function, kib: int, bandwidth: float, latency: int, milliseconds: float) -> Answer:
    tokens = break_even(kib * 1024, bandwidth * 1e9, latency / 1000, milliseconds / 1000)
    return {"tokens": float(tokens)}


def _split(d: Draw) -> Numbers:
    kv = d.one_of(32, 64, 128)
    return {
        "tokens": 256 * d.int(2, 12),
        "kv": kv,
        "hidden": kv // d.one_of(2, 4),
        "bandwidth": d.int(4, 40),
        "microseconds": d.int(5, 60),
    }


def _split_answer(best_split: Function, tokens: int, kv: int, hidden: int, bandwidth: int, microseconds: int) -> Answer:
    numbers = tokens, kv * 1024, hidden * 1024, bandwidth * 1e9, microseconds / 1e6
    split = best_split(*numbers)
    moved = split * numbers[2] / numbers[3]
    rest = max(split * numbers[4], (tokens - split) * numbers[1] / numbers[3])
    return {"tokens to recompute": split, "milliseconds": 1000 * (moved + rest)}


def _bottleneck(d: Draw) -> Numbers:
    return {
        "prefill": d.int(20, 60),
        "target": d.int(90, 200),
        "python": d.int(5, 30),
        "factor": d.int(2, 8),
        "limit": 100,
    }


def _bottleneck_answer(_: None, prefill: int, target: int, python: int, factor: int, limit: int) -> Answer:
    before, after = prefill + target + python, prefill + target / factor + python
    needed = target / (limit - prefill - python)
    return {"milliseconds": after, "speed-up": before / after, "factor needed for the limit": needed}


def _step(d: Draw) -> Numbers:
    return {
        "calls": d.int(20, 200),
        "each": d.int(2, 30),
        "mb": d.int(10, 900),
        "rate": d.int(10, 60),
        "giga": d.int(1, 90),
    }


def _step_answer(step_seconds: Function, calls: int, each: int, mb: int, rate: int, giga: int) -> Answer:
    work = mb * 1e6, giga * 1e9
    limits = rate * 1e9, 1e12
    whole, floor = (step_seconds(*work, count, *limits, each / 1e6) for count in (calls, 0))
    return {"milliseconds": 1000 * float(whole), "without the calls": 1000 * float(floor)}


def _ring(d: Draw) -> Numbers:
    return {
        "size": d.one_of(2, 4, 8),
        "kib": d.one_of(8, 16, 64, 256),
        "gigabytes": d.one_of(1, 10, 25, 100),
        "microseconds": d.one_of(5, 10, 20),
        "layers": d.one_of(24, 32, 80),
    }


def _ring_answer(all_reduce: Function, size: int, kib: int, gigabytes: int, microseconds: int, layers: int) -> Answer:
    once = all_reduce(kib * 1024, size, gigabytes * 1e9, microseconds * 1e-6)
    return {"microseconds for one": 1e6 * once, "milliseconds for a step": 1e3 * 2 * layers * once}


def _heads(d: Draw) -> Numbers:
    kv_heads, group = d.one_of(2, 4, 8), d.one_of(2, 4, 8)
    size = d.one_of(2, 4, 8)
    return {"heads": kv_heads * group, "kv_heads": kv_heads, "size": size, "rank": d.int(0, size - 1)}


def _heads_answer(heads_of_rank: Function, heads: int, kv_heads: int, size: int, rank: int) -> Answer:
    found = heads_of_rank(heads, kv_heads, rank, size)
    if found is None:
        return {"query heads": "cannot be split", "KV heads": "cannot be split"}
    own, read = found
    return {"query heads": list(own), "KV heads": list(read)}


def _structures(d: Draw) -> Numbers:
    blocks = d.one_of(4, 8, 16)
    return {"rows": 64 * d.int(6, 16), "columns": 64 * d.int(6, 16), "blocks": blocks, "rank": 8 * d.int(2, 8)}


def _structures_answer(_: None, rows: int, columns: int, blocks: int, rank: int) -> Answer:
    blast = rank * (rows + columns + blocks**2)
    return {
        "numbers of BLAST": blast,
        "percent of the matrix": 100 * blast / (rows * columns),
        "rank of an SVD with at most as many": blast // (rows + columns),
    }


def _signs(d: Draw) -> Numbers:
    row = [size * d.one_of(-1, 1) for size in d.some(range(1, 20), 6)]
    return {"row": row, "count": d.int(1, 2)}


def _signs_answer(one_bit: Function, row: list[int], count: int) -> Answer:
    scales, exact = one_bit(torch.tensor([row]).float(), count)
    return {"scale": float(scales[0]), "exact part": exact[0].tolist()}


QUESTIONS = [
    Question(
        "12.break_even",
        6,
        "A model has {billions} billion parameters, and a token's keys and values take {kib} KiB (1024 bytes). One "
        "query does {mega} · 10⁶ operations per cached token. The machine does {peak} · 10¹² operations and reads "
        "{bandwidth} · 10¹² bytes per second. The batch is large, so only what each request reads for itself counts. "
        "From which context on does a forward over {rows} token(s) per request wait for memory?",
        _context,
        _context_answer,
        "Per request: context · KV bytes / bandwidth against rows · (2 · parameters + context · operations) / peak; "
        "solve for the context.",
        "l12.break_even_context",
    ),
    Question(
        "12.sink_view",
        5,
        "A request of {tokens} tokens has the block table {table}, with blocks of {size}. A draft step reads the "
        "newest token's block, and of the full blocks before it the first one (the sink) and the newest ones, {most} "
        "in all. Which blocks does it read, in order, what is the newest token's index among the tokens it sees, and "
        "how many tokens are left out?",
        _view,
        _view_answer,
        "The newest token is number tokens − 1; blocks between the sink and the window are dropped whole.",
        "l12.sink_view",
    ),
    Question(
        "13.channels",
        4,
        "ThinK keeps {count} of four key channels, those with the largest product of the mean q² and the mean k². With "
        "one query {q} and one key {k}, which channels (counted from 0) are kept?",
        _channels,
        _channels_answer,
        "The score of a channel is q² · k²; signs do not matter.",
        "l13.kept_channels",
    ),
    Question(
        "13.low_rank",
        3,
        "The values of a layer with {kv_heads} KV heads of width {head_dim} are stored at rank {rank} (over all heads "
        "together); the keys stay whole. What percentage of their bytes do the values take, and keys and values "
        "together?",
        _rank,
        _rank_answer,
        "A token stores rank numbers instead of KV heads · width; keys are the other half.",
    ),
    Question(
        "14.load",
        5,
        "Keys and values of a document lie on a disk: {kib} KiB (1024 bytes) per token, read at {bandwidth} · 10⁹ "
        "bytes per second after {latency} ms. Computing them takes {milliseconds} ms per token. From how many tokens "
        "on is loading faster?",
        _load,
        _load_answer,
        "latency / (time to compute a token − time to read a token); never, if reading a token takes longer.",
        "l14.break_even_tokens",
    ),
    Question(
        "14.split",
        7,
        "The cache of {tokens} tokens lies behind a link of {bandwidth} · 10⁹ bytes per second: {kv} KiB (1024 "
        "bytes) of keys and values or {hidden} KiB of activations per token. For the first l tokens the activations "
        "are sent first; then their keys and values are recomputed, {microseconds} µs per token, while those of the "
        "other tokens are sent. Which l takes the least time, and how many milliseconds?",
        _split,
        _split_answer,
        "T(l) = l · hidden / B + max(l · compute, (n − l) · kv / B): best where both sides of the maximum are equal, "
        "rounded to the better neighbour.",
        "l14.best_split",
    ),
    Question(
        "15.next_limit",
        5,
        "A completion takes {prefill} ms of prefill, {target} ms in the target's decode steps and {python} ms in "
        "Python. Speculation makes the decode part {factor} times faster. How long does the completion take, and "
        "what is the overall speed-up? By what factor would the decode part have to become faster for {limit} ms?",
        _bottleneck,
        _bottleneck_answer,
        "Amdahl: only the decode part shrinks. Time that is not in it bounds what any speed-up of it can gain.",
    ),
    Question(
        "15.calls",
        5,
        "A decode step on a CPU makes {calls} calls of {each} µs each, moves {mb} MB (10⁶ bytes) at {rate} · 10⁹ bytes "
        "per second and does {giga} · 10⁹ operations at 10¹² per second. Moving and computing overlap, calls do not. "
        "How many milliseconds does the step take at least, and how many if one call did everything (its own time not "
        "counted)?",
        _step,
        _step_answer,
        "Calls · time per call + the slower of bytes and operations.",
        "l15.step_seconds",
    ),
    Question(
        "16.all_reduce",
        6,
        "A ring of {size} processes adds up {kib} KiB (1024 bytes) on each of them. A link carries {gigabytes} · 10⁹ "
        "bytes per second, and a message takes {microseconds} µs before its first byte arrives. How many microseconds "
        "does one all-reduce take? How many milliseconds do those of a step of a model with {layers} layers take, "
        "split over these processes?",
        _ring,
        _ring_answer,
        "2 (n − 1) steps of latency + chunk / bandwidth, a chunk being an n-th of the bytes; two all-reduces a layer.",
        "l16.all_reduce_seconds",
    ),
    Question(
        "16.heads",
        5,
        "A model with {heads} query heads and {kv_heads} KV heads is split over {size} ranks. Which query heads and "
        "which KV heads does rank {rank} (counted from 0) hold?",
        _heads,
        _heads_answer,
        "An equal share of neighbouring query heads, and the KV heads that these read; with more ranks than KV heads, "
        "several ranks hold the same one.",
        "l16.heads_of_rank",
    ),
    Question(
        "17.structures",
        5,
        "A weight matrix of {rows} × {columns} is stored as BLAST: {blocks} × {blocks} blocks, rank {rank}. How many "
        "numbers is that, and how many percent of the matrix? Which rank may an SVD have, so that it needs no more?",
        _structures,
        _structures_answer,
        "U and V take rank · (rows + columns) numbers, and each of the blocks² blocks has rank more.",
    ),
    Question(
        "17.signs",
        5,
        "The row {row} of a matrix is stored as one bit per weight with a scale; the {count} largest weights in size "
        "are exact. Which scale is best for the others, and what has to be added to scale · sign for each weight?",
        _signs,
        _signs_answer,
        "The scale is the mean size of the weights that are not exact. At the exact ones the bit gives scale · sign "
        "already, so the rest is added; elsewhere 0.",
        "l17.one_bit_and_exact",
    ),
]
