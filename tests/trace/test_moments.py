"""The steps that lessons show, found in a trace."""

from __future__ import annotations

import pytest

from minillm.errors import TraceError
from minillm.trace import RequestPreempted, StepStarted, TokensCommitted, Trace
from minillm.trace.moments import Moment, first_preemption, first_rejected_round

from .traces import story


def test_first_round_with_two_wrong_drafts_is_found():
    moment = first_rejected_round(story())
    wrong, step = {}, 0
    for event in story():
        step = event.step if isinstance(event, StepStarted) else step
        if isinstance(event, TokensCommitted) and event.num_drafts - event.num_accepted >= 2:
            wrong.setdefault(step, event.request_id)
    assert moment == Moment(min(wrong), wrong[min(wrong)])


def test_first_preemption_is_found():
    moment = first_preemption(story())
    assert moment.request_id == story().of(RequestPreempted)[0].request_id


def test_a_trace_without_it_says_so():
    with pytest.raises(TraceError, match="the trace has no preemption"):
        first_preemption(Trace())
