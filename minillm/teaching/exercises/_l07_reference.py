"""Lesson 07, the references: steps of static batching, the token budget of a step, admission, preemption."""

from __future__ import annotations


def static_steps(lengths: list[int], batch_size: int) -> int:
    """Return the steps of static batching: batches in the order given, each as long as its longest request."""
    return sum(max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))


def share_budget(wanted: list[int], budget: int) -> list[int]:
    """Return the tokens that each running request computes in this step; each gets at least one.

    `wanted`: tokens that each could compute (the rest of its prompt, or 1 once it decodes), most urgent first.
    `budget`: tokens of the step, at least one per request. A more urgent request takes as many as it can use.
    """
    shares = []
    for behind, tokens in zip(range(len(wanted) - 1, -1, -1), wanted, strict=True):
        shares.append(min(tokens, budget - behind))
        budget -= shares[-1]
    return shares


def admit(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    """Return the tokens that each admitted request computes in this step, for the first requests in the queue.

    `waiting`: tokens that each has to compute, in the order of the queue. A request is admitted if a seat is free, the
    budget is not used up, and blocks are free for *all* its tokens, though it may compute only a part of them now. The
    first one that cannot be admitted blocks those behind it.
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
    """Return the index of the running request to preempt when no block is free: the least urgent one.

    Each is (priority, arrival number): a lower priority number is more urgent, then a lower arrival number.
    """
    return max(range(len(running)), key=lambda i: running[i])
