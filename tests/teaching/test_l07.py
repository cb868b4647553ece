"""Lesson 07: the references decide as the engine's scheduler does, and keep the promises that the lesson makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minillm.teaching.exercises.l07_continuous_batching import (
    admit,
    choose_victim,
    heavy_tailed_lengths,
    share_budget,
    static_steps,
)
from minillm.viz.static_batching import Job, static_schedule

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
