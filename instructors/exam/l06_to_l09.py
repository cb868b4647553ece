"""Questions on the lessons 06 to 09."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import torch

from instructors.exam.question import Answer, Numbers, Question
from minillm.cache.block_pool import BlockPool
from minillm.cache.prefix import hash_block_tokens, root_hash
from minillm.teaching.variants.random_numbers import Draw

Function = Callable[..., Any]
MakePool = Callable[[int, int], BlockPool]


def _slots(d: Draw) -> Numbers:
    size = d.one_of(4, 8, 16)
    start = d.int(1, 2 * size - 3)
    return {"table": d.some(range(40), 4), "size": size, "start": start, "count": d.int(size // 2 + 2, size + 3)}


def _slots_answer(slot_mapping: Function, table: list[int], size: int, start: int, count: int) -> Answer:
    return {"slots": list(slot_mapping(table, start, count, size))}


def _waste(d: Draw) -> Numbers:
    return {"lengths": [d.int(3, 300) for _ in range(5)], "size": d.one_of(8, 16, 32), "longest": 512}


def _waste_answer(pool_of: MakePool, lengths: list[int], size: int, longest: int) -> Answer:
    pool = pool_of(10_000, size)
    for length in lengths:
        pool.allocate(pool.blocks_for(length))
    slots = pool.num_used * size
    return {
        "blocks": pool.num_used,
        "slots without a token": slots - sum(lengths),
        "percent of the slots without a token": 100 * (1 - sum(lengths) / slots),
        "the same percentage if the longest text were reserved": 100 * (1 - sum(lengths) / (longest * len(lengths))),
    }


def _prefix(d: Draw) -> Numbers:
    size = d.one_of(8, 16, 32)
    common = d.int(2 * size, 6 * size)
    return {"size": size, "common": common, "second": common + d.one_of(0, d.int(1, 3 * size)), "first": 7 * size}


def _prefix_answer(find_prefix: Function, size: int, common: int, second: int, first: int) -> Answer:
    old = list(range(first))
    new = old[:common] + list(range(first, first + second - common))
    known, parent = {}, root_hash("")
    for block, start in enumerate(range(0, first - size + 1, size)):
        parent = hash_block_tokens(parent, old[start : start + size])
        known[parent] = block
    found = len(find_prefix(new, known, size, ""))
    return {"blocks found": found, "tokens computed": second - found * size}


def _forks(d: Draw) -> Numbers:
    return {"prompt": d.int(20, 120), "samples": d.int(2, 6), "stored": d.int(3, 60), "size": d.one_of(8, 16)}


def _forks_answer(
    pool_of: Callable[[int, int], BlockPool], prompt: int, samples: int, stored: int, size: int
) -> Answer:
    pool = pool_of(10_000, size)
    first = pool.allocate(pool.blocks_for(prompt))
    tables = [list(first) for _ in range(samples)]
    for table in tables[1:]:
        pool.share(table)
    copied = 0
    for position in range(prompt, prompt + stored):
        for table in tables:
            index = position // size
            if index == len(table):
                table += pool.allocate(1)
            elif pool.ref_count(table[index]) > 1:  # copy on write
                pool.free([table[index]])
                table[index] = pool.allocate(1)[0]
                copied += 1
    pool.check_integrity(tables)
    return {
        "blocks": pool.num_used,
        "blocks copied": copied,
        "blocks without sharing": samples * pool.blocks_for(prompt + stored),
    }


def _batches(d: Draw) -> Numbers:
    return {"lengths": [d.one_of(d.int(2, 12), d.int(20, 90)) for _ in range(8)], "seats": d.int(2, 4)}


def _batches_answer(static_steps: Function, lengths: list[int], seats: int) -> Answer:
    ends = [0] * seats
    for length in lengths:  # whoever is next takes the seat that is free first
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return {"static": static_steps(lengths, seats), "continuous": max(ends)}


def _budget(d: Draw) -> Numbers:
    wanted = [d.one_of(1, d.int(30, 400)) for _ in range(3)]
    return {"wanted": [*wanted, d.int(100, 600), 1], "budget": d.int(64, 512)}


def _budget_answer(share_budget: Function, wanted: list[int], budget: int) -> Answer:
    return {"tokens of each": list(share_budget(list(wanted), budget))}


def _admit(d: Draw) -> Numbers:
    return {
        "waiting": [d.int(10, 200) for _ in range(4)],
        "budget": d.int(100, 400),
        "seats": d.int(2, 4),
        "free": d.int(8, 30),
        "size": 16,
    }


def _admit_answer(admit: Function, waiting: list[int], budget: int, seats: int, free: int, size: int) -> Answer:
    return {"tokens of the admitted": list(admit(list(waiting), budget, seats, free, size))}


def _lanes(d: Draw) -> Numbers:
    return {"rows": d.int(2, 40), "columns": d.int(33, 700), "block": d.one_of(32, 64, 128)}


def _lanes_answer(lanes: Function, rows: int, columns: int, block: int) -> Answer:
    programs, masked = lanes(rows, columns, block)
    return {"programs": programs, "masked lanes": masked}


def _traffic(d: Draw) -> Numbers:
    return {"millions": d.int(2, 60), "bandwidth": d.int(400, 3000), "operations": d.int(3, 7)}


def _traffic_answer(_: None, millions: int, bandwidth: int, operations: int) -> Answer:
    fused, apart = 2 * 4 * millions, 2 * 4 * millions * operations
    return {
        "MB, one kernel": fused,
        "MB, one operation after the other": apart,
        "least microseconds, one kernel": fused / bandwidth * 1000,
    }


def _merge(d: Draw) -> Numbers:
    return {
        "scores_a": [d.int(-2, 4) for _ in range(2)],
        "values_a": [d.int(-5, 5) for _ in range(2)],
        "scores_b": [d.int(-2, 4) for _ in range(2)],
        "values_b": [d.int(-5, 5) for _ in range(2)],
    }


def _merge_answer(
    merge: Function, scores_a: list[int], values_a: list[int], scores_b: list[int], values_b: list[int]
) -> Answer:
    parts = []
    for scores, values in ((scores_a, values_a), (scores_b, values_b)):
        weights = [math.exp(score - max(scores)) for score in scores]
        total = sum(w * v for w, v in zip(weights, values, strict=True))
        parts += [torch.tensor([float(max(scores))]), torch.tensor([sum(weights)]), torch.tensor([[total]])]
    m, l, o = merge(*parts)  # noqa: E741
    return {"m": float(m), "l": float(l), "o": round(float(o), 4), "attention": round(float(o / l), 4)}


QUESTIONS = [
    Question(
        "06.slots",
        4,
        "A request's block table is {table}; a block holds {size} tokens. In which slots of the pool do its tokens "
        "{start} to {start} + {count} − 1 (counted from 0) lie?",
        _slots,
        _slots_answer,
        "Token p lies in slot table[p // size] · size + p mod size; the table is looked up again at each block's end.",
        "l06.slot_mapping",
    ),
    Question(
        "06.waste",
        5,
        "Five requests have {lengths} tokens in a paged cache with blocks of {size}. How many blocks are used, how "
        "many of their slots hold no token, and what share of the slots is that? What would the share be if a "
        "contiguous buffer of {longest} tokens were reserved for each?",
        _waste,
        _waste_answer,
        "Only the last block of each request is partly empty: less than one block per request.",
        function=BlockPool,
    ),
    Question(
        "06.prefix",
        5,
        "The cache of a finished request of {first} tokens is kept; a block holds {size} tokens. A new prompt has "
        "{second} tokens, of which the first {common} are the same as in that request. How many blocks does prefix "
        "caching find, and how many tokens must still be computed?",
        _prefix,
        _prefix_answer,
        "Only full blocks are found, and never the one with the last token of the prompt, whose logits are needed.",
        "l06.find_prefix",
    ),
    Question(
        "06.copy_on_write",
        6,
        "A prompt of {prompt} tokens is sampled {samples} times (n = {samples}) with shared blocks of {size} tokens "
        "and copy on write. Each sample has stored {stored} tokens after the prompt. How many blocks are used, how "
        "many were copied, and how many would be used if nothing were shared?",
        _forks,
        _forks_answer,
        "The full blocks of the prompt stay shared. A partly filled last block is copied by all samples but the last, "
        "which then owns it alone.",
        function=BlockPool,
    ),
    Question(
        "07.batching",
        6,
        "Eight requests arrive together, in this order, and need {lengths} steps. {seats} run at a time. How many "
        "steps does static batching take (batches in the given order), and how many continuous batching, where a "
        "waiting request takes a free seat in the next step?",
        _batches,
        _batches_answer,
        "Static: the longest of each batch, summed. Continuous: follow which seat becomes free first.",
        "l07.static_steps",
    ),
    Question(
        "07.budget",
        5,
        "A step may compute {budget} tokens. The running requests, most urgent first, could use {wanted} tokens (1: it "
        "decodes; more: the rest of its prompt). Each gets at least one token, and a more urgent one takes as many as "
        "it can use. How many tokens does each compute in this step?",
        _budget,
        _budget_answer,
        "Keep one token for each request behind; take the smaller of what is wanted and what is left.",
        "l07.share_budget",
    ),
    Question(
        "07.admission",
        5,
        "Waiting requests have prompts of {waiting} tokens, in this order. {seats} seats, {free} blocks of {size} "
        "tokens and a budget of {budget} tokens are free. A request is admitted if a seat and budget are left and "
        "blocks are free for its whole prompt; the first that cannot be admitted blocks those behind it. How many "
        "tokens does each admitted request compute in this step?",
        _admit,
        _admit_answer,
        "Blocks are needed for the whole prompt, budget only for the part that is computed now.",
        "l07.admit",
    ),
    Question(
        "08.lanes",
        4,
        "A kernel works on {rows} rows of {columns} numbers. Each program handles {block} neighbouring numbers of one "
        "row. How many programs are launched, and how many of their lanes are masked?",
        _lanes,
        _lanes_answer,
        "ceil(columns / block) programs per row; the last one of each row is masked past the end.",
        "l08.lanes",
    ),
    Question(
        "08.fusion",
        4,
        "An elementwise function of {millions} million float32 numbers is written as {operations} PyTorch operations, "
        "each of which reads one tensor of this size from memory and writes one. How many MB (10⁶ bytes) are moved, "
        "how many by one fused kernel, and how many microseconds does the fused kernel take at least at {bandwidth} · "
        "10⁹ bytes per second?",
        _traffic,
        _traffic_answer,
        "A fused kernel reads once and writes once: 8 bytes per number; the operations do so each.",
    ),
    Question(
        "09.merge",
        7,
        "Attention over four keys is computed in two parts. Part A has the scores {scores_a} and the values "
        "{values_a}, part B the scores {scores_b} and the values {values_b}. With m = largest score, l = Σ exp(score "
        "− m) and o = Σ exp(score − m) · value of each part: what are m, l and o of both together, and the result of "
        "attention?",
        _merge,
        _merge_answer,
        "m is the larger one; l and o of each part are multiplied by exp(own m − m) and added; attention is o / l.",
        "l09.merge",
    ),
]
