"""Lesson 07, mistakes that learners make, planted so that a check can name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l07_reference import admit, choose_victim, share_budget, static_steps

# ------------------------------------------------------------------------------------------------------- static_steps


def _batches(lengths: list[int], batch_size: int) -> list[list[int]]:
    return [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]


STATIC = (
    WrongVersion(
        "counts as if every seat were busy in every step, which is the goal of continuous batching",
        lambda lengths, batch_size: -(-sum(lengths) // batch_size),
    ),
    WrongVersion(
        "sorts the requests by length, although no length is known in advance",
        lambda lengths, batch_size: static_steps(sorted(lengths), batch_size),
    ),
    WrongVersion(
        "sorts the requests from the longest to the shortest, although no length is known in advance",
        lambda lengths, batch_size: static_steps(sorted(lengths, reverse=True), batch_size),
    ),
    WrongVersion(
        "lets every batch wait for the longest request of all batches",
        lambda lengths, batch_size: len(_batches(lengths, batch_size)) * max(lengths, default=0),
    ),
    WrongVersion(
        "forgets the last batch when it is not full",
        lambda lengths, batch_size: static_steps(lengths[: len(lengths) // batch_size * batch_size], batch_size),
    ),
    WrongVersion("runs the requests one after the other", lambda lengths, batch_size: sum(lengths)),
    WrongVersion(
        "ends a batch with its shortest request instead of its longest",
        lambda lengths, batch_size: sum(map(min, _batches(lengths, batch_size))),
    ),
    WrongVersion("counts batches instead of steps", lambda lengths, batch_size: len(_batches(lengths, batch_size))),
    WrongVersion(
        "returns the steps of the longest batch; batches run one after the other, so their steps add up",
        lambda lengths, batch_size: max(lengths, default=0),
    ),
    WrongVersion(
        "moves on by one request instead of by one batch",
        lambda lengths, batch_size: sum(max(lengths[i : i + batch_size]) for i in range(len(lengths))),
    ),
    WrongVersion(
        "puts one request too many into each batch (the end of a slice is not part of it)",
        lambda lengths, batch_size: sum(
            max(lengths[i : i + batch_size + 1]) for i in range(0, len(lengths), batch_size)
        ),
    ),
    WrongVersion(
        "leaves the last request out of each batch (the end of a slice is not part of it)",
        lambda lengths, batch_size: sum(
            max(lengths[i : i + batch_size - 1]) for i in range(0, len(lengths), batch_size)
        ),
    ),
    WrongVersion(
        "leaves the first request out of each batch",
        lambda lengths, batch_size: sum(
            max(lengths[i + 1 : i + batch_size]) for i in range(0, len(lengths), batch_size)
        ),
    ),
    WrongVersion(
        "skips the first request: lists count from 0",
        lambda lengths, batch_size: static_steps(lengths[1:], batch_size),
    ),
    WrongVersion(
        "ends the range one too early, so that a last batch of one request is lost",
        lambda lengths, batch_size: sum(
            max(lengths[i : i + batch_size]) for i in range(0, len(lengths) - 1, batch_size)
        ),
    ),
    WrongVersion(
        "takes each batch from the start of the list, so that earlier requests count again",
        lambda lengths, batch_size: sum(max(lengths[: i + batch_size]) for i in range(0, len(lengths), batch_size)),
    ),
    WrongVersion(
        "takes each batch up to the end of the list, so that later requests count too",
        lambda lengths, batch_size: sum(max(lengths[i:]) for i in range(0, len(lengths), batch_size)),
    ),
)

# ------------------------------------------------------------------------------------------------------- share_budget


def _sharing(take: Callable[[int, int, int], int], lower: int = 1) -> Callable[[list[int], int], list[int]]:
    """A loop in which `take(tokens, budget, behind)` decides; the budget shrinks by `lower` times the share."""

    def share(wanted: list[int], budget: int) -> list[int]:
        shares = []
        for number, tokens in enumerate(wanted):
            shares.append(take(tokens, budget, len(wanted) - 1 - number))
            budget -= lower * shares[-1]
        return shares

    return share


def _in_order(key: Callable[[int, int], int]) -> Callable[[list[int], int], list[int]]:
    """The right shares, handed out in another order; `key(number, tokens)`, the lowest first."""

    def share(wanted: list[int], budget: int) -> list[int]:
        order = sorted(range(len(wanted)), key=lambda i: key(i, wanted[i]))
        found = dict(zip(order, share_budget([wanted[i] for i in order], budget), strict=True))
        return [found[i] for i in range(len(wanted))]

    return share


BUDGET = (
    WrongVersion(
        "lets a long prompt take the whole step, so that the requests behind it get nothing",
        _sharing(lambda tokens, budget, behind: min(tokens, budget)),
    ),
    WrongVersion(
        "computes a prompt only if all of it fits: no chunks",
        _sharing(lambda tokens, budget, behind: tokens if tokens <= budget else 0),
    ),
    WrongVersion(
        "gives everyone the same share, whether it can be used or not",
        lambda wanted, budget: [min(tokens, budget // len(wanted)) for tokens in wanted],
    ),
    WrongVersion(
        "hands out more tokens than the budget has: it sets one token aside for each other request, and then does not "
        "lower the budget",
        lambda wanted, budget: [min(tokens, budget - len(wanted) + 1) for tokens in wanted],
    ),
    WrongVersion(
        "sets tokens aside for requests that already have theirs",
        lambda wanted, budget: _sharing(lambda tokens, left, behind: max(1, min(tokens, left - len(wanted))))(
            wanted, budget
        ),
    ),
    WrongVersion("serves the shortest first instead of the most urgent", _in_order(lambda number, tokens: tokens)),
    WrongVersion("serves the longest first instead of the most urgent", _in_order(lambda number, tokens: -tokens)),
    WrongVersion("serves the last request first; the first is the most urgent", _in_order(lambda number, _: -number)),
    WrongVersion(
        "sets one token too many aside: a request is not behind itself",
        _sharing(lambda tokens, budget, behind: max(1, min(tokens, budget - behind - 1))),
    ),
    WrongVersion(
        "sets one token too few aside for the requests behind",
        _sharing(lambda tokens, budget, behind: min(tokens, budget - max(0, behind - 1))),
    ),
    WrongVersion(
        "does not lower the budget by what it hands out",
        _sharing(lambda tokens, budget, behind: min(tokens, budget - behind), lower=0),
    ),
    WrongVersion("gives everyone what they want and ignores the budget", lambda wanted, budget: list(wanted)),
    WrongVersion(
        "hands out what is left even to a request that wants less",
        _sharing(lambda tokens, budget, behind: budget - behind),
    ),
    WrongVersion("gives every request one token and no more", lambda wanted, budget: [1] * len(wanted)),
    WrongVersion(
        "adds to the budget what it hands out instead of taking it away",
        _sharing(lambda tokens, budget, behind: min(tokens, budget - behind), lower=-1),
    ),
    WrongVersion(
        "adds a token for each request behind instead of setting it aside",
        _sharing(lambda tokens, budget, behind: min(tokens, budget + behind)),
    ),
    WrongVersion(
        "takes the larger of what is wanted and what is left instead of the smaller",
        _sharing(lambda tokens, budget, behind: max(tokens, budget - behind)),
    ),
)

# -------------------------------------------------------------------------------------------------------------- admit


def _admitting(
    *,
    blocks: Callable[[int, int, int], int] = lambda tokens, size, budget: -(-tokens // size),
    share: Callable[[int, int], int] = min,
    stops: Callable[[int, int, int], bool] = lambda need, free, tokens: need > free,
    takes_blocks: bool = True,
    takes_budget: bool = True,
    asks_budget: bool = True,
    skips: bool = False,
    more_seats: int = 0,
) -> Callable[[list[int], int, int, int, int], list[int]]:
    """`admit` with one part exchanged."""

    def admit(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
        shares: list[int] = []
        for tokens in waiting:
            need = blocks(tokens, block_size, budget)
            if (asks_budget and budget == 0) or len(shares) >= seats + more_seats:
                break
            if stops(need, free_blocks, tokens):
                if skips:
                    continue
                break
            free_blocks -= need if takes_blocks else 0
            shares.append(share(tokens, budget))
            budget -= shares[-1] if takes_budget else 0
        return shares

    return admit


def _whole_prompts(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    def fitting() -> Iterator[int]:
        left = budget
        for tokens in waiting:
            left -= tokens
            if left < 0:
                return
            yield tokens

    return admit(list(fitting()), budget, seats, free_blocks, block_size)


def _only_when_all_run_out(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    shares: list[int] = []
    for tokens in waiting:
        blocks = -(-tokens // block_size)
        if budget == 0 and len(shares) == seats and blocks > free_blocks:
            break
        free_blocks -= blocks
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares


ADMIT = (
    WrongVersion("lets short requests overtake a long one, which may then wait forever", _admitting(skips=True)),
    WrongVersion(
        "asks for room for the first chunk only, so that the request will soon be preempted",
        _admitting(blocks=lambda tokens, size, budget: -(-min(tokens, budget) // size)),
    ),
    WrongVersion("does not cut a prompt into chunks: it waits until all of it fits the budget", _whole_prompts),
    WrongVersion(
        "forgets the last block, which is only partly filled (// rounds down)",
        _admitting(blocks=lambda tokens, size, budget: tokens // size),
    ),
    WrongVersion(
        "admits more requests than there are seats",
        lambda waiting, budget, seats, free_blocks, block_size: admit(
            waiting, budget, len(waiting), free_blocks, block_size
        ),
    ),
    WrongVersion("admits requests when nothing is left of the budget", _admitting(asks_budget=False)),
    WrongVersion(
        "keeps a request out when it needs exactly the blocks that are free (>= instead of >)",
        _admitting(stops=lambda need, free, tokens: need >= free),
    ),
    WrongVersion(
        "counts one block too many for a request that fills its last block exactly (// and then + 1)",
        _admitting(blocks=lambda tokens, size, budget: tokens // size + 1),
    ),
    WrongVersion(
        "compares tokens with blocks: divide the tokens by block_size first",
        _admitting(blocks=lambda tokens, size, budget: tokens),
    ),
    WrongVersion("does not take a request's blocks away from the free ones", _admitting(takes_blocks=False)),
    WrongVersion("does not lower the budget by what it hands out", _admitting(takes_budget=False)),
    WrongVersion(
        "never finds too few free blocks: it does not ask, or the number of blocks it asks for is not above 0",
        _admitting(stops=lambda need, free, tokens: False),
    ),
    WrongVersion(
        "lets a request compute all its tokens, whatever is left of the budget",
        lambda waiting, budget, seats, free_blocks, block_size: waiting[
            : len(admit(waiting, budget, seats, free_blocks, block_size))
        ],
    ),
    WrongVersion(
        "gives a request all that is left of the budget, even if it has fewer tokens",
        _admitting(share=lambda tokens, budget: budget),
    ),
    WrongVersion("admits one request more than there are seats", _admitting(more_seats=1)),
    WrongVersion("leaves one seat empty", _admitting(more_seats=-1)),
    WrongVersion(
        "stops only when seats, budget and blocks have all run out (and instead of or)",
        _only_when_all_run_out,
    ),
    WrongVersion(
        "stops at a request that fits, and admits one that does not (the comparison is the wrong way round)",
        _admitting(stops=lambda need, free, tokens: need <= free),
    ),
    WrongVersion("takes the larger of tokens and budget instead of the smaller", _admitting(share=max)),
    WrongVersion("admits nobody", lambda waiting, budget, seats, free_blocks, block_size: []),
    WrongVersion(
        "goes on after the budget is used up, because it asks for exactly 0 and hands out more than is left",
        _admitting(share=lambda tokens, budget: tokens),
    ),
    WrongVersion(
        "stops after the first request",
        lambda waiting, budget, seats, free_blocks, block_size: admit(
            waiting[:1], budget, seats, free_blocks, block_size
        ),
    ),
)

# ------------------------------------------------------------------------------------------------------ choose_victim

VICTIM = (
    WrongVersion(
        "takes the blocks of the most urgent request", lambda running: min(range(len(running)), key=running.__getitem__)
    ),
    WrongVersion("takes the last of the list, whoever that is", lambda running: len(running) - 1),
    WrongVersion("takes the first of the list, whoever that is", lambda running: 0),
    WrongVersion(
        "does not look at the priority", lambda running: max(range(len(running)), key=lambda i: running[i][1])
    ),
    WrongVersion(
        "does not look at the arrival among requests of the same priority",
        lambda running: max(range(len(running)), key=lambda i: running[i][0]),
    ),
    WrongVersion(
        "takes the earliest arrival among requests of the same priority",
        lambda running: max(range(len(running)), key=lambda i: (running[i][0], -running[i][1])),
    ),
    WrongVersion(
        "takes the lowest priority number for the least urgent",
        lambda running: min(range(len(running)), key=lambda i: (running[i][0], -running[i][1])),
    ),
    WrongVersion(
        "never takes the last of the list", lambda running: max(range(len(running) - 1), key=running.__getitem__)
    ),
    WrongVersion(
        "never takes the first of the list", lambda running: max(range(1, len(running)), key=running.__getitem__)
    ),
    WrongVersion("returns the request instead of its index", max),
    WrongVersion(
        "returns the number of arrival instead of the index in the list",
        lambda running: running[choose_victim(running)][1],
    ),
)
