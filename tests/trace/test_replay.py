"""The state after a step: each thread has its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from minillm.trace.cache_state import CacheState
from minillm.trace.replay import Replay

from .traces import busy, story


def test_going_forward_folds_only_the_events_in_between():
    folded = []

    class Counted(CacheState):
        def fold(self, event):
            folded.append(event)
            super().fold(event)

    trace = story()
    replay = Replay(trace, Counted)
    assert [replay.at(step).step for step in range(1, 10)] == list(range(1, 10))
    assert len(folded) == len(trace)


def test_an_interrupt_while_events_are_folded_counts_none_twice():
    class Interrupted(CacheState):
        at = 40

        def fold(self, event):
            super().fold(event)
            Interrupted.at -= 1
            if not Interrupted.at:
                raise KeyboardInterrupt

    replay = Replay(story(), Interrupted)
    with pytest.raises(KeyboardInterrupt):
        replay.at()
    assert replay.at().totals == Replay(story(), CacheState).at().totals


def test_another_thread_does_not_move_the_state_that_this_one_draws():
    replay = Replay(busy(), CacheState)
    state = replay.at(2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: replay.at(9).step).result() == 9
    assert state.step == 2 and replay.at(2) is state
