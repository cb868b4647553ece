"""What a step costs on this machine: a forward of the target by its rows, and drafting.

It is measured when an engine starts. `step_times.py` corrects it by what steps take while the engine runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from minillm.batch import Segment
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.speculative.drafter import Drafter

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows to measure."""
ROWS_PER_REQUEST = 16
"""Forwards of more rows are measured over several requests, as most steps of so many rows are, unless one request may
have as many drafts. (The executor for GPUs takes more rows of one request for a prefill: it runs them without CUDA
graphs.)"""
PAST = 64
"""Tokens in the cache before the measured ones."""
LONG_PAST = 384
"""The same for the measurement of what attention adds."""
FEW_ROWS, RARELY = 8, 4
"""Forwards of more rows than `FEW_ROWS` are measured in every `RARELY`-th turn."""
ROUNDS, SECONDS = 60, 0.5
"""Everything is measured in turn, at most so many times and, once it has been, for so many seconds."""
SETTLING_STEPS = 6
"""The first steps without drafts behind drafts or a prompt, which are not counted: they find other code and data in the
processor's caches, and take up to three times as long. (Measured behind drafts of `self_quant` in INT8: 1.53, 1.32,
1.26, 1.19, 1.10, 1.05, 1.02 of the later ones.)"""
SLOW = 0.02
"""Where a forward of one row takes so many seconds, those of more than `FEW_ROWS` are not measured: all have to be at
least once. And the weights of such a model are in no processor's caches, whatever has run before."""


@dataclass
class StepCosts:
    """Seconds of the parts of a step."""

    forward: dict[int, float]
    """One forward of the target by its number of rows, ascending."""
    context_token: float = 0.0
    """What each token that a request has in the cache adds to a forward, for its first row."""
    first_draft: float = 0.0
    """Drafting one token for one request."""
    next_draft: float = 0.0
    """Each further token; they are drafted one after the other."""
    next_request: float = 0.0
    """Each further request, per token; requests are drafted together."""
    context_row: float = 0.0
    """What each token in the cache adds for each further row of its request: less, because it is read once."""
    context_draft: float = 0.0
    """What each token in the cache adds to each draft of its request."""

    @cached_property
    def _by_rows(self) -> list[float]:
        """One forward by every number of rows up to the largest measured: between those, on a straight line."""
        rows, seconds = list(self.forward), list(self.forward.values())
        return np.interp(range(rows[-1] + 1), rows, seconds).tolist()

    @cached_property
    def _further_row(self) -> float:
        """What each row beyond the largest measured number adds."""
        (before, shorter), (last, longer) = list(self.forward.items())[-2:]
        return (longer - shorter) / (last - before)

    def target(self, num_rows: float, num_context: int, rows_per_request: float = 1.0) -> float:
        """One forward of `num_rows` rows, on average, over requests with `num_context` tokens in all."""
        whole, last = int(num_rows), len(self._by_rows) - 1
        if whole < last:
            found = self._by_rows[whole]
            found += (num_rows - whole) * (self._by_rows[whole + 1] - found)
        else:
            found = self._by_rows[last] + (num_rows - last) * self._further_row
        return found + (self.context_token + self.context_row * (rows_per_request - 1)) * num_context

    def drafted(
        self, num_rows: float, num_requests: int, num_context: int, drafting: int, longest: float, extra: float
    ) -> float:
        """A step of `num_requests` requests with `num_rows` rows and `extra` more for drafts: `drafting` requests have
        some, up to `longest` each."""
        target = self.target(num_rows + extra, num_context, 1 + extra / num_requests)
        return self.draft(drafting, longest, num_context * drafting / num_requests) + target

    def draft(self, num_requests: int, num_drafts: float, num_context: float = 0.0) -> float:
        """Drafting up to `num_drafts` tokens, at least one, for each of `num_requests` requests with `num_context`
        tokens in all."""
        one = self.first_draft + self.next_draft * (num_drafts - 1)
        return one + (self.next_request * (num_requests - 1) + self.context_draft * num_context) * num_drafts


def measure(
    target: ModelRunner, drafter: Drafter, num_blocks: int, max_drafts: int, max_model_len: int, max_num_seqs: int
) -> StepCosts:
    """Measure on an engine that has no requests yet and runs at most `max_num_seqs` in a step. It writes to the cache,
    and gives all blocks back."""
    size = target.block_size
    room = min(max_model_len, num_blocks * size)
    past = min(PAST, room // 4)
    num_drafts = min(max_drafts, room - past - 1)
    per_request = min(max(ROWS_PER_REQUEST, num_drafts + 1), room - past, target.cache.max_rollback or room)
    if past < 1 or per_request < 2 or num_drafts < 1:
        return StepCosts({1: 1.0, 2: 1.0})  # requests of so few tokens are not worth measuring
    several = max(n for n in ROWS if n <= min(FEW_ROWS, per_request))
    most = max(several, num_drafts + 1)
    long_past = min(LONG_PAST, room - most)
    length, long_length = (-(-tokens // size) for tokens in (past + max(per_request, num_drafts + 1), long_past + most))
    has_long = 2 * length + long_length <= num_blocks
    num_tables = max(2, min(-(-ROWS[-1] // per_request), max_num_seqs))  # two: drafters draft for two requests
    num_tables = min(num_tables, (num_blocks - has_long * long_length) // length)
    tables = [list(range(i * length, (i + 1) * length)) for i in range(num_tables)]
    long = list(range(num_tables * length, num_tables * length + long_length))
    if not has_long:
        long, long_past = tables[0], past
    for table, num_tokens in ((long, long_past), *((table, past) for table in tables)):
        _prefill(target, table, num_tokens)
    rows = [n for n in ROWS if n <= per_request * min(num_tables, max_num_seqs)]
    requests = [_request(target, table, past + 1) for table in tables[:2]]
    long_request = _request(target, long, long_past + 1)
    if drafter.observes_hidden:
        weight = target.model.norm.weight
        drafter.observe_hidden([*requests, long_request], weight.new_zeros(len(requests) + 1, len(weight)))
    runs: dict[str | int, Callable[[], object]] = {
        n: partial(_forward, target, tables[: -(-n // per_request)], past, n) for n in rows
    }
    runs["long"] = partial(_forward, target, [long], long_past, 1)
    runs["long, several rows"] = partial(_forward, target, [long], long_past, several)
    for name, count, k in (("draft", 1, 1), ("drafts", 1, num_drafts), ("requests", len(requests), num_drafts)):
        runs[name] = partial(drafter.propose_for_timing, requests[:count], [k] * count)
    runs["long, drafts"] = partial(drafter.propose_for_timing, [long_request], [num_drafts])
    took = _time_in_turn(runs, plain=runs[1], drafting=("draft", "drafts", "requests", "long, drafts"))
    rows = [n for n in rows if n in took]
    for request in (*requests, long_request):
        drafter.request_dropped(request)
    target.cache.free(range(num_blocks))
    drafter.free_blocks(range(num_blocks))
    further = max(1, several - 1)
    context = (long_past - past) or math.inf  # where there is no room for a long text, nothing is known of its costs
    by_context, by_context_several = took["long"] - took[1], took["long, several rows"] - took[several]
    by_context_drafts = max(0.0, took["long, drafts"] - took["drafts"])
    context_draft = by_context_drafts / num_drafts / context
    read = context_draft * past  # seconds of each draft that was measured with a short text
    return StepCosts(
        isotonic_costs({n: took[n] for n in rows}),
        max(0.0, by_context) / context,
        max(0.0, took["draft"] - read),
        max(0.0, (took["drafts"] - took["draft"]) / max(1, num_drafts - 1) - read),
        max(0.0, (took["requests"] - took["drafts"]) / num_drafts - (len(requests) - 1) * read),
        max(0.0, by_context_several - max(0.0, by_context)) / further / context,
        context_draft,
    )


def _forward(runner: ModelRunner, block_tables: Sequence[list[int]], past: int, num_rows: int) -> None:
    """Run one forward of `num_rows` rows, shared out to requests with `past` tokens each, and wait for its logits."""
    each, more = divmod(num_rows, len(block_tables))
    counts = [each + (i < more) for i in range(len(block_tables))]
    segments = [Segment([0] * n, past, table, n) for n, table in zip(counts, block_tables, strict=True)]
    runner.run(segments).sum().item()


def _prefill(runner: ModelRunner, block_table: list[int], num_tokens: int) -> None:
    for start in range(0, num_tokens, PAST):
        _forward(runner, [block_table], start, min(PAST, num_tokens - start))


def _request(runner: ModelRunner, block_table: list[int], num_tokens: int) -> Request:
    """A request that decodes: all but its last token are in the cache."""
    token_ids = [i % runner.model.config.vocab_size for i in range(num_tokens)]
    name = f"costs {block_table[0]}"  # drafters keep what they know of a request under its id
    request = Request(name, "", token_ids, num_tokens, SamplingParams(temperature=0), max_tokens=1, seed=0)
    request.block_table, request.num_computed_tokens = block_table, num_tokens - 1
    return request


def _time_in_turn(
    runs: Mapping[str | int, Callable[[], object]], plain: Callable[[], object], drafting: Collection[str]
) -> dict[str | int, float]:
    """Seconds of each run: its usual multiple of the run of `plain` just before, times the usual time of that.

    Other programs and the processor's clock change how long everything takes, so only neighbours are compared. And in
    a step, too, the target has run last, and its weights are what the caches hold: behind a run of `drafting` it runs
    a few times first. Runs of many rows take long and are rarely needed, so they are measured in every `RARELY`-th turn
    only, and not at all of a model that is `SLOW`."""
    plain()  # compiles, and fills caches
    began = time.perf_counter()
    plain()
    is_slow = time.perf_counter() - began > SLOW
    often = {key: run for key, run in runs.items() if not isinstance(key, int) or key <= FEW_ROWS}
    if is_slow:
        runs = often
    for run in runs.values():
        run()
    multiples: dict[str | int, list[float]] = {key: [] for key in runs}
    plain_seconds: list[float] = []
    before: str | int = 1
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn and time.perf_counter() - began > SECONDS:
            break
        for key, run in (often if turn % RARELY else runs).items():
            if before in drafting and not is_slow:
                for _ in range(SETTLING_STEPS):
                    plain()
            before = key
            start = time.perf_counter()
            plain()
            middle = time.perf_counter()
            run()
            plain_seconds.append(middle - start)
            multiples[key].append((time.perf_counter() - middle) / (middle - start))
    usual = statistics.median(plain_seconds)
    return {key: usual * statistics.median(found) for key, found in multiples.items()}


def isotonic_costs(seconds: Mapping[int, float]) -> dict[int, float]:
    """Forward times, made non-decreasing in the number of rows: neighbours in the wrong order get their mean (isotonic
    regression by pooling adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for rows in sorted(seconds):
        total, count = seconds[rows], 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, more = pools.pop()
            total, count = total + before, count + more
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return dict(zip(sorted(seconds), means, strict=True))
