"""Lesson 12, speculation over long contexts: what a step takes, break-even, views of a cache, two levels."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l12_mistakes as mistakes
from minillm.teaching.exercises._facts import about_tensor
from minillm.teaching.exercises._l12_reference import (
    break_even_context,
    sink_view,
    snapkv_blocks,
    step_seconds,
    two_levels,
)
from minillm.teaching.source import body_of
from minillm.teaching.workshop.l12_costs import Machine, Shape

_SHAPE = Shape(parameters=100.0, weight_bytes=200.0, kv_bytes=4.0, attention_flops=8.0)
_SLOW_MEMORY = Machine(flops=1000.0, bandwidth=10.0)
_SLOW_ARITHMETIC = Machine(flops=20.0, bandwidth=1000.0)


def _about_seconds(attempt: Attempt) -> str | None:
    if not isinstance(attempt.got, int | float) or math.isnan(attempt.got):
        return None
    batch, rows, context, shape, machine = attempt.case.args
    read = (shape.weight_bytes + batch * context * shape.kv_bytes) / machine.bandwidth
    computed = batch * rows * (2 * shape.parameters + context * shape.attention_flops) / machine.flops
    return (
        f"reading takes {read:g} s and computing {computed:g} s, so the step takes {attempt.expected:g} s; "
        f"{attempt.got:g} s is too {'short' if attempt.got < attempt.expected else 'long'}"
    )


_SECONDS = Exercise(
    name="l12.step_seconds",
    reference=step_seconds,
    cases=[
        Case("one request, one row, nothing in the cache: the weights", (1, 1, 0, _SHAPE, _SLOW_MEMORY)),
        Case("the same with 50 cached tokens", (1, 1, 50, _SHAPE, _SLOW_MEMORY)),
        Case("four requests: the weights are still read once", (4, 1, 50, _SHAPE, _SLOW_MEMORY)),
        Case("five rows share what is read", (4, 5, 50, _SHAPE, _SLOW_MEMORY)),
        Case("arithmetic is what limits: one row", (1, 1, 50, _SHAPE, _SLOW_ARITHMETIC)),
        Case("arithmetic is what limits: four requests of five rows", (4, 5, 50, _SHAPE, _SLOW_ARITHMETIC)),
        Case("arithmetic limits, and nothing is cached", (2, 3, 0, _SHAPE, _SLOW_ARITHMETIC)),
        Case(
            "arithmetic limits, and a parameter takes four bytes",
            (4, 5, 50, Shape(100.0, 400.0, 4.0, 8.0), _SLOW_ARITHMETIC),
        ),
        Case(
            "the weights take longer to compute than to read, the cache longer to read than to compute",
            (4, 5, 50, Shape(100.0, 50.0, 4.0, 4.0), Machine(flops=1000.0, bandwidth=80.0)),
        ),
        Case("both take nearly the same time", (2, 2, 100, _SHAPE, Machine(flops=400.0, bandwidth=110.0))),
    ],
    hints=(
        "Reading and computing happen at the same time. Which of the two decides how long the step takes?",
        "Bytes: the weights once, and for each request `context` tokens of kv_bytes. Operations: for each row of each "
        "request 2 for every parameter, and attention_flops for every cached token. Divide the bytes by the bandwidth "
        "and the operations by the rate; the longer time counts.",
        "read = shape.weight_bytes + …\noperations = batch * rows * (2 * shape.parameters + …)\nreturn max(…, …)",
        body_of(step_seconds),
    ),
    wrong=mistakes.SECONDS,
    fallback_diagnosis=_about_seconds,
)


def _about_context(attempt: Attempt) -> str | None:
    rows, shape, machine = attempt.case.args
    got = attempt.got
    if not isinstance(got, int | float) or math.isnan(got):
        return None
    if got < 0:
        return "a context cannot be negative; return math.inf where no context is long enough"
    if math.isinf(got) != math.isinf(attempt.expected):
        return (
            "math.inf means that no context is long enough, which is the case only if attention alone computes longer"
        )
    many = 10**9
    read = many * got * shape.kv_bytes / machine.bandwidth
    computed = many * rows * (2 * shape.parameters + got * shape.attention_flops) / machine.flops
    which = "computing" if computed > read else "reading"
    return (
        f"with {many:,} requests of {got:g} tokens, {which} takes {max(read, computed) / min(read, computed):.3g} "
        "times as long as the other; at the break-even context both take the same time"
        if min(read, computed) > 0
        else None
    )


_BREAK_EVEN = Exercise(
    name="l12.break_even_context",
    reference=break_even_context,
    cases=[
        Case("one row", (1, _SHAPE, Machine(flops=1000.0, bandwidth=100.0))),
        Case("three rows: two drafts are verified", (3, _SHAPE, Machine(flops=1000.0, bandwidth=100.0))),
        Case("five rows: attention computes exactly as long as it reads", (5, _SHAPE, Machine(1000.0, 100.0))),
        Case("eight rows: attention computes longer than it reads", (8, _SHAPE, Machine(1000.0, 100.0))),
        Case("a machine with much arithmetic for its memory", (5, _SHAPE, Machine(flops=3000.0, bandwidth=10.0))),
        Case("the cache in half the bytes", (2, Shape(100.0, 200.0, 2.0, 8.0), Machine(1000.0, 50.0))),
        Case(
            "the weights in a quarter of the bytes change nothing",
            (3, Shape(100.0, 50.0, 4.0, 8.0), Machine(900.0, 30.0)),
        ),
        Case(
            "attention computes nearly as long as it reads",
            (2, Shape(100.0, 200.0, 4.0, 19.75), Machine(1000.0, 100.0)),
        ),
        Case("attention costs nothing", (2, Shape(100.0, 200.0, 4.0, 0.0), Machine(1000.0, 100.0))),
    ],
    hints=(
        "Let the batch grow without end. Which bytes can you then forget, and which operations?",
        "For each request, reading takes S · kv_bytes / bandwidth, and computing rows · (2 · parameters + S · "
        "attention_flops) / flops. Set both equal and solve for S. If the factor of S is not above 0, there is no "
        "solution: math.inf.",
        "operations_per_byte = machine.flops / machine.bandwidth\nspare = … - …   # per cached token\n"
        "return … / spare if spare > 0 else math.inf",
        body_of(break_even_context),
    ),
    wrong=mistakes.BREAK_EVEN,
    fallback_diagnosis=_about_context,
)


def _about_view(attempt: Attempt) -> str | None:
    table, num_tokens, size, _ = attempt.case.args
    got = attempt.got
    if not (isinstance(got, tuple) and len(got) == 3 and isinstance(got[0], list)):
        return "return three values: a list of block ids, an index, and a number of tokens"
    mine, start, left_out = got
    if unknown := [block for block in mine if block not in table]:
        return f"block {unknown[0]} does not belong to the request"
    if start + left_out != num_tokens - 1:
        return (
            f"the newest token has position {num_tokens - 1}, but index {start} and {left_out} tokens left out give "
            f"position {start + left_out}"
        )
    if not 0 <= start < len(mine) * size or mine[start // size] != table[(num_tokens - 1) // size]:
        return f"index {start} of the shortened table does not lie in the block of the newest token"
    return None


_BLOCKS = [7, 3, 9, 4, 8, 2, 6]
_VIEW = Exercise(
    name="l12.sink_view",
    reference=sink_view,
    cases=[
        Case("five full blocks before the newest token's, two may stay", (_BLOCKS, 22, 4, 2)),
        Case("three may stay", (_BLOCKS, 22, 4, 3)),
        Case("only the sink may stay", (_BLOCKS, 22, 4, 1)),
        Case("as many blocks as may stay: nothing is left out", (_BLOCKS, 22, 4, 5)),
        Case("fewer blocks than may stay", (_BLOCKS[:4], 11, 4, 5)),
        Case("one block more than may stay", (_BLOCKS, 22, 4, 4)),
        Case("the newest token is the first of its block", (_BLOCKS, 21, 4, 2)),
        Case("the newest token is the last of its block", (_BLOCKS, 24, 4, 2)),
        Case("two blocks for drafts behind the newest token's", (_BLOCKS, 18, 4, 2)),
        Case("no full block yet", (_BLOCKS[:2], 3, 4, 2)),
        Case("blocks of one token", (_BLOCKS, 6, 1, 3)),
    ],
    hints=(
        "The newest token has index num_tokens - 1. In which block of the table does it lie? Which blocks are before?",
        "Of the blocks 0 … newest - 1 keep 0 and the last most - 1 (all, if there are no more than `most`). The table "
        "is theirs and block_table[newest:]. Each block that is missing moves the newest token's index down by "
        "block_size; add that up as the tokens left out.",
        "last = num_tokens - 1\nnewest = last // block_size\n"
        "kept = [0, *range(…, newest)] if newest > most else list(range(newest))\n"
        "left_out = … * block_size\nreturn [block_table[i] for i in kept] + …, …, left_out",
        body_of(sink_view),
    ),
    wrong=mistakes.VIEW,
    fallback_diagnosis=_about_view,
    parts=("table", "index", "tokens left out"),
)


def _about_choice(attempt: Attempt) -> str | None:
    _, _, count, most = attempt.case.args
    got = attempt.got
    if not isinstance(got, list) or not all(isinstance(block, int | np.integer) for block in got):
        return "return a list of block indices"
    if wrong := [block for block in got if not 0 <= block < count]:
        return f"there is no block {wrong[0]}: the blocks are 0 to {count - 1}"
    if len(set(got)) < len(got):
        return "a block is in the list twice"
    if len(got) != min(most, count):
        return f"{len(got)} blocks instead of {min(most, count)}"
    if got != sorted(got):
        return "the blocks are not in order"
    window = most // 2 if count > most else count
    if missing := [block for block in range(count - window, count) if block not in got]:
        return f"block {missing[0]} belongs to the window, and is missing"
    block = next(block for block in attempt.expected if block not in got)
    return (
        f"block {block} is missing, although it got no less attention than a block that was taken (of equals, the "
        "earlier one stays)"
    )


def _attention(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def _snapkv_cases() -> list[Case]:
    flat = torch.full((1, 12), 0.125)
    draw = torch.Generator().manual_seed(5)
    peaks = _attention(
        [0.5, 0.0, 0.0, 0.0, 0.25, 0.0, 0.125, 0.125, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.375, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.125],
    )
    return [
        Case("six blocks of two tokens, two stay", (peaks, 2, 6, 2)),
        Case("three stay: one of them is the window", (peaks, 2, 6, 3)),
        Case("four stay", (peaks, 2, 6, 4)),
        Case("one stays: there is no room for a window", (peaks, 2, 6, 1)),
        Case("as many as there are", (peaks, 2, 6, 6)),
        Case("fewer than may stay", (peaks, 2, 6, 9)),
        Case("a short text: far fewer than may stay", (peaks, 2, 2, 9)),
        Case("equal attention everywhere: the earlier blocks", (flat, 2, 6, 4)),
        Case("the text has grown by two blocks behind the prompt", (peaks, 2, 8, 4)),
        Case("the prompt's last block is not full", (peaks[:, :11], 2, 5, 2)),
        Case("the prompt ends in the middle of block 5", (peaks[:, :11], 2, 6, 4)),
        Case(
            "the prompt's last token, alone in its block, has most of the attention",
            (_attention([0.125, 0.0, 0.0, 0.0625, 0.0, 0.0, 0.8125]), 2, 6, 3),
        ),
        Case(
            "the prompt is longer than the blocks that count",
            (_attention([0.0625, 0.125, 0.25, 0.0625, 0.125, 0.3125, 0.0625]), 1, 6, 2),
        ),
        Case(
            "the window's blocks have most of the attention", (_attention([0.0625, 0.125, 0.0625, 0.25, 0.5]), 1, 5, 3)
        ),
        Case(
            "many tokens with a little attention, one with much",
            (_attention([0.0, 0.5, 0.0, 0.25, 0.25, 0.25, 0.0, 0.0]), 4, 2, 1),
        ),
        Case(
            "one token with much attention, alone in the last block; two with a little less each in the first",
            (_attention([0.25, 0.125, 0.0625, 0.0625, 0.3125]), 2, 3, 1),
        ),
        Case("eight queries over 40 tokens", (torch.rand(8, 40, generator=draw), 4, 10, 5)),
    ]


_SNAPKV = Exercise(
    name="l12.snapkv_blocks",
    reference=snapkv_blocks,
    cases=_snapkv_cases,
    hints=(
        "How much attention did each token get from all queries together? And each block?",
        "Sum over the queries. Bring the sums to count · block_size numbers (zeros behind the prompt) and sum each "
        "block. The last most // 2 blocks are the window. Of those before it take the most - window with the largest "
        "sums, and sort their indices.",
        "of_tokens = attention.sum(…)\n"
        "of_blocks = F.pad(of_tokens, (0, …)).view(count, block_size).sum(…)   # F.pad also cuts\n"
        "window = …\nbest = of_blocks[: …].argsort(descending=True, stable=True)[: …]\n"
        "return sorted(best.tolist()) + list(range(…, count))",
        "from torch.nn import functional as F\n" + body_of(snapkv_blocks),
    ),
    wrong=mistakes.SNAPKV,
    fallback_diagnosis=_about_choice,
)


def _about_levels(attempt: Attempt) -> str | None:
    if not (isinstance(attempt.got, tuple) and len(attempt.got) == 2):
        return "return two tensors: the upper and the lower codes"
    for name, low, high, got, wanted in zip(
        ("upper", "lower"), (0, -8), (15, 7), attempt.got, attempt.expected, strict=True
    ):
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            return None
        if bool((got < low).any() or (got > high).any()):
            return f"the {name} codes go from {int(got.min())} to {int(got.max())}; four bits hold {low} to {high}"
        if not torch.equal(got.float(), wanted.float()):
            fact = about_tensor(wanted.float(), got.float(), ("row", "number"), f"the tensor of {name} codes")
            return fact or f"the {name} codes are wrong: write down (x - zero) / scale for the first number"
    return None


def _levels_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(12)
    one, none = torch.ones(1, 1), torch.zeros(1, 1)
    scales, zeros = torch.tensor([[0.25], [0.125]]), torch.tensor([[-2.0], [-1.0]])
    return [
        Case(
            "scale 1, zero point 0: the upper code is the nearest integer",
            (torch.tensor([[2.0, 3.25, 6.75]]), one, none),
        ),
        Case("a zero point of 4", (torch.tensor([[4.0, 5.25, 9.6875]]), one, none + 4)),
        Case("a scale of ½", (torch.tensor([[1.0, 1.375, 2.21875]]), one / 2, none)),
        Case("just below the middle between two upper codes", (torch.tensor([[3.484375, 7.4375, 3.53125]]), one, none)),
        Case("half of a step above: 8 / 16 cannot be stored", (torch.tensor([[2.5, 4.5]]), one, none)),
        Case("half of a step below: -8 / 16 can", (torch.tensor([[3.5, 5.5]]), one, none)),
        Case("a value a little above 15 steps", (torch.tensor([[15.25, 15.75, 0.0]]), one, none)),
        Case("a value a little below 0 steps", (torch.tensor([[-0.25, -0.5, -0.75, 15.0]]), one, none)),
        Case(
            "a rest that is rounded up, and one that is rounded down", (torch.tensor([[1.171875, 1.140625]]), one, none)
        ),
        Case(
            "two rows with scales and zero points of their own",
            (zeros + 15 * torch.rand(2, 5, generator=draw) * scales, scales, zeros),
        ),
    ]


_LEVELS = Exercise(
    name="l12.two_levels",
    reference=two_levels,
    cases=_levels_cases,
    hints=(
        "How many steps above the zero point is x? The nearest whole number is the upper code. What is left over?",
        "steps = (x - zero) / scale. Round for the upper code, and limit it to 0 … 15. Subtract this limited code from "
        "steps, count what is left in sixteenths, round, and limit to -8 … 7. Return both as torch.int8.",
        "steps = …\nupper = steps.round().clamp(…, …)\nlower = (… * 16).round().clamp(…, …)\n"
        "return upper.to(torch.int8), lower.to(torch.int8)",
        body_of(two_levels),
    ),
    wrong=mistakes.LEVELS,
    fallback_diagnosis=_about_levels,
    parts=("upper", "lower"),
)

EXERCISES = [_SECONDS, _BREAK_EVEN, _VIEW, _SNAPKV, _LEVELS]
