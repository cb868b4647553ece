"""Lesson 07, continuous batching: count static steps, share a step's token budget, admit requests, choose a victim."""

from __future__ import annotations

import random

from minillm.teaching.exercise import Case, Exercise
from minillm.teaching.exercises import _l07_slips as slips
from minillm.teaching.exercises._l07_mistakes import ADMIT, BUDGET, STATIC, VICTIM
from minillm.teaching.exercises._l07_reference import admit, choose_victim, share_budget, static_steps
from minillm.teaching.source import body_of

_STATIC = Exercise(
    name="l07.static_steps",
    reference=static_steps,
    cases=[
        Case("one batch of two", ([3, 5], 2)),
        Case("two batches, a long request in each", ([8, 1, 1, 9], 2)),
        Case("the last batch is not full", ([4, 2, 7], 2)),
        Case("batches of one request", ([3, 1, 2], 1)),
        Case("three batches of three, the lengths rise and fall", ([2, 9, 4, 1, 3, 8, 6, 5, 7], 3)),
        Case("no requests", ([], 4)),
    ],
    hints=(
        "A batch ends at the same time for all its requests. What decides when?",
        "Cut the list into batches of batch_size, in order. A batch takes as many steps as its largest number. Add the "
        "steps of all batches.",
        "sum(… of lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)). What stands for the dots?",
        body_of(static_steps),
    ),
    wrong=(*STATIC, *slips.STATIC),
)

_BUDGET = Exercise(
    name="l07.share_budget",
    reference=share_budget,
    cases=[
        Case("three decoding requests, enough budget for all", ([1, 1, 1], 8)),
        Case("a long prompt in front of two decoding requests", ([100, 1, 1], 8)),
        Case("a long prompt behind them", ([1, 1, 100], 8)),
        Case("two prompts: the first takes what it can", ([5, 100, 1], 8)),
        Case("two prompts: the longer one is the more urgent", ([100, 5, 1], 8)),
        Case("three prompts, the first leaves some budget", ([3, 9, 4], 10)),
        Case("a budget of one token each", ([9, 1, 9], 3)),
        Case("a prompt that fits exactly", ([6, 1, 1], 8)),
        Case("a single request", ([100], 8)),
    ],
    hints=(
        "How much of the budget must be reserved before the first request takes its share?",
        "Go through the requests in order. A request with n others behind it must leave n tokens of the budget. "
        "Subtract each share from the budget.",
        "for number, tokens in enumerate(wanted): behind = …; append min(tokens, …) to the shares; subtract that "
        "share from the budget. Two expressions are missing.",
        body_of(share_budget),
    ),
    wrong=(*BUDGET, *slips.BUDGET),
)

_ADMIT = Exercise(
    name="l07.admit",
    reference=admit,
    cases=[
        Case("two prompts that fit", ([4, 3], 16, 8, 8, 4)),
        Case("a prompt longer than the budget is admitted with a first chunk", ([40, 3], 16, 8, 16, 4)),
        Case("blocks for all its tokens, not for the first chunk only", ([40, 3], 16, 8, 6, 4)),
        Case("the last block is only partly filled, but needed", ([5, 5], 16, 8, 3, 4)),
        Case("exactly as many blocks as are free", ([8], 16, 8, 2, 4)),
        Case("the second needs exactly the block that is left", ([8, 4, 1], 16, 8, 3, 4)),
        Case("blocks of nine tokens, of which few are free", ([10, 10], 64, 8, 3, 9)),
        Case("the last free block will be partly filled", ([7], 16, 8, 2, 4)),
        Case("the second needs one block more than the first leaves", ([8, 8], 16, 8, 3, 4)),
        Case("one seat", ([4, 3, 2], 16, 1, 8, 4)),
        Case("two seats, three requests", ([4, 3, 2], 16, 2, 8, 4)),
        Case("no seat", ([4], 16, 0, 8, 4)),
        Case("a short one behind a long one that does not fit waits", ([40, 3], 64, 8, 5, 4)),
        Case("the second gets a chunk, and no budget is left for the third", ([10, 10, 2], 16, 8, 16, 4)),
        Case("no budget left", ([4], 0, 8, 8, 4)),
        Case("the budget ends exactly after the first", ([16, 4], 16, 8, 8, 4)),
        Case("one short request, and many free blocks", ([2], 16, 8, 9, 4)),
        Case("a request of one token, and two free blocks", ([1], 16, 8, 2, 4)),
        Case("seats, budget and blocks run out together", ([4, 4], 4, 1, 1, 4)),
    ],
    hints=(
        "Three things can run out: seats, tokens of this step, blocks. Check all three before you admit a request.",
        "blocks = ⌈tokens / block_size⌉ for all tokens of the request; -(-a // b) rounds up. Stop (do not skip) at the "
        "first request that cannot be admitted. Its share of this step is the smaller of its tokens and the budget.",
        "for tokens in waiting: compute blocks; break if … or … or …; then subtract from free_blocks, append "
        "the share, subtract it from the budget. The three conditions are missing.",
        body_of(admit),
    ),
    wrong=(*ADMIT, *slips.ADMIT),
)

_VICTIM = Exercise(
    name="l07.choose_victim",
    reference=choose_victim,
    cases=[
        Case("equal priorities: the last to arrive", ([(0, 0), (0, 1), (0, 2)],)),
        Case("the last to arrive is not the last in the list", ([(0, 4), (0, 9), (0, 7)],)),
        Case("the least urgent request arrived first", ([(5, 0), (0, 1), (0, 2)],)),
        Case("two less urgent requests: the later one", ([(5, 0), (5, 3), (0, 4)],)),
        Case("the least urgent arrived last, but is not the last in the list", ([(0, 2), (5, 9), (0, 5)],)),
        Case("three less urgent requests between two urgent ones", ([(0, 10), (5, 6), (5, 3), (5, 9), (0, 11)],)),
        Case("slightly less urgent, and much earlier", ([(1, 0), (0, 10**9)],)),
        Case("a single request", ([(0, 7)],)),
    ],
    hints=(
        "Preempt the least urgent request. Which of two requests is less urgent?",
        "Compare the priority number first, and among equal priorities the arrival number. The request with the "
        "largest is preempted. Return its index, not the pair.",
        "max(range(len(running)), key=…): the key maps an index to the pair to compare. Python compares tuples "
        "entry by entry.",
        body_of(choose_victim),
    ),
    wrong=VICTIM,
)

EXERCISES = [_STATIC, _BUDGET, _ADMIT, _VICTIM]


def heavy_tailed_lengths(count: int, seed: int = 0, low: int = 4, high: int = 96) -> list[int]:
    """Return output lengths as in real traffic: most short, a few very long (Pareto with α = 1.1, at most `high`)."""
    draw = random.Random(seed)
    return [min(high, int(low * draw.paretovariate(1.1))) for _ in range(count)]
