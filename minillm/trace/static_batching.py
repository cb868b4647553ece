"""The schedule of the same requests under static batching, from a model rather than a run.

A batch waits until it is full or no more requests will arrive. Then its prompts are prefilled, and every further step
adds one token to each request until the longest output is finished. No request joins a running batch, and the slot of a
finished request stays occupied. Servers batched like this before Orca (Yu et al., "Orca: A Distributed Serving System
for Transformer-Based Generative Models", OSDI 2022). The model favours static batching: prompts are not padded to the
longest, and a step costs the same however full it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.trace.timeline_state import WAITING, Cell, Row, Timeline


@dataclass(frozen=True)
class Job:
    """The properties of a request that determine its schedule."""

    arrival: int
    """The first step that could run it, counted from 1."""
    num_prompt_tokens: int
    num_outputs: int
    """Steps that add to the output: one token each, or the tokens of one round of speculation."""
    prompt: str = ""


def jobs_of(timeline: Timeline) -> list[Job]:
    """Return the requests of a recorded timeline, with steps counted from its first. An unfinished one counts its
    output so far."""
    offset = timeline.first_step - 1
    return [
        Job(
            row.arrival - offset,
            row.num_prompt_tokens,
            sum(bool(c.num_committed) for c in row.cells.values()),
            row.prompt,
        )
        for row in timeline.rows
    ]


def static_schedule(jobs: Sequence[Job], batch_size: int, max_num_batched_tokens: int | None = None) -> Timeline:
    """Return the modelled timeline of `jobs` in batches of `batch_size`, first come, first served.

    The prompts of a batch are prefilled in one step; with `max_num_batched_tokens` one after the other, in as many
    steps as this budget requires. A job without outputs never gets a slot. Raises `ConfigError` for a batch size or
    budget below 1, or a job that arrives before step 1, has no prompt, or has fewer than 0 outputs.
    """
    _check(jobs, batch_size, max_num_batched_tokens)
    timeline = Timeline(batch_size, max_num_batched_tokens or 0, modelled=True)
    timeline.rows = [Row(i, job.prompt, job.arrival, job.num_prompt_tokens) for i, job in enumerate(jobs)]
    queue = sorted((i for i, job in enumerate(jobs) if job.num_outputs), key=lambda i: jobs[i].arrival)
    end = 0
    for first in range(0, len(queue), batch_size):
        batch = queue[first : first + batch_size]
        start = max(end + 1, *(jobs[i].arrival for i in batch))
        end = _run(batch, jobs, timeline.rows, start, max_num_batched_tokens)
    timeline.num_steps = end
    return timeline


def _check(jobs: Sequence[Job], batch_size: int, budget: int | None) -> None:
    for name, value in (("batch_size", batch_size), ("max_num_batched_tokens", budget)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    for number, job in enumerate(jobs):
        if job.arrival < 1 or job.num_prompt_tokens < 1:
            raise ConfigError(
                f"job {number} arrives in step {job.arrival} with {job.num_prompt_tokens} prompt tokens; "
                "both must be at least 1"
            )
        if job.num_outputs < 0:
            raise ConfigError(f"job {number} has {job.num_outputs} outputs; it must be at least 0")


def _run(batch: Sequence[int], jobs: Sequence[Job], rows: Sequence[Row], start: int, budget: int | None) -> int:
    """Add one batch that starts in step `start` to `rows`; return its last step."""
    total = sum(jobs[i].num_prompt_tokens for i in batch)
    budget = budget or total
    first_token = start - 1 + -(-total // budget)
    end = first_token - 1 + max(jobs[i].num_outputs for i in batch)
    tokens_before = 0
    for i in batch:
        job, cells = jobs[i], rows[i].cells
        done = first_token - 1 + job.num_outputs
        cells.update(dict.fromkeys(range(job.arrival, start), WAITING))
        cells.update((step, Cell("idle")) for step in range(start, end + 1))
        for token in range(tokens_before, tokens_before + job.num_prompt_tokens):
            cell = cells[start + token // budget]
            cell.kind, cell.num_tokens = "prefill", cell.num_tokens + 1
        # The batch advances together, so all first tokens come in the step that completes the last prompt.
        cells[first_token].num_committed = 1
        cells.update((step, Cell("decode", 1, num_committed=1)) for step in range(first_token + 1, done + 1))
        rows[i].end, rows[i].reason = done, "length"
        tokens_before += job.num_prompt_tokens
    return end
