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
    WrongVersion("runs the requests one after another, without batches", lambda lengths, batch_size: sum(lengths)),
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
        "puts one request too many into each batch (a slice excludes its end)",
        lambda lengths, batch_size: sum(
            max(lengths[i : i + batch_size + 1]) for i in range(0, len(lengths), batch_size)
        ),
    ),
    WrongVersion(
        "leaves the last request out of each batch (a slice excludes its end)",
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
        "ends the range one too early, so that a last batch with one request is left out",
        lambda lengths, batch_size: sum(
            max(lengths[i : i + batch_size]) for i in range(0, len(lengths) - 1, batch_size)
        ),
    ),
    WrongVersion(
        "starts every batch at the start of the list, so that earlier requests count again",
        lambda lengths, batch_size: sum(max(lengths[: i + batch_size]) for i in range(0, len(lengths), batch_size)),
    ),
    WrongVersion(
        "extends every batch to the end of the list, so that later requests count too",
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
    """The right shares, given in another order: the lowest `key(number, tokens)` first."""

    def share(wanted: list[int], budget: int) -> list[int]:
        order = sorted(range(len(wanted)), key=lambda i: key(i, wanted[i]))
        found = dict(zip(order, share_budget([wanted[i] for i in order], budget), strict=True))
        return [found[i] for i in range(len(wanted))]

    return share


BUDGET = (
    WrongVersion(
        "lets a long prompt take the whole budget, so that the requests behind it get nothing",
        _sharing(lambda tokens, budget, behind: min(tokens, budget)),
    ),
    WrongVersion(
        "gives each request at least one token without reserving it, so that the shares exceed the budget",
        _sharing(lambda tokens, budget, behind: max(1, min(tokens, budget))),
    ),
    WrongVersion(
        "computes a prompt only if all of it fits: no chunks",
        _sharing(lambda tokens, budget, behind: tokens if tokens <= budget else 0),
    ),
    WrongVersion(
        "gives every request the same share, even if others could use more",
        lambda wanted, budget: [min(tokens, budget // len(wanted)) for tokens in wanted],
    ),
    WrongVersion(
        "gives out more tokens than the budget: it reserves one token for each other request, but does not subtract "
        "the shares from the budget",
        lambda wanted, budget: [min(tokens, budget - len(wanted) + 1) for tokens in wanted],
    ),
    WrongVersion(
        "reserves tokens for requests that already have their share",
        lambda wanted, budget: _sharing(lambda tokens, left, behind: max(1, min(tokens, left - len(wanted))))(
            wanted, budget
        ),
    ),
    WrongVersion("serves the shortest first instead of the most urgent", _in_order(lambda number, tokens: tokens)),
    WrongVersion("serves the longest first instead of the most urgent", _in_order(lambda number, tokens: -tokens)),
    WrongVersion("serves the last request first; the first is the most urgent", _in_order(lambda number, _: -number)),
    WrongVersion(
        "reserves one token too many: a request is not behind itself",
        _sharing(lambda tokens, budget, behind: max(1, min(tokens, budget - behind - 1))),
    ),
    WrongVersion(
        "reserves one token too few for the requests behind",
        _sharing(lambda tokens, budget, behind: min(tokens, budget - max(0, behind - 1))),
    ),
    WrongVersion(
        "does not subtract the shares from the budget",
        _sharing(lambda tokens, budget, behind: min(tokens, budget - behind), lower=0),
    ),
    WrongVersion("gives every request what it wants and ignores the budget", lambda wanted, budget: list(wanted)),
    WrongVersion(
        "gives a request all that is left, even if it wants less",
        _sharing(lambda tokens, budget, behind: budget - behind),
    ),
    WrongVersion("gives every request one token and no more", lambda wanted, budget: [1] * len(wanted)),
    WrongVersion(
        "adds each share to the budget instead of subtracting it",
        _sharing(lambda tokens, budget, behind: min(tokens, budget - behind), lower=-1),
    ),
    WrongVersion(
        "adds a token for each request behind instead of reserving it",
        _sharing(lambda tokens, budget, behind: min(tokens, budget + behind)),
    ),
    WrongVersion(
        "uses the larger of what is wanted and what is left instead of the smaller",
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
    """`admit` with one part replaced."""

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
        "checks the blocks of the first chunk only, so that the request will soon be preempted",
        _admitting(blocks=lambda tokens, size, budget: -(-min(tokens, budget) // size)),
    ),
    WrongVersion("does not split a prompt into chunks: it waits until the budget fits all of it", _whole_prompts),
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
    WrongVersion("admits requests when no budget is left", _admitting(asks_budget=False)),
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
    WrongVersion("does not subtract a request's blocks from free_blocks", _admitting(takes_blocks=False)),
    WrongVersion("does not subtract the shares from the budget", _admitting(takes_budget=False)),
    WrongVersion(
        "never finds too few free blocks: it does not check, or the number of needed blocks is not above 0",
        _admitting(stops=lambda need, free, tokens: False),
    ),
    WrongVersion(
        "admits a request as long as any block is free, however many the request needs",
        _admitting(stops=lambda need, free, tokens: free <= 0),
    ),
    WrongVersion(
        "stops only when exactly 0 blocks are free, however many the request needs",
        _admitting(stops=lambda need, free, tokens: free == 0),
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
        "stops at a request that fits, and admits one that does not (the comparison is inverted)",
        _admitting(stops=lambda need, free, tokens: need <= free),
    ),
    WrongVersion("uses the larger of tokens and budget instead of the smaller", _admitting(share=max)),
    WrongVersion("admits no request", lambda waiting, budget, seats, free_blocks, block_size: []),
    WrongVersion(
        "continues after the budget is used up: it gives out more than is left, and stops only at exactly 0",
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
    WrongVersion("preempts the most urgent request", lambda running: min(range(len(running)), key=running.__getitem__)),
    WrongVersion("always preempts the last request of the list", lambda running: len(running) - 1),
    WrongVersion("always preempts the first request of the list", lambda running: 0),
    WrongVersion("ignores the priority", lambda running: max(range(len(running)), key=lambda i: running[i][1])),
    WrongVersion(
        "ignores the arrival number among requests of the same priority",
        lambda running: max(range(len(running)), key=lambda i: running[i][0]),
    ),
    WrongVersion(
        "adds the priority and the arrival number; the priority must decide first",
        lambda running: max(range(len(running)), key=lambda i: sum(running[i])),
    ),
    WrongVersion(
        "preempts the earliest arrival among requests of the same priority",
        lambda running: max(range(len(running)), key=lambda i: (running[i][0], -running[i][1])),
    ),
    WrongVersion(
        "treats the lowest priority number as the least urgent",
        lambda running: min(range(len(running)), key=lambda i: (running[i][0], -running[i][1])),
    ),
    WrongVersion(
        "never preempts the last request of the list",
        lambda running: max(range(len(running) - 1), key=running.__getitem__),
    ),
    WrongVersion(
        "never preempts the first request of the list",
        lambda running: max(range(1, len(running)), key=running.__getitem__),
    ),
    WrongVersion("returns the request instead of its index", max),
    WrongVersion(
        "returns the arrival number instead of the index in the list",
        lambda running: running[choose_victim(running)][1],
    ),
)
