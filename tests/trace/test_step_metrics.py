"""Who ran and who waited, counted by hand."""

from __future__ import annotations

from minillm.trace import RequestFinished
from minillm.trace.step_metrics import step_metrics
from tests.trace.traces import Script, decode, prefill, story


def test_waiting_requests_are_those_that_got_no_share_of_the_step() -> None:
    # Request C arrives after step 1, is preempted in step 6, and waits in step 7.
    metrics = step_metrics(story())
    assert [m.step for m in metrics] == [*range(1, 10)]
    assert [m.num_waiting for m in metrics] == [0, 1, 0, 0, 0, 1, 1, 0, 0]
    assert metrics[3].num_running == 3


def test_request_that_finishes_or_is_aborted_waits_no_more() -> None:
    s = Script(16, 24)
    s.add("a", "a", 5)
    s.add("b", "b", 5)
    s.step(prefill("a", 5))
    s.trace.append(RequestFinished("b", "abort", 5, 0))
    s.step(decode("a", finish="stop"))
    s.add("c", "c", 5)
    s.step(prefill("c", 5))
    assert [m.num_waiting for m in step_metrics(s.trace)] == [1, 0, 0]


def test_unfinished_step_counts_once_it_has_run() -> None:
    events = story().events
    assert step_metrics(events[:-1]) == step_metrics(events)
