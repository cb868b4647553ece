"""An engine that has answered many requests holds no more than one that has answered a few."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import PromptError
from minillm.speculative import measured_shape
from minillm.speculative.suffix_trie import SuffixTrie
from minillm.tokenizer import Tokenizer
from minillm.trace import RequestAdded, RequestFinished, StepRan, Trace, Work, request_metrics
from minillm.trace.request_metrics import MetricsWatcher
from tests.conftest import TinyPair

WAYS: dict[str, dict[str, Any]] = {
    "no draft": {},
    "draft model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
    "ngram": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    "suffix": {"speculative_config": {"method": "suffix", "suffix_decoding_max_cached_requests": 6}},
    "staged": {"speculative_config": {"method": "staged", "num_speculative_tokens": 3}},
    "measured tree": {"speculative_config": {"method": "draft_tree", "tree_shape": "measured"}},
    "ngram, then draft model": {
        "speculative_config": {"method": "ngram", "fallback": {"method": "draft_model", "num_speculative_tokens": 3}}
    },
}


def use(llm: LLM, first: int, count: int) -> None:
    """So many requests, each with a prompt of its own: generated, streamed, dropped, submitted, salted, refused."""
    short = SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True, logprobs=1)
    for number in range(first, first + count):
        ids = [1 + number % 290, 2 + number // 7 % 290, *range(3, 12), 4 + number % 17]
        prompt: dict[str, Any] = {"prompt_token_ids": ids, "cache_salt": str(number % 5 * number)}
        match number % 5:
            case 0:
                llm.generate(prompt, short, use_tqdm=False)
            case 1:
                list(llm.stream(prompt, short))
            case 2:
                next(llm.stream(prompt, short))
            case 3:
                with suppress(PromptError):  # `pytest.raises` keeps what it sees
                    llm.generate([prompt, ""], short, use_tqdm=False)
                llm.submit(prompt, short)
                while llm.engine.has_requests:
                    llm.engine.step()
            case 4:
                llm.generate([prompt, prompt], SamplingParams(n=2, seed=number, max_tokens=3), use_tqdm=False)


@pytest.fixture(scope="module", autouse=True)
def new_objects_only() -> Iterator[None]:
    """What other tests of this process have made, a million objects perhaps, is not counted over and over."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


KEPT_IN = (list, dict, set)
BOUNDED_OTHERWISE = (Tokenizer, SuffixTrie)
"""What they hold grows with the vocabulary, and with the texts that are kept."""


def held() -> tuple[Counter[type], Counter[type]]:
    """How many there are of each of minillm's classes, of tensors, whose storage tracemalloc does not see, and of what
    they are kept in; and how many entries the containers of each of minillm's classes have."""
    gc.collect()
    objects: Counter[type] = Counter()
    entries: Counter[type] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if kind in KEPT_IN or kind is torch.Tensor:
            objects[kind] += 1
        elif str(kind.__module__).startswith("minillm"):
            objects[kind] += 1
            if kind not in BOUNDED_OTHERWISE:
                values = list(getattr(each, "__dict__", {}).values())
                entries[kind] += sum(len(value) for value in values if isinstance(value, KEPT_IN))
    return objects, entries


def growth(before: Counter[type], after: Counter[type], allowed: int) -> dict[type, int]:
    """By how much those grew that grew by more than is allowed."""
    return {kind: count - before[kind] for kind, count in after.items() if count - before[kind] > allowed}


@pytest.mark.parametrize(
    ("way", "traced"), [*((way, False) for way in WAYS), ("no draft", True), ("draft model", True)]
)
def test_many_requests_leave_no_more_than_a_few(
    tiny: TinyPair, way: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many requests as the engine is warmed up with; with a trace around them, once the trace is dropped."""
    monkeypatch.setattr(request_metrics, "MAX_ENDED_PROMPTS", 5)
    monkeypatch.setattr(measured_shape, "MAX_KINDS", 6)
    options = deepcopy(WAYS[way])
    speculative = options.get("speculative_config", {})
    for one in (speculative, speculative.get("fallback", {})):
        if one.get("method") in ("draft_model", "draft_tree", "staged"):
            one["model"] = str(tiny.draft)
    llm = LLM(str(tiny.target), device="cpu", block_size=4, num_kv_blocks=24, enforce_eager=True, **options)
    tracemalloc.start()
    try:
        use(llm, 0, 30)
        held()  # looking at an object's `__dict__` makes it
        objects, entries = held()
        start, _ = tracemalloc.get_traced_memory()
        if traced:
            with llm.trace() as trace:
                use(llm, 30, 60)
            assert len(trace) > 500
            del trace
        else:
            use(llm, 30, 60)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    more_objects, more_entries = held()
    assert growth(objects, more_objects, 10) == {}
    assert growth(entries, more_entries, 50) == {}  # of 84 prompts
    assert grown < 60 * 1000  # bytes; a request that stays holds more than a thousand
    assert len(llm.engine.listeners) == 1 and not llm.engine.requests


def test_figures_that_nobody_asks_for_go_when_there_are_enough_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_metrics, "MAX_ENDED_PROMPTS", 3)
    watcher = MetricsWatcher()
    watcher(RequestAdded("long", "", [1]))
    for number in range(10):
        for index in range(2):
            watcher(RequestAdded(f"{number}#{index}", "", [1]))
        watcher(RequestFinished(f"{number}#0", "stop", 1, 1))
        watcher(StepRan(number, [Work(f"{number}#1", "decode", 0, 1), Work("long", "decode", 0, 1)]))
        watcher(RequestFinished(f"{number}#1", "stop", 1, 1))
    watcher(StepRan(10, []))
    assert set(watcher.requests) == {"long", "7", "8", "9"}
    watcher(RequestFinished("long", "stop", 1, 1))
    watcher(StepRan(11, []))
    assert set(watcher.requests) == {"8", "9", "long"}
    assert watcher.of("long").num_target_forwards == 10


def test_a_trace_that_is_over_is_held_by_nobody(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), device="cpu", enforce_eager=True)
    with llm.trace() as trace:
        llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
    kept = len(trace)
    llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
    assert isinstance(trace, Trace) and len(trace) == kept
