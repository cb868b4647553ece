"""Lesson 07: drive an engine step by step, and count what its scheduler did. Nothing here is timed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from minillm import LLM, SamplingParams
from minillm.request import Request
from minillm.teaching.submitted import submitted
from minillm.trace import RequestPreempted, StepRan, Trace


def serve(engine: LLM, prompts: Sequence, params: Sequence[SamplingParams], every: int = 0) -> list[Request]:
    """Submit the prompts (all at once, or one every `every` steps), step until all are done, return the requests."""
    requests, left, step = [], list(zip(prompts, params, strict=True)), 0
    with ExitStack() as stack:
        while left or engine.engine.has_requests:
            while left and (not every or step % every == 0):
                requests += stack.enter_context(submitted(engine, *left.pop(0)))
                if every:
                    break
            engine.engine.step()
            step += 1
    return requests


def starts_and_ends(lengths: Sequence[int], seats: int) -> list[tuple[int, int]]:
    """First and last step of each request if a free seat goes to the next in line at once; steps count from 1.

    Counts as the lesson does: one step per output token, prompts cost nothing, and memory never runs out.
    """
    free_from = [1] * seats
    spans = []
    for length in lengths:
        start = heapq.heappop(free_from)
        spans.append((start, start + length - 1))
        heapq.heappush(free_from, start + length)
    return spans


@dataclass(frozen=True)
class LatePrompt:
    """What a long prompt meant for those who were reading, and for itself; tokens and steps."""

    largest_step: int
    """Tokens of the largest step while anyone was reading."""
    steps_waited: int
    """Steps until the newcomer's first token."""
    most_left_out: int
    """Most readers that any of these steps left out."""


def serve_late_prompt(
    engine: LLM, prompts: Sequence[str], reading: Sequence[SamplingParams], long_prompt: dict
) -> LatePrompt:
    """Let all `prompts` begin to decode, then submit `long_prompt`, and step until it has its first token.

    Then all of them are aborted.
    """
    largest = waited = most_left_out = 0
    with submitted(engine, list(prompts), list(reading)) as readers:
        while any(not reader.num_output_tokens for reader in readers):
            engine.engine.step()
        newcomer = submitted(engine, long_prompt, SamplingParams(temperature=0, max_tokens=2))
        with newcomer as [last], engine.trace() as trace:
            while not last.num_output_tokens:
                at_it = sum(not reader.finished for reader in readers)
                engine.engine.step()
                work, waited = trace.of(StepRan)[-1].work, waited + 1
                largest = max(largest, sum(part.num_tokens for part in work) if at_it else 0)
                most_left_out = max(most_left_out, at_it - sum(part.kind == "decode" for part in work))
    return LatePrompt(largest, waited, most_left_out)


@dataclass(frozen=True)
class Served:
    """What one run of a crowd came to."""

    requests: list[Request]
    steps: int
    preempted: list[RequestPreempted]
    trace: Trace

    @property
    def computed_twice(self) -> int:
        """Tokens whose keys and values were lost to preemption and computed again."""
        return sum(event.num_computed_tokens for event in self.preempted)

    def same_tokens(self, expected: Sequence[Sequence[int]]) -> int:
        """How many requests have exactly the tokens of `expected`."""
        pairs = zip(self.requests, expected, strict=True)
        return sum(request.output_token_ids == list(tokens) for request, tokens in pairs)

    def longest_stall(self) -> int:
        """Most steps in a row in which a decoding request got no token.

        The wait after a preemption is not counted: the request decodes again once all its tokens but the last are
        computed again.
        """
        last_seen: dict[str, int] = {}
        longest = 0
        for number, step in enumerate(self.trace.of(StepRan), 1):
            for work in step.work:
                if work.kind == "decode" and work.request_id in last_seen:
                    longest = max(longest, number - last_seen[work.request_id] - 1)
                last_seen[work.request_id] = number
        return longest

    def first_step_of(self, number: int) -> int:
        """The step, from 1, in which request `number` of those submitted first ran."""
        steps = self.trace.of(StepRan)
        name = self.requests[number].request_id
        return next(n for n, step in enumerate(steps, 1) if any(work.request_id == name for work in step.work))


def serve_traced(engine: LLM, prompts: Sequence, params: Sequence[SamplingParams], every: int = 0) -> Served:
    """`serve` on a fresh engine under a trace.

    The cache is set to zeros first, so that reading a slot nobody has written gives the same tokens on every run.
    """
    for pool in (engine.engine.runner.cache.keys, engine.engine.runner.cache.values):
        pool.zero_()
    with engine.trace() as trace:
        requests = serve(engine, prompts, params, every)
    return Served(requests, len(trace.of(StepRan)), trace.of(RequestPreempted), trace)
