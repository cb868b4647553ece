"""The whole engine under every order of events: whatever happens around it, a request gets the tokens it gets alone.

Hypothesis makes up the orders: arrivals that share prefixes, completions that fork, aborts, a prefix cache that is
emptied, interrupts between and inside forwards, copies and events. Pools are tiny, so that preemption and eviction go
on all the time. After every step the engine is held to what it promises, and to a shadow of what its caches hold.

By default the orders are always the same ones. `MINILLM_MACHINE_EXAMPLES=1000` looks for new ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from minillm import RequestOutput, SamplingParams
from minillm.errors import RequestTooLargeError
from minillm.llm_engine import LLMEngine
from minillm.request import Request
from minillm.trace import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksShared,
    Event,
    RequestPreempted,
    StepRan,
    TokensCommitted,
    Work,
)
from tests.engine.shadow import Accidents, Shadow, check_pool_hashes
from tests.engine.tiny_engines import alone, engine

EXAMPLES = int(os.environ.get("MINILLM_MACHINE_EXAMPLES", "0"))
STEMS = ((5, 6, 5, 7, 6, 5, 5, 7, 6, 7, 5, 6, 6), (6, 5, 7, 7, 5, 6, 7, 5, 5, 6, 7, 6, 5))
"""Prompts begin like one of these."""
SALTS = ("", "alice")
MOST_TOKENS = 9
"""Most output tokens of a request."""

OPTIONS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([2, 3, 4]),
        "spare_blocks": st.sampled_from([0, 0, 1, 3]),
        "max_num_seqs": st.sampled_from([5, 2, 3]),
        "max_num_batched_tokens": st.sampled_from([7, 5, 16]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "scheduling_policy": st.sampled_from(["priority", "fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
    }
)
MOST_REQUESTS = 9
ACCIDENTS = (
    "",
    "target",
    "draft",
    "target copy",
    "draft copy",
    "Shared",
    "Freed",
    "Preempted",
    "Committed",
    "RequestFin",
)
"""Where a step may be interrupted; the empty name: anywhere."""


@dataclass(frozen=True)
class Arrival:
    """What a user asks for; `sampling` makes parameters of it."""

    cut: int
    """So much of a stem is in the prompt,"""
    tail: list[int]
    """and this behind it."""
    max_tokens: int
    kind: str
    n: int
    stops: bool
    priority: int


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        cut=st.integers(1, len(STEMS[0])),
        tail=st.lists(st.integers(5, 7), max_size=2),
        max_tokens=st.integers(1, MOST_TOKENS),
        kind=st.sampled_from(["greedy", "warm", "warm", "logprobs"]),
        n=st.sampled_from([1, 1, 2, 3]),
        stops=st.booleans(),
        priority=st.integers(-1, 1),
    ),
    min_size=1,
    max_size=3,
)


@dataclass
class Group:
    """A request as its user knows it."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    requests: list[Request]
    seen: list[list[int]] = field(default_factory=list)
    """Output so far, per completion."""


@dataclass
class Patience:
    """How many steps a request may take."""

    bound: int
    steps: int = 0


class EngineMachine(RuleBasedStateMachine):
    """An `LLMEngine` of random options, its users, and its accidents."""

    num_speculative_tokens: ClassVar[int] = 0
    compiled: ClassVar[bool] = False
    seen: ClassVar[Counter[str]] = Counter()
    """How often each situation has really occurred."""

    @initialize(options=OPTIONS)
    def start(self, options: dict[str, Any]) -> None:
        """A new engine, watched. Its pool has little more room than the largest request needs."""
        self.options = dict(options)
        largest = -(-(len(STEMS[0]) + 2 + MOST_TOKENS) // options["block_size"])
        self.options["num_kv_blocks"] = largest + self.options.pop("spare_blocks")
        self.llm: LLMEngine = engine(self.num_speculative_tokens, self.compiled, **self.options)
        self.accidents = Accidents(self.seen)
        self.shadows = [Shadow(self.llm.engine.runner, self.accidents, "target")]
        if self.llm.engine.drafter is not None:
            self.shadows.append(Shadow(self.llm.engine.drafter.runner, self.accidents, "draft"))
        self.groups: dict[str, Group] = {}
        self.patience: dict[Request, Patience] = {}
        self.ever_forked = False
        self.events: list[Event] = []
        self.llm.engine.listeners.append(self.note)

    def note(self, event: Event) -> None:
        """Listen to the engine, and perhaps interrupt it."""
        self.events.append(event)
        self.accidents.may_happen(f"at {type(event).__name__}")

    # ---------------------------------------------------------------------------------------------------- what users do

    @precondition(lambda self: len(self.patience) < MOST_REQUESTS)
    @rule(
        stem=st.sampled_from(STEMS),
        salt=st.sampled_from(["", "", "", "alice"]),
        arrivals=ARRIVALS,
        one_too_large=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, stem: tuple[int, ...], salt: str, arrivals: list[Arrival], one_too_large: bool) -> None:
        """Some requests arrive together, with much in common."""
        if one_too_large:
            self.be_refused(stem)
        for arrival in arrivals:
            params = sampling(arrival, drafted=bool(self.num_speculative_tokens))
            prompt = (*stem[: arrival.cut], *arrival.tail)
            request_id = f"r{next(self.llm.input_processor._numbers)}"
            before = list(self.llm.engine.requests.values())
            asked = {"prompt_token_ids": list(prompt), "cache_salt": salt}
            self.llm.add_request(request_id, asked, params, priority=arrival.priority)
            requests = self.llm._groups[request_id]
            self.groups[request_id] = Group(request_id, prompt, params, requests, [[] for _ in requests])
            self.ever_forked |= params.n > 1
            self.someone_came(before, requests)

    def be_refused(self, stem: tuple[int, ...]) -> None:
        """A request that could never run is refused, and nothing has happened."""
        before = list(self.llm.engine.requests)
        params = SamplingParams(max_tokens=80, n=2, detokenize=False)
        with pytest.raises(RequestTooLargeError):
            self.llm.add_request("large", {"prompt_token_ids": list(stem)}, params)
        assert list(self.llm.engine.requests) == before
        self.seen["refused as too large"] += 1

    @precondition(lambda self: self.groups)
    @rule(which=st.integers(0, 99), index=st.sampled_from([None, 0, 0, 1, 2]))
    def abort(self, which: int, index: int | None) -> None:
        """A user goes away; or only one of several completions ends, perhaps the one whose blocks others will share."""
        group = self.groups[sorted(self.groups)[which % len(self.groups)]]
        ending = group.requests if index is None else [group.requests[index % len(group.requests)]]
        for request in [request for request in ending if not request.finished]:
            self.seen["aborted running" if request.block_table else "aborted waiting"] += 1
            children = [other for other in self.llm.engine.scheduler.waiting if other.fork_of is request]
            self.seen["aborted a parent with waiting forks"] += bool(children) and index is not None
        if index is None:
            del self.groups[group.request_id]
            self.llm.abort_request([group.request_id, "nobody"])
        else:
            self.llm.engine.abort(ending[0].request_id)
        assert all(request.finished and not request.block_table for request in ending)
        self.after_any_event()

    @precondition(lambda self: self.llm.engine.pool.cached_blocks)
    @rule()
    def reset(self) -> None:
        """Somebody empties the prefix cache, which is refused while requests hold blocks; then the pool evicts."""
        pool = self.llm.engine.pool
        cached, used = len(pool.cached_blocks), pool.num_used
        assert self.llm.reset_prefix_cache() is not bool(used)
        assert len(pool.cached_blocks) == (cached if used else 0)
        self.seen["blocks forgotten by a reset"] += cached
        pool.evict_cached()
        self.after_any_event()

    # --------------------------------------------------------------------------------------------- what the engine does

    @precondition(lambda self: self.llm.has_unfinished_requests())
    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        """The engine works."""
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.llm.has_unfinished_requests())
    @rule(kind=st.sampled_from(ACCIDENTS), left=st.integers(1, 9))
    def steps_until_interrupted(self, kind: str, left: int) -> None:
        """The stop button, somewhere in this step or one of the next."""
        rare = kind not in ("", "target", "draft", "Committed")
        self.accidents.left = (1 + left % 2 if "copy" in kind else 1) if rare else left
        self.accidents.kind = kind if self.num_speculative_tokens else kind.replace("draft", "target")
        try:
            for _ in range(12 if rare else 4):
                self.step()
        except KeyboardInterrupt:
            for patience in self.patience.values():
                patience.bound += 1
            self.after_any_event()
        finally:
            self.accidents.left = 0

    def step(self) -> None:
        """One step, and everything it must have kept to."""
        scheduler = self.llm.engine.scheduler
        before = Before(list(scheduler.running), list(scheduler.waiting), self.llm.engine.drafter)
        self.events.clear()
        for shadow in self.shadows:
            shadow.first_reads.clear()
        for patience in self.patience.values():
            patience.steps += 1
        outputs = self.llm.step()
        self.seen["steps"] += 1
        if before.running or before.waiting:
            self.check_schedule(before)
        for output in outputs:
            self.check_output(output)
        self.after_any_event()
        self.count(before)

    def teardown(self) -> None:
        """All that is left comes to its end, and leaves nothing behind."""
        if not hasattr(self, "llm"):
            return
        while self.llm.has_unfinished_requests():
            self.step()
        assert not self.groups and not self.patience
        assert self.llm.engine.pool.num_used == 0
        assert not self.llm.metrics.requests and not self.llm._groups and not self.llm.engine.requests

    # --------------------------------------------------------------------------------------------------- what must hold

    def after_any_event(self) -> None:
        """The books balance, the caches hold what they are believed to hold, and all tokens so far are right."""
        inner = self.llm.engine
        inner.scheduler.check_integrity()
        assert inner.scheduler.waiting == sorted(inner.scheduler.waiting, key=inner.scheduler.rank)
        assert {*inner.scheduler.running, *inner.scheduler.waiting} == set(inner.requests.values())
        assert not {*inner.scheduler.running} & {*inner.scheduler.waiting}
        for request in inner.scheduler.waiting:
            assert not request.block_table and not request.num_computed_tokens
            assert inner.drafter is None or not inner.drafter.num_computed_tokens(request)
        for request in inner.scheduler.running:
            self.shadows[0].check_computed(request, request.num_computed_tokens)
            if inner.drafter is not None:
                self.shadows[1].check_computed(request, inner.drafter.num_computed_tokens(request))
        check_pool_hashes(inner.pool, self.shadows[0], inner.scheduler.running, SALTS)
        if inner.drafter is not None:
            for block_id, block_hash in inner.drafter._filled.items():
                self.shadows[1].check_hash(block_id, block_hash, SALTS)
        for group in self.groups.values():
            for request in group.requests:
                expected, _ = solo(group, request, self.compiled)
                assert tuple(request.output_token_ids) == expected[: request.num_output_tokens]
        for request in [request for request in self.patience if request.finished]:
            self.seen["most steps, of those allowed, in percent"] = max(
                self.seen["most steps, of those allowed, in percent"],
                100 * self.patience[request].steps // self.patience[request].bound,
            )
            del self.patience[request]
        for request, patience in self.patience.items():
            assert patience.steps <= patience.bound, f"{request.request_id} starves"

    def check_schedule(self, before: Before) -> None:
        """Budget, limits, and whose turn it was."""
        [ran] = [event for event in self.events if isinstance(event, StepRan)]
        ranks = {r.request_id: self.llm.engine.scheduler.rank(r) for r in [*before.running, *before.waiting]}
        work = {w.request_id: w for w in ran.work}
        preempted = [event.request_id for event in self.events if isinstance(event, RequestPreempted)]
        assert sum(w.num_tokens for w in ran.work) <= self.options["max_num_batched_tokens"]
        assert 1 <= len(ran.work) == len(work) <= self.options["max_num_seqs"]
        limit = self.options["long_prefill_token_threshold"]
        assert not limit or all(w.num_tokens <= limit for w in ran.work if w.kind == "prefill")
        went_on = [r.request_id for r in before.running if r.request_id not in preempted]
        assert set(went_on) <= work.keys(), "a running request was given nothing"
        for victim in preempted:
            assert all(ranks[victim] > ranks[other] for other in went_on), "a more urgent request was preempted"
        admitted = work.keys() - set(went_on)
        assert not (admitted and preempted), "somebody came in while others lost their place"
        for request in before.waiting:
            if request.request_id in admitted:
                continue
            overtaking = [other for other in admitted if ranks[other] > ranks[request.request_id]]
            if overtaking:
                assert request in before.awaiting_parent, "a waiting request was overtaken"
                self.seen["overtaken while the parent computes"] += 1
                self.someone_was_let_past(request)
        if self.options["scheduling_policy"] == "fcfs" and not self.ever_forked and went_on:
            assert min(ranks, key=ranks.__getitem__) in work, "the oldest request did not move"

    def check_output(self, output: RequestOutput) -> None:
        """Outputs grow, and end as they would have ended alone."""
        group = self.groups[output.request_id]
        assert output.prompt_token_ids == list(group.prompt)
        assert [completion.index for completion in output.outputs] == list(range(len(group.requests)))
        for request, completion, seen in zip(group.requests, output.outputs, group.seen, strict=True):
            assert completion.token_ids[: len(seen)] == seen
            seen[:] = completion.token_ids
            expected, reason = solo(group, request, self.compiled)
            assert tuple(seen) == expected[: len(seen)]
            if completion.finish_reason not in (None, "abort"):
                assert tuple(seen) == expected and completion.finish_reason == reason
                self.seen["completions compared"] += 1
        assert output.finished == all(completion.finish_reason for completion in output.outputs)
        if output.finished:
            del self.groups[output.request_id]
            if output.prompt_logprobs is not None and output.outputs[0].finish_reason != "abort":
                assert output.prompt_logprobs[0] is None and all(output.prompt_logprobs[1:])

    # ----------------------------------------------------------------------------------------- how long anyone may wait
    #
    # In every step the most urgent running request gains a token (computed or new) and cannot be preempted. So alone
    # at the top, a request of P prompt tokens and at most M new ones ends within P + M steps, even if it has to begin
    # anew. Whoever waits or runs behind others waits for no more than the sum of these over all who were there when it
    # came. Only a more urgent arrival, or requests let past while it waits for its parent's prompt, can add to that:
    # their own steps, and everyone's work once more, for they may have cost it.

    def someone_came(self, before: Iterable[Request], requests: list[Request]) -> None:
        """New requests get their bounds; those they may push aside get new ones."""
        work = sum(map(most_steps, [*before, *requests]))
        rank = self.llm.engine.scheduler.rank
        for request, patience in self.patience.items():
            if rank(requests[0]) < rank(request):
                patience.bound += work
        self.patience |= {request: Patience(work) for request in requests}

    def someone_was_let_past(self, request: Request) -> None:
        """See above."""
        work = sum(map(most_steps, self.patience))
        for other, patience in self.patience.items():
            if self.llm.engine.scheduler.rank(other) >= self.llm.engine.scheduler.rank(request):
                patience.bound += work

    # ---------------------------------------------------------------------------------------- what has been seen happen

    def count(self, before: Before) -> None:
        """Take note of what this step was a case of."""
        seen, requests = self.seen, {r.request_id: r for r in [*before.running, *before.waiting]}
        fresh: set[int] = set()
        for event in self.events:
            match event:
                case RequestPreempted():
                    seen["preemptions"] += 1
                    victim = requests[event.request_id]
                    survivors = [r for r in self.llm.engine.scheduler.running if r in before.running]
                    seen["preempted for a later arrival"] += any(r.arrival > victim.arrival for r in survivors)
                    seen["preempted completions that fork"] += victim.fork_of is not None
                case BlocksAllocated():
                    fresh.update(event.block_ids)
                case BlocksEvicted():
                    seen["blocks evicted"] += len(event.block_ids)
                case BlockCopied():
                    seen["blocks copied on write"] += 1
                case BlocksShared():
                    again = requests[event.request_id].num_output_tokens > 0
                    seen[f"{event.source} shares"] += 1
                    seen["shares within the step that computes"] += bool(fresh & set(event.block_ids))
                    seen["preempted requests that found blocks again"] += again and event.source == "prefix"
                case TokensCommitted():
                    seen["drafts accepted"] += event.num_accepted
                    seen["drafts rejected"] += event.num_drafts - event.num_accepted
                case StepRan():
                    seen["chunks of prompts"] += sum(self.is_part(w, requests) for w in event.work)
        if len(self.shadows) > 1:
            started = {id(r.block_table) for r in before.running if not before.draft_computed[r.request_id]}
            reads = [s for s in self.shadows[1].first_reads if id(s.block_table) in started]
            first = {id(s.block_table): s.start for s in reversed(reads)}
            seen["drafts that skipped filled blocks"] += sum(start > 0 for start in first.values())

    def is_part(self, work: Work, requests: dict[str, Request]) -> bool:
        """Whether this is a chunk that does not complete the prompt."""
        return work.kind == "prefill" and work.start + work.num_tokens < requests[work.request_id].num_prompt_tokens


class Before:
    """The queues as a step found them."""

    def __init__(self, running: list[Request], waiting: list[Request], drafter: Any) -> None:
        self.running, self.waiting = running, waiting
        self.awaiting_parent = [
            r
            for r in waiting
            if r.fork_of and not r.fork_of.finished and r.fork_of.num_computed_tokens < r.fork_of.num_prompt_tokens
        ]
        self.draft_computed = {r.request_id: drafter.num_computed_tokens(r) if drafter else 0 for r in running}


def sampling(arrival: Arrival, drafted: bool) -> SamplingParams:
    """Parameters whose tokens do not depend on what goes on around. Sampled drafts do: how many fit differs.

    With a draft, several completions are the same one: only the most likely token is left to sample from.
    """
    shared: dict[str, Any] = {"detokenize": False, "max_tokens": arrival.max_tokens, "ignore_eos": True}
    if arrival.stops:
        shared["stop_token_ids"] = list(range(3, 272, 17))
    if arrival.kind == "logprobs":
        shared["prompt_logprobs"] = 0
    if arrival.n == 1 and (drafted or arrival.kind != "warm"):
        return SamplingParams(temperature=0, **shared)
    return SamplingParams(n=arrival.n, temperature=0.9, seed=11, top_k=1 if drafted else 0, **shared)


def solo(group: Group, request: Request, compiled: bool) -> tuple[tuple[int, ...], str]:
    """All output tokens of a completion when it runs alone, and why it ends."""
    params = group.params
    drawn = SamplingParams(temperature=params.temperature, top_k=params.top_k)
    seed = request.seed if params.temperature else 0
    tokens = alone(group.prompt, drawn, seed, MOST_TOKENS, compiled)[: params.max_tokens]
    for count, token in enumerate(tokens, start=1):
        if token in request.stop_ids:
            return tokens[:count], "stop"
    return tokens, "length"


def most_steps(request: Request) -> int:
    """Steps that a request takes at most once nobody is more urgent."""
    return request.num_prompt_tokens + request.max_tokens


SITUATIONS = (
    "steps",
    "completions compared",
    "preemptions",
    "preempted for a later arrival",
    "preempted completions that fork",
    "preempted requests that found blocks again",
    "blocks evicted",
    "blocks copied on write",
    "blocks forgotten by a reset",
    "prefix shares",
    "fork shares",
    "shares within the step that computes",
    "chunks of prompts",
    "overtaken while the parent computes",
    "refused as too large",
    "aborted running",
    "aborted waiting",
    "aborted a parent with waiting forks",
    "interrupted before a",
    "interrupted during a",
    "interrupted after a",
    "a target forward",
    "a target copy",
    "interrupted at BlocksShared",
    "interrupted at BlocksFreed",
    "interrupted at RequestPreempted",
    "interrupted at TokensCommitted",
)
"""Each must have occurred, in PyTorch or compiled, or the machines would be testing less than they say."""
DRAFTED = ("drafts accepted", "drafts rejected", "drafts that skipped filled blocks", "a draft forward", "a draft copy")
"""So must these, with a draft."""


@pytest.mark.parametrize("num_speculative_tokens", [0, 3], ids=["plain", "drafted"])
def test_in_any_order_of_events_each_request_gets_what_it_gets_alone(num_speculative_tokens: int) -> None:
    seen: Counter[str] = Counter()
    for compiled in (False, True):
        options = {"num_speculative_tokens": num_speculative_tokens, "compiled": compiled, "seen": seen}
        # Hypothesis seeds its choices by the name of the class: each machine makes up orders of its own.
        machine = type(f"Machine{num_speculative_tokens}{compiled}", (EngineMachine,), options)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES or 20,
                stateful_step_count=60,
                derandomize=not EXAMPLES,
                database=None,
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
            ),
        )
    for situation, times in sorted(seen.items()):
        print(f"{times:7d}  {situation}")
    wanted = SITUATIONS + DRAFTED * bool(num_speculative_tokens)
    missing = [what for what in wanted if not sum(times for name, times in seen.items() if what in name)]
    assert not missing, f"never happened: {missing}"
