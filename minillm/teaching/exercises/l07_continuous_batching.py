"""Lesson 07, continuous batching: count static steps, share a step's budget, admit who waits, choose who gives way."""

from __future__ import annotations

import random

from minillm.teaching.exercise import Case, Exercise, WrongVersion

# ------------------------------------------------------------------------------------------------------- static_steps


def static_steps(lengths: list[int], batch_size: int) -> int:
    """Steps of static batching: the requests in batches, in order, each batch as long as its longest request."""
    return sum(max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))


def _as_if_average(lengths: list[int], batch_size: int) -> int:
    return -(-sum(lengths) // batch_size)


def _sorted_first(lengths: list[int], batch_size: int) -> int:
    return static_steps(sorted(lengths), batch_size)


def _longest_of_all(lengths: list[int], batch_size: int) -> int:
    return -(-len(lengths) // batch_size) * max(lengths, default=0)


def _full_batches_only(lengths: list[int], batch_size: int) -> int:
    return static_steps(lengths[: len(lengths) // batch_size * batch_size], batch_size)


def _one_by_one(lengths: list[int], batch_size: int) -> int:
    return sum(lengths)


_STATIC = Exercise(
    name="l07.static_steps",
    reference=static_steps,
    cases=[
        Case("one batch of two", ([3, 5], 2)),
        Case("two batches, a long request in each", ([8, 1, 1, 9], 2)),
        Case("the last batch is not full", ([4, 2, 7], 2)),
        Case("a batch of one is one after the other", ([3, 1, 2], 1)),
        Case("nobody", ([], 4)),
    ],
    hints=(
        "Everyone in a batch waits for the same event. Which one?",
        "Cut the list into pieces of batch_size, in order. A piece takes as many steps as its largest number.",
        "sum(max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))",
    ),
    wrong=(
        WrongVersion("fills every slot in every step, which is what continuous batching hopes for", _as_if_average),
        WrongVersion("sorts the requests by length, which nobody can know before", _sorted_first),
        WrongVersion("lets every batch wait for the longest request of all", _longest_of_all),
        WrongVersion("forgets the last batch when it is not full", _full_batches_only),
        WrongVersion("runs the requests one after the other", _one_by_one),
    ),
)

# ------------------------------------------------------------------------------------------------------- share_budget


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


def _greedy(wanted: list[int], budget: int) -> list[int]:
    shares = []
    for tokens in wanted:
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares


def _all_or_nothing(wanted: list[int], budget: int) -> list[int]:
    shares = []
    for tokens in wanted:
        shares.append(tokens if tokens <= budget else 0)
        budget -= shares[-1]
    return shares


def _equal(wanted: list[int], budget: int) -> list[int]:
    return [min(tokens, budget // len(wanted)) for tokens in wanted]


def _over_budget(wanted: list[int], budget: int) -> list[int]:
    return [min(tokens, budget - len(wanted) + 1) for tokens in wanted]


def _too_modest(wanted: list[int], budget: int) -> list[int]:
    shares = []
    for tokens in wanted:
        shares.append(max(1, min(tokens, budget - len(wanted))))
        budget -= shares[-1]
    return shares


_BUDGET = Exercise(
    name="l07.share_budget",
    reference=share_budget,
    cases=[
        Case("three decoding requests, room for all", ([1, 1, 1], 8)),
        Case("a long prompt in front of two decoding requests", ([100, 1, 1], 8)),
        Case("a long prompt behind them", ([1, 1, 100], 8)),
        Case("two prompts: the first takes what it can", ([5, 100, 1], 8)),
        Case("just one token each", ([9, 1, 9], 3)),
        Case("a prompt that fits exactly", ([6, 1, 1], 8)),
    ],
    hints=(
        "What must be set aside before the first request may take anything?",
        "Go through the requests in order. One that has n others behind it must leave n tokens of the budget.",
        "share = min(wanted, budget - number_behind); append it; budget -= share.",
    ),
    wrong=(
        WrongVersion("lets a long prompt take the whole step while others stand still", _greedy),
        WrongVersion("runs a prompt only if all of it fits: no chunks", _all_or_nothing),
        WrongVersion("gives everyone the same share, whether it can be used or not", _equal),
        WrongVersion("hands out more tokens than the budget has", _over_budget),
        WrongVersion("keeps a token back for requests that have had theirs", _too_modest),
    ),
)

# -------------------------------------------------------------------------------------------------------------- admit


def admit(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    """Tokens that the first waiting requests compute in this step; as many numbers as requests are let in.

    `waiting`: tokens each has to compute, first in line first. A request is let in if a seat is free, the budget is
    not used up, and there are blocks for *all* its tokens, though it may compute only a part of them now. The first
    one that cannot come in holds up those behind it.
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


def _overtakes(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    shares = []
    for tokens in waiting:
        blocks = -(-tokens // block_size)
        if budget == 0 or len(shares) == seats:
            break
        if blocks > free_blocks:
            continue
        free_blocks -= blocks
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares


def _room_for_chunk(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    shares = []
    for tokens in waiting:
        blocks = -(-min(tokens, budget) // block_size)
        if budget == 0 or len(shares) == seats or blocks > free_blocks:
            break
        free_blocks -= blocks
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares


def _no_chunks(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    shares = []
    for tokens in waiting:
        blocks = -(-tokens // block_size)
        if tokens > budget or len(shares) == seats or blocks > free_blocks:
            break
        free_blocks -= blocks
        budget -= tokens
        shares.append(tokens)
    return shares


def _rounds_down(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    shares = []
    for tokens in waiting:
        blocks = tokens // block_size
        if budget == 0 or len(shares) == seats or blocks > free_blocks:
            break
        free_blocks -= blocks
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares


def _any_number(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    return admit(waiting, budget, len(waiting), free_blocks, block_size)


def _zero_shares(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    shares = []
    for tokens in waiting:
        blocks = -(-tokens // block_size)
        if len(shares) == seats or blocks > free_blocks:
            break
        free_blocks -= blocks
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares


_ADMIT = Exercise(
    name="l07.admit",
    reference=admit,
    cases=[
        Case("two prompts that fit", ([4, 3], 16, 8, 8, 4)),
        Case("a prompt longer than the budget comes in by a first chunk", ([40, 3], 16, 8, 16, 4)),
        Case("blocks for all its tokens, not for the first chunk only", ([40, 3], 16, 8, 6, 4)),
        Case("the last block is filled in part, and needed all the same", ([5, 5], 16, 8, 3, 4)),
        Case("one seat", ([4, 3], 16, 1, 8, 4)),
        Case("no seat", ([4], 16, 0, 8, 4)),
        Case("a short one behind a long one that does not fit waits", ([40, 3], 64, 8, 5, 4)),
        Case("nothing left of the budget", ([4], 0, 8, 8, 4)),
        Case("the budget ends exactly after the first", ([16, 4], 16, 8, 8, 4)),
    ],
    hints=(
        "Three things can run out: seats, tokens of this step, blocks. Look at all three before letting someone in.",
        "blocks = ⌈tokens / block_size⌉ for *all* tokens of the request. Break (do not skip) at the first that cannot "
        "come in. Its share of this step is min(tokens, budget).",
        "for tokens in waiting: if budget == 0 or len(shares) == seats or -(-tokens // block_size) > free_blocks: "
        "break; then take the blocks, append min(tokens, budget), lower the budget.",
    ),
    wrong=(
        WrongVersion("lets short requests overtake a long one, which may then wait for ever", _overtakes),
        WrongVersion("asks for room for the first chunk only, so that it will soon be preempted", _room_for_chunk),
        WrongVersion("does not cut a prompt into chunks", _no_chunks),
        WrongVersion("forgets the last block, which is filled in part", _rounds_down),
        WrongVersion("lets in more requests than there are seats", _any_number),
        WrongVersion("lets requests in when nothing is left of the budget", _zero_shares),
    ),
)

# ------------------------------------------------------------------------------------------------------ choose_victim


def choose_victim(running: list[tuple[int, int]]) -> int:
    """Index of the running request that gives its blocks away when the pool is dry: the least urgent one.

    Each is (priority, number of arrival): a lower priority number is more urgent, then who came first.
    """
    return max(range(len(running)), key=lambda i: running[i])


def _first_come(running: list[tuple[int, int]]) -> int:
    return min(range(len(running)), key=lambda i: running[i])


def _last_in_list(running: list[tuple[int, int]]) -> int:
    return len(running) - 1


def _ignores_priority(running: list[tuple[int, int]]) -> int:
    return max(range(len(running)), key=lambda i: running[i][1])


def _longest_wait(running: list[tuple[int, int]]) -> int:
    return max(range(len(running)), key=lambda i: (running[i][0], -running[i][1]))


_VICTIM = Exercise(
    name="l07.choose_victim",
    reference=choose_victim,
    cases=[
        Case("all alike: the last to come", ([(0, 0), (0, 1), (0, 2)],)),
        Case("the last to come is not the last in the list", ([(0, 4), (0, 9), (0, 7)],)),
        Case("an unimportant one that came first", ([(5, 0), (0, 1), (0, 2)],)),
        Case("two unimportant ones: the later", ([(5, 0), (5, 3), (0, 4)],)),
        Case("alone", ([(0, 7)],)),
    ],
    hints=(
        "Who would lose the least by starting again, and who has the better right to go on?",
        "Compare the priority number first; among equals, the number of arrival. The largest gives way.",
        "Tuples compare in just this order: max(range(len(running)), key=lambda i: running[i]).",
    ),
    wrong=(
        WrongVersion("takes from the most urgent request", _first_come),
        WrongVersion("takes the last of the list, whoever that is", _last_in_list),
        WrongVersion("does not look at the priority", _ignores_priority),
        WrongVersion("takes from the one that has waited longest among equals", _longest_wait),
    ),
)

EXERCISES = [_STATIC, _BUDGET, _ADMIT, _VICTIM]


def heavy_tailed_lengths(count: int, seed: int = 0, low: int = 4, high: int = 96) -> list[int]:
    """Output lengths as servers see them: most short, a few very long (Pareto with α = 1.1, cut at `high`)."""
    draw = random.Random(seed)
    return [min(high, int(low * draw.paretovariate(1.1))) for _ in range(count)]
