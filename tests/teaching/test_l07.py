"""Lesson 07: the references decide as the engine's scheduler does, and keep the promises that the lesson makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l07_continuous_batching import (
    admit,
    choose_victim,
    heavy_tailed_lengths,
    share_budget,
    static_steps,
)
from minillm.teaching.workshop.l07_serving import Served, starts_and_ends
from minillm.trace import StepRan, Trace, Work
from minillm.trace.static_batching import Job, static_schedule

WANTED = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), batch=st.integers(1, 6))
def test_counted_steps_are_those_of_the_modelled_picture(lengths: list[int], batch: int):
    jobs = [Job(arrival=1, num_prompt_tokens=1, num_outputs=length) for length in lengths]
    rows = static_schedule(jobs, batch).rows
    assert static_steps(lengths, batch) == max(step for row in rows for step in row.cells)


@given(wanted=WANTED, spare=st.integers(0, 80))
def test_everybody_gets_a_token_and_nothing_is_left_that_could_be_used(wanted: list[int], spare: int):
    budget = len(wanted) + spare
    shares = share_budget(wanted, budget)
    assert all(1 <= share <= tokens for share, tokens in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))


@given(
    waiting=WANTED,
    budget=st.integers(0, 40),
    seats=st.integers(0, 6),
    free=st.integers(0, 20),
    block_size=st.integers(1, 8),
)
def test_whoever_is_let_in_fits_and_nobody_is_overtaken(
    waiting: list[int], budget: int, seats: int, free: int, block_size: int
):
    shares = admit(waiting, budget, seats, free, block_size)
    let_in = waiting[: len(shares)]
    needed = [-(-tokens // block_size) for tokens in waiting]
    assert len(shares) <= seats and sum(shares) <= budget and all(shares)
    assert sum(needed[: len(shares)]) <= free
    assert shares[:-1] == let_in[:-1], "only the last one let in may be cut into a chunk"
    if len(shares) < min(seats, len(waiting)) and sum(shares) < budget:
        assert sum(needed[: len(shares) + 1]) > free, "the next one was kept out without need"


@given(running=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 99)), min_size=1, max_size=8, unique=True))
def test_the_victim_is_less_urgent_than_all_others(running: list[tuple[int, int]]):
    victim = running[choose_victim(running)]
    assert all(victim >= other for other in running)


def test_the_lengths_have_a_heavy_tail():
    lengths = heavy_tailed_lengths(32)
    assert lengths == heavy_tailed_lengths(32)
    assert max(lengths) > 8 * sorted(lengths)[16]


@pytest.mark.parametrize(("again", "stall"), [("decode", 9), ("prefill", 0)])
def test_a_stall_is_a_wait_of_a_decoding_request_and_not_of_a_preempted_one(again: str, stall: int):
    kinds = {1: "prefill", 2: "decode", 12: again, 13: "decode"}
    steps = [StepRan(n, [Work("0", kinds[n], n, 1)] if n in kinds else []) for n in range(1, 14)]
    assert Served([], len(steps), [], Trace(steps)).longest_stall() == stall


def _shortest_first(wanted: list[int], budget: int) -> list[int]:
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    shares = dict(zip(order, share_budget([wanted[i] for i in order], budget), strict=True))
    return [shares[i] for i in range(len(wanted))]


def _stops_at_exactly_enough(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int):
    return admit(waiting, budget, seats, free_blocks - 1, block_size)


def _block_by_free_blocks(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int):
    return admit(waiting, budget, seats, free_blocks, free_blocks)


def _any_free_block(spent: Callable[[int], bool]):
    def answer(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
        shares: list[int] = []
        for tokens in waiting:
            if budget == 0 or len(shares) == seats or spent(free_blocks):
                break
            free_blocks -= -(-tokens // block_size)
            shares.append(min(tokens, budget))
            budget -= shares[-1]
        return shares

    return answer


def _weighted_sum(running: list[tuple[int, int]]) -> int:
    return max(range(len(running)), key=lambda i: 10 * running[i][0] + running[i][1])


def _priority_times_a_thousand(running: list[tuple[int, int]]) -> int:
    return max(range(len(running)), key=lambda i: 1000 * running[i][0] + running[i][1])


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("share_budget", _shortest_first, "serves the shortest first"),
        ("admit", _stops_at_exactly_enough, "keeps a request out when it needs exactly the blocks that are free"),
        ("admit", _block_by_free_blocks, ""),
        ("admit", _any_free_block(lambda free: free <= 0), "as long as any block is free"),
        ("admit", _any_free_block(lambda free: free == 0), "stops only when exactly 0 blocks are free"),
        ("choose_victim", _weighted_sum, "adds the priority and the arrival number"),
        ("choose_victim", _priority_times_a_thousand, "adds the priority and the arrival number"),
    ],
)
def test_answers_that_once_passed_are_caught(name: str, answer, cause: str):
    result = check_function(f"l07.{name}", answer)
    assert not result.passed
    assert cause in result.counterexample.cause


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), seats=st.integers(1, 6))
def test_counted_spans_fill_the_seats_without_gaps_and_never_beat_the_longest(lengths: list[int], seats: int):
    spans = starts_and_ends(lengths, seats)
    assert [end - start + 1 for start, end in spans] == lengths
    last = max(end for _, end in spans)
    running = [sum(start <= step <= end for start, end in spans) for step in range(1, last + 1)]
    assert max(running) <= seats
    first_idle = next((step for step, busy in enumerate(running, 1) if busy < seats), last + 1)
    assert all(start <= first_idle for start, _ in spans), "a request waited although a seat was free"
    assert max(max(lengths), -(-sum(lengths) // seats)) <= last
