"""Lesson 07, the right answers: steps of a static batch, the budget of a step, who is admitted, who is preempted."""

from __future__ import annotations


def static_steps(lengths: list[int], batch_size: int) -> int:
    """Steps of static batching: the requests in batches, in order, each batch as long as its longest request."""
    return sum(max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))


def share_budget(wanted: list[int], budget: int) -> list[int]:
    """How many tokens each running request computes in this step: the most urgent first, and everybody at least one.

    `wanted`: tokens each could compute (1 while it decodes, the rest of its prompt before), most urgent first.
    `budget`: tokens of the step, at least as many as there are requests.
    """
    shares = []
    for behind, tokens in zip(range(len(wanted) - 1, -1, -1), wanted, strict=True):
        shares.append(min(tokens, budget - behind))
        budget -= shares[-1]
    return shares


def admit(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    """Tokens that the first waiting requests compute in this step; as many numbers as requests are admitted.

    `waiting`: tokens each has to compute, first in line first. A request is admitted if a seat is free, the budget is
    not used up, and there are blocks for *all* its tokens, though it may compute only a part of them now. The first
    one that cannot be admitted holds up those behind it.
    """
    shares = []
    for tokens in waiting:
        blocks = -(-tokens // block_size)
        if budget == 0 or len(shares) == seats or blocks > free_blocks:
            break
        free_blocks -= blocks
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares


def choose_victim(running: list[tuple[int, int]]) -> int:
    """Index of the running request that loses its blocks when no block is free: the least urgent one.

    Each is (priority, number of arrival): a lower priority number is more urgent, then who came first.
    """
    return max(range(len(running)), key=lambda i: running[i])
