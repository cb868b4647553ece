"""Lesson 12, the references: the time of a step, the break-even context, two views of a cache, two levels of codes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.teaching.workshop.l12_costs import Machine, Shape


def step_seconds(batch: int, rows: int, context: float, shape: Shape, machine: Machine) -> float:
    """Return the least time of one forward: that of its bytes or that of its operations, whichever is longer.

    Each of `batch` requests computes `rows` tokens, which attend to `context` cached tokens. The weights are read once,
    the cache of each request once. A parameter takes part in one multiplication and one addition for each token.
    """
    read = shape.weight_bytes + batch * context * shape.kv_bytes
    operations = batch * rows * (2 * shape.parameters + context * shape.attention_flops)
    return max(read / machine.bandwidth, operations / machine.flops)


def break_even_context(rows: int, shape: Shape, machine: Machine) -> float:
    """Return the context from which on a forward waits for memory at any batch size; `math.inf` if there is none.

    Each request computes `rows` tokens. With many requests the weights no longer count, so what decides is one request:
    its keys and values against its operations.
    """
    operations_per_byte = machine.flops / machine.bandwidth
    spare = shape.kv_bytes * operations_per_byte - rows * shape.attention_flops
    return rows * 2 * shape.parameters / spare if spare > 0 else math.inf


def sink_view(block_table: list[int], num_tokens: int, block_size: int, most: int) -> tuple[list[int], int, int]:
    """Return what a draft step reads: a shortened block table, the newest token's index in it, the tokens left out.

    Of the full blocks before the newest token's block: the first one (the sink) and the newest ones, `most` (≥ 1) in
    all. Then that block, and those behind it, which are for the drafts. (StreamingLLM, Xiao et al. 2024, in blocks.)
    """
    last = num_tokens - 1
    newest = last // block_size
    kept = [0, *range(newest - most + 1, newest)] if newest > most else list(range(newest))
    left_out = (newest - len(kept)) * block_size
    return [block_table[i] for i in kept] + block_table[newest:], last - left_out, left_out


def snapkv_blocks(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    """Return which of the blocks 0 … `count` - 1 a drafter reads, in order: `most` (≥ 1) of them, or all if there are
    fewer.

    `attention`: `[num_queries, n]`, of the prompt's last queries to its n tokens. Half of `most`, rounded down, are the
    newest blocks. The others are those of the earlier blocks that got the most attention, the earlier of equals; tokens
    behind the prompt got none. (SnapKV, Li et al. 2024, in blocks.)
    """
    if count <= most:
        return list(range(count))
    of_tokens = attention.sum(0)
    of_blocks = F.pad(of_tokens, (0, count * block_size - len(of_tokens))).view(count, block_size).sum(1)
    window = most // 2
    best = of_blocks[: count - window].argsort(descending=True, stable=True)[: most - window]
    return sorted(best.tolist()) + list(range(count - window, count))


def two_levels(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper codes 0 … 15 and the lower codes -8 … 7 of `x` ≈ zero + scale · (upper + lower / 16), int8.

    `x`: `[..., n]`; `scale` and `zero`: `[..., 1]`. (QuantSpec, Tiwari et al. 2025.)
    """
    steps = (x - zero) / scale
    upper = steps.round().clamp(0, 15)
    lower = ((steps - upper) * 16).round().clamp(-8, 7)
    return upper.to(torch.int8), lower.to(torch.int8)
