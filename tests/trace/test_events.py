"""A trace survives the disk unchanged, and a damaged one says which line is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from minillm import LLM, SamplingParams, __version__
from minillm.errors import TraceError
from minillm.trace import (
    BlockCopied,
    BlocksCached,
    BlocksEvicted,
    BlocksShared,
    DraftProposed,
    DraftsPlanned,
    EngineStarted,
    Event,
    ForwardWork,
    RequestAdded,
    RowsWritten,
    StepFinished,
    StepRan,
    StepStarted,
    TokensCommitted,
    Trace,
    Work,
)
from minillm.trace.events import SCHEMA
from minillm.trace.static_batching import jobs_of
from minillm.trace.timeline_state import TimelineState
from minillm.viz import AcceptanceStrip, CachePagesView, TimelineView
from tests.conftest import TinyPair

HEADER = json.dumps({"schema": SCHEMA})


@pytest.fixture(scope="module")
def recorded(tiny: TinyPair) -> Trace:
    """A real run: drafts, shared prefixes, a fork, a pool that runs dry."""
    draft = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 3, "adaptive": True}
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=12, speculative_config=draft)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
    with llm.trace() as trace:
        llm.generate(["def add(", "for line", "import os"], [params, replace(params, n=2), params], use_tqdm=False)
    return trace


@pytest.mark.parametrize("prompt", ["a\u2028b", "a\u2029\x85b", "a\nb\r\n", ""])
def test_line_separators_of_unicode_are_no_ends_of_lines(prompt: str, tmp_path: Path) -> None:
    events = [RequestAdded("0", prompt, [1, 2]), StepStarted(1, 1, 0)]
    Trace(events).save(tmp_path / "trace.jsonl")
    assert Trace.load(tmp_path / "trace.jsonl").events == events


def test_saved_and_loaded_events_are_equal(recorded: Trace, tmp_path: Path) -> None:
    recorded.save(tmp_path / "run.jsonl")
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert loaded.events == recorded.events
    assert all(isinstance(work, Work) for step in loaded.of(StepRan) for work in step.work)


def test_a_trace_tells_the_whole_story(recorded: Trace) -> None:
    """Replaying the commits gives the tokens; replaying the blocks gives an empty pool."""
    kinds = {type(event).__name__ for event in recorded}
    assert kinds == {name for name, kind in Event.kinds.items() if kind.__module__ == Event.__module__}
    held: dict[str, list[int]] = {}
    for event in recorded:
        match type(event).__name__:
            case "BlocksAllocated":
                held.setdefault(event.request_id, []).extend(event.block_ids)
            case "BlocksShared":
                assert not held.get(event.request_id)
                held[event.request_id] = list(event.block_ids)
            case "BlockCopied":
                table = held[event.request_id]
                table[table.index(event.source)] = event.target
            case "BlocksFreed":
                assert held[event.request_id][-len(event.block_ids) :] == event.block_ids
                del held[event.request_id][-len(event.block_ids) :]
    assert not any(held.values())
    for request_id in ("0", "1#0", "1#1", "2"):
        committed = [e for e in recorded.of(TokensCommitted) if e.request_id == request_id]
        assert sum(len(e.token_ids) for e in committed) == 20
        for event in committed:
            assert len(event.origins) == len(event.texts) == len(event.token_ids) <= event.num_accepted + 1


def test_watchers_hear_every_event() -> None:
    trace, heard = Trace(), []
    trace.watch(heard.append)
    event = EngineStarted("m", None, 16, 8, 1024, 0)
    trace.append(event)
    assert heard == [event] and len(trace) == 1


STARTED = EngineStarted("m", None, 4, 8, 1024, 0)
COMMITTED = TokensCommitted("0", [1], ["a"], ["sampled"], 0, 0, 3)
PLANNED = DraftsPlanned(["0"], [0], [[0.5]], [1.0, 1.1])
IMPOSSIBLE: list[tuple[Event, dict[str, object]]] = [
    *((STARTED, {"block_size": value}) for value in (0, -1, 10**12, 2**63)),
    *((STARTED, {"num_blocks": value}) for value in (-1, 10**12, -(2**70))),
    *((BlocksEvicted([1]), {"block_ids": [value]}) for value in (-1, 2**63)),
    *((RequestAdded("0", "a", [1]), {"prompt": value}) for value in ("\ud800", "a\udfff")),
    (StepRan(1, [Work("0", "prefill", 0, 1)]), {"work": [{"request_id": "0", "kind": "decode", "start": -1}]}),
    (StepFinished(1, 0.1, 0.0, 0.1, 7), {"seconds": -1.0}),
    (StepFinished(1, 0.1, 0.0, 0.1, 7), {"seconds": float("nan")}),
    (DraftProposed("0", [1], ["a"], [-1]), {"parents": [-2]}),
    (RequestAdded("0", "a", [1]), {"event": "x" * 10_000}),
    *((COMMITTED, change) for change in ({"texts": []}, {"origins": []}, {"token_ids": []}, {"num_accepted": 1})),
    *((COMMITTED, change) for change in ({"origins": ["accepted"]}, {"path": [0]})),
    (DraftProposed("0", [1], ["a"]), {"texts": []}),
    *((PLANNED, change) for change in ({"num_drafts": [0, 1]}, {"num_drafts": []}, {"survival": [[0.5], [0.5]]})),
    *((PLANNED, change) for change in ({"reason": "mood"}, {"num_drafts": [1], "reason": "compared"})),
    *((RowsWritten("grow", 0, 1, 0, 1), {name: value}) for name in ("past", "capacity") for value in (-5, 10**12)),
    (ForwardWork(3, 3, 1), {"num_tokens": 10**12}),
    *((DraftProposed("0", [1, 2], ["a", "b"], [-1, 0]), {"parents": value}) for value in ([-1], [0, -1], [-1, 1])),
]


@pytest.mark.parametrize(("event", "changes"), IMPOSSIBLE)
def test_a_value_that_no_engine_gives_is_refused_before_anything_is_drawn(
    tmp_path: Path, event: Event, changes: dict[str, object]
) -> None:
    line = json.dumps({**json.loads(event.to_json()), **changes})
    (tmp_path / "bad.jsonl").write_text(f"{HEADER}\n{line}\n")
    with pytest.raises(TraceError, match="line 2: not an event") as refused:
        Trace.load(tmp_path / "bad.jsonl")
    assert len(str(refused.value)) < 700 and str(refused.value).isprintable()


FOLDS: list[Callable[[Trace], object]] = [
    lambda trace: CachePagesView(trace).to_svg(),
    lambda trace: TimelineView(trace).to_svg(),
    lambda trace: AcceptanceStrip(trace).to_svg(),
    lambda trace: jobs_of(TimelineState().fold_all(trace).timeline),
]


@pytest.mark.parametrize("seed", range(40))
def test_events_in_another_order_are_drawn_or_refused(recorded: Trace, seed: int) -> None:
    draw = Random(seed)
    events = list(recorded)
    for _ in range(draw.choice([1, 2, 5])):
        place, other = draw.randrange(len(events)), draw.randrange(len(events))
        match draw.randrange(3):
            case 0:
                del events[place]
            case 1:
                events.insert(other, events[place])
            case 2:
                events[place], events[other] = events[other], events[place]
    for fold in FOLDS:
        with suppress(TraceError):
            fold(Trace(events))


@pytest.mark.parametrize(
    "lines, complaint",
    [
        ([], "line 1 must contain the schema"),
        (["{}"], "line 1 must contain the schema"),
        (['{"schema": 99}'], f"by minillm of an unknown version with trace schema 99; this is minillm {__version__}, "),
        (['{"schema": 3, "minillm": "7.5"}'], "by minillm 7.5 with trace schema 3; .* reads schemas 1 and 2: load"),
        (['{"schema": [1]}'], r"schema \[1\]"),
        (["[" * 100_000], "line 1 must contain the schema"),
        ([HEADER, "[" * 100_000], "line 2"),
        ([HEADER, '{"event": ["StepStarted"]}'], "line 2"),
        ([HEADER, '{"event": "StepStarted", "step": "1", "num_running": 1, "num_waiting": 0}'], "line 2.*`int`, got"),
        ([HEADER, '{"event": "BlocksEvicted", "block_ids": "abc"}'], "line 2.*`array`, got `str`"),
        ([HEADER, '{"event": "StepRan", "step": 1, "work": [{"request_id": "0"}]}'], "line 2.*kind"),
        ([HEADER, "not json"], "line 2"),
        ([HEADER, '{"event": "NoSuchEvent"}'], "line 2"),
        ([HEADER, '{"event": "StepStarted", "step": 1}'], "line 2.*num_running"),
        (
            [HEADER, '{"event": "StepStarted", "step": 1, "num_running": 1, "num_waiting": 0, "x": 1}'],
            "line 2",
        ),
    ],
)
def test_damaged_traces_are_refused(tmp_path: Path, lines: list[str], complaint: str) -> None:
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(TraceError, match=complaint):
        Trace.load(tmp_path / "bad.jsonl")


def test_a_trace_of_the_first_schema_is_read_as_it_was_meant(recorded: Trace, tmp_path: Path) -> None:
    """It had no prefix cache to tell of, no name of a layout and no priorities; its file names no minillm."""
    later = {"cache_layout", "prefix_caching", "max_num_seqs", "max_num_batched_tokens", "speculative_method"}
    later |= {"priority"}
    added = (BlocksShared, BlockCopied, BlocksCached, BlocksEvicted)
    old = [event for event in recorded if not isinstance(event, added)]
    values = [{key: value for key, value in json.loads(event.to_json()).items() if key not in later} for event in old]
    for value in values:
        if value["event"] == "DraftsPlanned":
            del value["reason"]
    lines = [json.dumps(value) for value in [{"schema": 1}, *values]]
    (tmp_path / "old.jsonl").write_text("\n".join(lines) + "\n")
    read = Trace.load(tmp_path / "old.jsonl")
    assert [type(event) for event in read] == [type(event) for event in old]
    assert read.of(EngineStarted)[0].cache_layout == "paged"
    assert {event.reason for event in read.of(DraftsPlanned)} == {"predicted"}
    assert read.of(StepRan) == recorded.of(StepRan) and read.of(TokensCommitted) == recorded.of(TokensCommitted)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "folder"])
def test_what_is_no_text_is_no_trace(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "x.jsonl"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(TraceError, match=r"x\.jsonl cannot be read as a trace"):
        Trace.load(file)


def test_every_line_is_json_with_its_kind(recorded: Trace, tmp_path: Path) -> None:
    recorded.save(tmp_path / "run.jsonl")
    header, *lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(header) == {"schema": SCHEMA, "minillm": __version__}
    assert [json.loads(line)["event"] for line in lines] == [type(event).__name__ for event in recorded]


def test_events_of_lessons_are_loaded_wherever_a_trace_is(tmp_path: Path) -> None:
    Trace([RowsWritten("grow", 0, 1, 0, 1), ForwardWork(3, 3, 1)]).save(tmp_path / "lesson.jsonl")
    code = f"from minillm.trace import Trace; print(len(Trace.load({str(tmp_path / 'lesson.jsonl')!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"
