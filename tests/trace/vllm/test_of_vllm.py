"""A real vLLM in this project's events: what is drawn is what it did, by vLLM's own account.

`runs.py` watched vLLM's CPU build; its traces and vLLM's own answers are kept beside it. Where `MINILLM_VLLM_PYTHON`
names an interpreter that has vLLM, it runs again here.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minillm
from minillm.errors import UnsupportedError
from minillm.models import bundled
from minillm.trace import (
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    DraftProposed,
    EngineStarted,
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepRan,
    TokensCommitted,
    Trace,
    of_vllm,
)
from minillm.trace.cache_state import CacheState
from minillm.trace.request_metrics import MetricsWatcher
from minillm.trace.vllm_trace import _Recorder
from minillm.viz import AcceptanceStrip, CachePagesView, TimelineView
from tests.trace.vllm.runs import HERE, RUNS

INTERPRETER = "MINILLM_VLLM_PYTHON"
ROOT = Path(minillm.__file__).parents[1]


@pytest.fixture(scope="session", params=["kept", "now"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the traces are: those in the repository, and those that vLLM writes now."""
    if request.param == "kept":
        return HERE
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        pytest.skip(f"{INTERPRETER} names no interpreter that has vLLM")
    out = tmp_path_factory.mktemp("vllm")
    command = [interpreter, "-m", "tests.trace.vllm.runs", str(bundled.path("minicoder")), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(params=list(RUNS))
def run(request: pytest.FixtureRequest, folder: Path) -> tuple[Trace, dict[str, Any]]:
    """A trace and what vLLM said about the same run."""
    return Trace.load(folder / f"{request.param}.jsonl"), json.loads((folder / f"{request.param}.json").read_text())


def tokens_of(trace: Trace) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in trace.of(TokensCommitted):
        found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


def test_committed_tokens_are_the_outputs_of_vllm(run: tuple[Trace, dict[str, Any]]) -> None:
    trace, said = run
    expected = {}
    for number, completions in enumerate(said["tokens"]):
        for index, tokens in enumerate(completions):
            expected[f"{number}#{index}" if len(completions) > 1 else str(number)] = tokens
    found = tokens_of(trace)
    assert found.keys() == expected.keys()
    for name, tokens in expected.items():  # a stop string is found outside the scheduler, perhaps some tokens later
        assert found[name][: len(tokens)] == tokens and len(found[name]) - len(tokens) <= 4
    assert [len(event.prompt_token_ids) for event in trace.of(RequestAdded) if "#" not in event.request_id] == [
        length for length, completions in zip(said["prompts"], said["tokens"], strict=True) if len(completions) == 1
    ]
    assert len(trace.of(RequestFinished)) == len(expected)


def check_used_blocks(trace: Trace) -> None:
    """After every step, the blocks with an owner are as many as vLLM counts."""
    state, [started] = CacheState(), trace.of(EngineStarted)
    for event in trace:
        state.fold(event)
        if isinstance(event, StepFinished):
            assert state.used_blocks == started.num_blocks - 1 - event.num_free_blocks  # block 0 is never used
            for request in state.requests.values():
                assert len(request.block_table) * started.block_size >= request.num_computed or not request.block_table
    assert state.used_blocks == 0


def test_used_blocks_are_those_that_vllm_counts_after_every_step(run: tuple[Trace, dict[str, Any]]) -> None:
    trace, _ = run
    check_used_blocks(trace)
    assert len(trace.of(StepFinished)) == len(trace.of(StepRan)) > 50


@pytest.mark.parametrize("kind", [BlocksFreed, BlocksAllocated, BlocksShared])
def test_a_block_that_is_told_wrong_would_be_seen(folder: Path, kind: type[Event]) -> None:
    trace = Trace.load(folder / "preempted.jsonl")
    number = next(
        i
        for i, event in enumerate(trace)
        # A request that ends frees its blocks even without the event.
        if isinstance(event, kind) and getattr(event, "reason", "preempted") == "preempted"
    )
    wrong = [*trace.events[:number], *trace.events[number + 1 :]]
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_used_blocks(Trace(wrong))


def test_every_forward_writes_the_next_slots_of_its_requests(run: tuple[Trace, dict[str, Any]]) -> None:
    """Work starts where the valid keys and values end: nothing is skipped, and nothing is computed twice."""
    trace, _ = run
    computed: dict[str, int] = {}
    for event in trace:
        match event:
            case BlocksShared():
                computed[event.request_id] = event.num_tokens
            case RequestPreempted():
                computed[event.request_id] = 0
            case StepRan():
                for work in event.work:
                    assert work.start == computed.get(work.request_id, 0)
                    computed[work.request_id] = work.start + work.num_tokens
            case TokensCommitted():
                computed[event.request_id] = event.num_computed_tokens


def test_what_vllm_counts_is_what_the_trace_counts(run: tuple[Trace, dict[str, Any]]) -> None:
    trace, said = run
    committed = trace.of(TokensCommitted)
    counted = said["metrics"]
    last_one = 9  # tokens of the run that was not watched
    assert sum(len(event.token_ids) for event in committed) == counted["vllm:generation_tokens"] - last_one
    assert len(trace.of(RequestPreempted)) == counted["vllm:num_preemptions"]
    if "vllm:spec_decode_num_draft_tokens" in counted:
        drafts, accepted = (sum(getattr(event, name) for event in committed) for name in ("num_drafts", "num_accepted"))
        assert 0 < drafts <= counted["vllm:spec_decode_num_draft_tokens"]
        assert 0 < accepted <= counted["vllm:spec_decode_num_accepted_tokens"]
        assert sum(len(event.token_ids) for event in trace.of(DraftProposed)) == drafts
    watcher = MetricsWatcher()
    cached = {}
    for event in trace:
        watcher(event)
        if isinstance(event, RequestFinished):
            name = event.request_id.split("#")[0]
            cached[int(name)] = watcher.requests[name].num_cached_tokens
    for number, completions in enumerate(said["tokens"]):
        if len(completions) == 1 and not said["metrics"]["vllm:num_preemptions"]:
            assert cached[number] == said["cached"][number]
    assert cached[len(said["tokens"]) - 1] > 0  # the first prompt again


def test_the_runs_show_what_they_were_made_for(folder: Path) -> None:
    preempted, drafted = (Trace.load(folder / f"{name}.jsonl") for name in RUNS)
    assert preempted.of(RequestPreempted) and drafted.of(DraftProposed)
    reasons = {event.reason for trace in (preempted, drafted) for event in trace.of(BlocksFreed)}
    assert {"preempted", "finished"} <= reasons
    kinds = {work.kind for trace in (preempted, drafted) for event in trace.of(StepRan) for work in event.work}
    assert kinds == {"prefill", "decode", "verify"}


def test_the_pictures_are_drawn(run: tuple[Trace, dict[str, Any]]) -> None:
    trace, _ = run
    for step in (1, len(trace.of(StepRan)) // 2):
        assert "<svg" in CachePagesView(trace).to_svg(step)
    assert "<svg" in TimelineView(trace).to_svg()
    if trace.of(DraftProposed):
        assert "<svg" in AcceptanceStrip(trace).to_svg()


# --- what cannot be watched ------------------------------------------------------------------------------------------


def fake(**changes: Any) -> Any:
    """As much of a vLLM as is asked before anything is recorded."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=changes.get("ahead", False)))
    groups = SimpleNamespace(kv_cache_groups=[None] * changes.get("groups", 1))
    scheduler = SimpleNamespace(
        vllm_config=config, kv_cache_config=groups, has_requests=lambda: changes.get("busy", False)
    )
    core = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    return SimpleNamespace(llm_engine=core)


@pytest.mark.parametrize(
    ("llm", "message"),
    [
        (SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object())), "VLLM_ENABLE_V1_MULTIPROCESSING=0"),
        (object(), "object has no vLLM scheduler in this process"),
        (fake(ahead=True), "make it with async_scheduling=False"),
        (fake(groups=2), "2 groups of layers"),
        (fake(busy=True), "vLLM has unfinished requests"),
    ],
)
def test_what_cannot_be_watched_is_refused(llm: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message), of_vllm(llm):
        pass


# --- what is told of blocks and preemptions --------------------------------------------------------------------------


class FakeScheduler(SimpleNamespace):
    """Blocks of 4 tokens. `schedule` does what the next of `turns` says, and returns vLLM's output."""

    def __init__(self) -> None:
        blocks = [SimpleNamespace(block_hash=None) for _ in range(8)]
        manager = SimpleNamespace(block_pool=SimpleNamespace(blocks=blocks), get_block_ids=lambda i: [self.tables[i]])
        super().__init__(kv_cache_manager=manager, tables={}, block_size=4, running=[], waiting=[], turns=[])

    def add_request(self, request: Any) -> None:
        self.tables[request.request_id] = []

    def schedule(self) -> Any:
        return self.turns.pop(0)()

    def update_from_output(self, *args: Any) -> None: ...

    def finish_requests(self, *args: Any) -> None: ...


def scheduled(num_tokens: dict[str, int], new: dict[str, int]) -> Any:
    """vLLM's output of a step: tokens by request, and how many of a new one's are found."""
    again = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=[])
    news = [SimpleNamespace(req_id=name, num_computed_tokens=found) for name, found in new.items()]
    return SimpleNamespace(
        num_scheduled_tokens=num_tokens,
        scheduled_new_reqs=news,
        scheduled_cached_reqs=again,
        scheduled_spec_decode_tokens={},
    )


def new_request(name: str, num_tokens: int) -> Any:
    counts = {"num_tokens": num_tokens, "num_output_tokens": 0, "num_computed_tokens": 0}
    return SimpleNamespace(request_id=name, prompt_token_ids=[1] * num_tokens, priority=0, **counts)


def test_found_blocks_are_not_told_to_be_new_in_the_prefix_cache_and_a_preemption_loses_what_was_computed() -> None:
    scheduler, trace = FakeScheduler(), Trace()
    recorder = _Recorder(scheduler, SimpleNamespace(decode=str), trace)
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    for block in (1, 2):
        blocks[block].block_hash = "cached before the trace began"
    first, second = new_request("a", 20), new_request("b", 4)

    def find() -> Any:
        scheduler.tables["a"] = [1, 2, 3, 4]
        first.num_computed_tokens = 8 + 5  # a chunk of the prompt
        return scheduled({"a": 5}, {"a": 8})

    def preempt() -> Any:
        scheduler.tables |= {"a": [], "b": [5]}
        first.num_computed_tokens = 0
        return scheduled({"b": 4}, {"b": 0})

    scheduler.turns = [find, preempt]
    for request in (first, second):
        recorder.add_request(request)
    recorder.schedule()
    assert [event.block_ids for event in trace.of(BlocksShared)] == [[1, 2]] and not trace.of(BlocksCached)
    recorder.schedule()
    assert [event.num_computed_tokens for event in trace.of(RequestPreempted)] == [13]
