"""The model of static batching does what its description says, counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import ConfigError
from minillm.trace.static_batching import Job, jobs_of, static_schedule
from minillm.trace.timeline_state import WAITING, TimelineState

from .traces import Script, decode, prefill, story, verify


def kinds(row):
    return " ".join(cell.kind for _, cell in sorted(row.cells.items()))


def test_batch_runs_until_its_longest_ends_and_nobody_joins():
    timeline = static_schedule([Job(1, 5, 2), Job(1, 9, 5), Job(1, 3, 1)], batch_size=2)
    assert [kinds(row) for row in timeline.rows] == [
        "prefill decode idle idle idle",
        "prefill decode decode decode decode",
        "waiting waiting waiting waiting waiting prefill",
    ]
    assert (timeline.num_steps, timeline.useful_slots, timeline.slots) == (6, 2 + 5 + 1, 12)
    assert [row.end for row in timeline.rows] == [2, 5, 6]
    assert timeline.committed_tokens == 8
    assert sum(cell is WAITING for cell in timeline.rows[2].cells.values()) == 5, "shared by all waiting steps"


def test_batch_waits_until_it_is_full_or_nobody_else_comes():
    timeline = static_schedule([Job(1, 4, 2), Job(7, 4, 2), Job(8, 4, 1)], batch_size=2)
    assert kinds(timeline.rows[0]) == "waiting " * 6 + "prefill decode"
    assert kinds(timeline.rows[2]) == "waiting prefill"


def test_first_come_first_served_whatever_the_order_of_the_list():
    timeline = static_schedule([Job(3, 4, 2), Job(1, 4, 2)], batch_size=1)
    assert [row.end for row in timeline.rows] == [4, 2]


def test_prompts_share_the_token_budget_and_then_wait_for_each_other():
    timeline = static_schedule([Job(1, 6, 1), Job(1, 10, 2), Job(1, 2, 1)], batch_size=3, max_num_batched_tokens=8)
    assert [kinds(row) for row in timeline.rows] == [
        "prefill idle idle idle",
        "prefill prefill idle decode",
        "idle idle prefill idle",
    ]
    assert [load.tokens for load in timeline.loads()] == [8, 8, 2, 1]
    assert [row.end for row in timeline.rows] == [3, 4, 3]


def test_jobs_are_those_of_the_trace():
    jobs = jobs_of(TimelineState().fold_all(story()).timeline)
    assert [(job.arrival, job.num_prompt_tokens) for job in jobs] == [(1, 53), (1, 28), (2, 44)]
    # Steps that gained tokens; request B gained 21 tokens in 7 of them.
    assert [job.num_outputs for job in jobs] == [7, 7, 5]


def test_late_trace_counts_steps_from_its_first():
    s = Script()
    s.step_number = 10
    s.add("a", "a", 5)
    s.step(prefill("a", 5))
    s.add("b", "b", 5)
    s.step(verify("a", ["x", "y"], 2), prefill("b", 5))
    s.step(decode("a"))
    jobs = jobs_of(TimelineState().fold_all(s.trace).timeline)
    assert [(job.arrival, job.num_outputs) for job in jobs] == [(1, 3), (2, 1)]


def test_job_without_outputs_never_gets_a_slot():
    timeline = static_schedule([Job(1, 4, 0), Job(1, 4, 1)], batch_size=1)
    assert [kinds(row) for row in timeline.rows] == ["", "prefill"]


def test_wrong_values_are_refused():
    for jobs, size, budget, name in (
        ([], 0, None, "batch_size=0"),
        ([], 1, 0, "max_num_batched_tokens=0"),
        ([Job(0, 4, 1)], 1, None, "arrives in step 0"),
        ([Job(1, 0, 1)], 1, None, "0 prompt tokens"),
        ([Job(1, 4, 1), Job(1, 4, -1)], 1, None, "job 1 has -1 outputs"),
    ):
        with pytest.raises(ConfigError, match=name):
            static_schedule(jobs, size, budget)


jobs = st.lists(st.builds(Job, st.integers(1, 30), st.integers(1, 40), st.integers(0, 20)), max_size=12)


@settings(max_examples=80)
@given(jobs, st.integers(1, 5), st.sampled_from([None, 1, 7, 64]))
def test_every_schedule_does_all_the_work_within_its_limits(jobs, size, budget):
    timeline = static_schedule(jobs, size, budget)
    for row, job in zip(timeline.rows, jobs, strict=True):
        assert sum(cell.num_committed for cell in row.cells.values()) == job.num_outputs
        prompt = sum(cell.num_tokens for cell in row.cells.values() if cell.kind == "prefill")
        assert prompt == (job.num_prompt_tokens if job.num_outputs else 0)
        assert not row.cells or min(row.cells) == job.arrival
    for step in timeline.steps:
        cells = [row.cells[step] for row in timeline.rows if step in row.cells]
        assert sum(cell.kind != "waiting" for cell in cells) <= size
        prompts = sum(cell.num_tokens for cell in cells if cell.kind == "prefill")
        assert budget is None or prompts <= budget
