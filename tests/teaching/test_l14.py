"""Lesson 14: its references are what the engine does, its workshop measures what it says, likely mistakes are named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.models.config import RopeConfig
from minillm.models.rope import inverse_frequencies
from minillm.ops import rerotation
from minillm.reuse import offload
from minillm.reuse.document_store import DocumentStore
from minillm.reuse.kv_span import KVSpan
from minillm.reuse.scratch import Scratch
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l14_moving_and_reusing import (
    best_split,
    break_even_tokens,
    find_entry,
    rerotate,
)
from minillm.teaching.workshop import l14_broken as broken
from minillm.teaching.workshop import l14_moving as moving
from minillm.teaching.workshop.l14_store import NOTHING, Key, SpanStore, digest
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FIRST = [3 + i * i % 90 for i in range(24)]
SECOND = [9 + 7 * i % 80 for i in range(20)]
QUESTION = [5, 6, 7, 8]
KEY = Key("t", NOTHING, 0, "m", "float32", 1)


@pytest.fixture(scope="module")
def llm(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), block_size=4, enforce_eager=True)


@pytest.fixture(autouse=True)
def empty_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()


# --------------------------------------------------------------------------------------------------------- references

positive = st.floats(0.01, 100)


@given(kv=positive, bandwidth=positive, latency=positive, seconds=positive)
def test_at_the_break_even_loading_takes_as_long_as_computing(
    kv: float, bandwidth: float, latency: float, seconds: float
) -> None:
    tokens = break_even_tokens(kv, bandwidth, latency, seconds)
    if math.isinf(tokens):
        assert kv / bandwidth >= seconds
    else:
        assert latency + tokens * kv / bandwidth == pytest.approx(tokens * seconds)


@given(n=st.integers(1, 60), kv=positive, hidden=positive, bandwidth=positive, seconds=positive)
def test_the_split_is_that_of_the_engine(n: int, kv: float, hidden: float, bandwidth: float, seconds: float) -> None:
    assert best_split(n, kv, hidden, bandwidth, seconds) == offload.best_split(n, kv, hidden, bandwidth, seconds)


@pytest.mark.parametrize("delta", [-40, 0, 3, 500])
def test_keys_move_as_in_the_engine(delta: int) -> None:
    frequencies, _ = inverse_frequencies(RopeConfig(), 16)
    keys = torch.randn(3, 5, 2, 16, generator=torch.Generator().manual_seed(1))
    expected = rerotation.rerotate(keys, frequencies, delta)
    torch.testing.assert_close(rerotate(keys, frequencies, delta), expected, rtol=1e-4, atol=1e-4)


FIELDS = ("text", "model", "dtype", "format")
some_key = st.builds(
    lambda text, before, model, number: Key(text, before, len(before), model, "float32", number),
    st.sampled_from("ab"),
    st.sampled_from(["", "x", "y", "xyz"]),
    st.sampled_from("mn"),
    st.integers(1, 2),
)


@given(entries=st.lists(some_key, max_size=6), wanted=some_key)
def test_what_is_used_fits_and_is_moved_to_where_it_is_wanted(entries: list[Key], wanted: Key) -> None:
    found = find_entry(entries, wanted)
    usable = [e for e in entries if all(getattr(e, name) == getattr(wanted, name) for name in FIELDS)]
    assert (found is None) == (not usable)
    if found is not None:
        index, shift, exact = found
        assert entries[index] in usable and entries[index].start + shift == wanted.start
        assert exact == (entries[index].before == wanted.before) == any(e.before == wanted.before for e in usable)


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("break_even_tokens", lambda k, b, latency, c: latency / c, "the time that each token takes on the link"),
        ("break_even_tokens", lambda k, b, latency, c: -1.0, "cannot be negative"),
        ("break_even_tokens", lambda *a: 0.75 * break_even_tokens(*a), "so computing is still faster"),
        ("best_split", lambda n, *rest: best_split(n, *rest) + 0.5, "a whole number"),
        ("best_split", lambda n, *rest: n + 1, "cannot be recomputed"),
        ("rerotate", lambda k, f, d: rerotate(k, f, d) * 1.5, "keeps the length"),
        ("rerotate", lambda k, f, d: rerotate(k, f, -d), "the wrong way"),
        ("find_entry", lambda entries, wanted: (0, 0, True) if entries else None, ""),
        ("find_entry", lambda entries, wanted: (len(entries), 0, True), "there is no entry"),
        ("find_entry", lambda *a: find_entry(*a) or (-1, 0, False), "no entry can be used: return None"),
        (
            "find_entry",
            lambda *a: found and (*found[:2], "exact") if (found := find_entry(*a)) else None,
            "True or False",
        ),
    ],
)
def test_likely_wrong_answers_are_named(name: str, answer, cause: str) -> None:
    result = check_function(f"l14.{name}", answer)
    assert not result.passed and cause in str(result), str(result)


def test_a_search_over_all_splits_passes_too() -> None:
    def search(num_tokens: int, *rest: float) -> int:
        return min(range(num_tokens + 1), key=lambda split: offload.transfer_seconds(split, num_tokens, *rest))

    assert check_function("l14.best_split", search).passed


# ------------------------------------------------------------------------------------------------------- the workshop


def test_the_multi_head_form_is_the_same_function(tiny: TinyPair, tmp_path: Path) -> None:
    moving.save_multi_head(str(tiny.target), tmp_path / "wide")
    narrow = LLM(str(tiny.target), block_size=4, enforce_eager=True, dtype="float32")
    wide = LLM(str(tmp_path / "wide"), block_size=4, enforce_eager=True, dtype="float32")
    config = wide.engine.runner.model.config
    assert config.num_kv_heads == config.num_heads > narrow.engine.runner.model.config.num_kv_heads
    rows = [moving.computed(model, FIRST, 8) for model in (narrow, wide)]
    torch.testing.assert_close(*rows, rtol=1e-3, atol=1e-3)
    cache = offload.Offloader(wide).offload(FIRST)
    assert cache.hidden_bytes * 2 == cache.kv_bytes * config.hidden_size // config.q_size


def on_top_of(llm: LLM, spans: Sequence[KVSpan], ids: Sequence[int], count: int) -> Tensor:
    """What `moving.computed` gives, on top of keys and values of the first tokens."""
    with Scratch(llm, len(ids)) as scratch:
        for span in spans:
            scratch.write(span)
        return moving._scored(llm, scratch, ids, max(span.end for span in spans), count)


def test_predictions_with_and_without_a_cache(llm: LLM) -> None:
    ids = [*FIRST, *QUESTION]
    plain = moving.computed(llm, ids, 4)
    assert plain.shape == (4, llm.engine.runner.model.config.vocab_size)
    with Scratch(llm, len(FIRST)) as scratch:
        scratch.forward(FIRST, 0)
        span = scratch.read(0, len(FIRST), FIRST)
        scratch.publish(FIRST, "a")
    served = moving.served(llm, {"prompt_token_ids": ids, "cache_salt": "a"}, 4)
    for rows in (served, on_top_of(llm, [span], ids, 4), moving.served(llm, {"prompt_token_ids": ids}, 4)):
        torch.testing.assert_close(rows, plain, rtol=1e-4, atol=1e-4)
    wrong = KVSpan(FIRST, 0, span.keys.flip(1), span.values)
    rows = on_top_of(llm, [wrong], ids, 4)
    assert moving.Difference.between([plain], [plain]) == moving.Difference(0.0, 1.0)
    assert moving.Difference.between([plain], [rows]).kl > 1e-3


def test_a_cached_prefix_that_reaches_into_the_scored_tokens_is_cut(llm: LLM) -> None:
    llm.generate({"prompt_token_ids": FIRST}, GREEDY, use_tqdm=False)
    rows = moving.served(llm, {"prompt_token_ids": FIRST}, 8)
    llm.reset_prefix_cache()
    torch.testing.assert_close(rows, moving.computed(llm, FIRST, 8), rtol=1e-4, atol=1e-4)


def test_edits_are_at_line_boundaries() -> None:
    llm = LLM("minicoder", num_kv_blocks=8, enforce_eager=True)
    decode = llm.engine.tokenizer.decode
    ids = llm.engine.tokenizer.encode("import os\n\n\ndef walk(root):\n    for name in root:\n        yield name\n" * 4)
    inserted, deleted = moving.edits(llm, [ids])
    assert decode(inserted.after) == decode(ids[: inserted.start]) + moving.INSERTED + decode(ids[inserted.start :])
    assert decode(ids[: deleted.start]).endswith("\n") and decode(ids[deleted.start : deleted.stop]).endswith("\n")
    assert len(ids) / 4 <= inserted.start == deleted.start < len(ids) / 2
    assert inserted.suffix == len(ids) - inserted.start and deleted.new == []


def test_the_time_of_an_update_has_the_old_text_cached_and_the_new_one_not(llm: LLM) -> None:
    edit, found = moving.Edit("insert", FIRST, 8, 8, [1, 2]), []

    def make(salt: str) -> moving.Prompt:
        with Scratch(llm, 40) as scratch:
            found.append((scratch.copy_cached(FIRST), scratch.copy_cached(edit.after), salt))
        return edit.prompt(llm, salt)

    assert moving.update_seconds(llm, edit, make, rounds=2) > 0
    assert [old for old, _, _ in found] == [24] * 3 and [new for _, new, _ in found] == [8] * 3
    assert len({salt for *_, salt in found}) == 3


@pytest.mark.parametrize(("break_even", "how"), [(25.0, "computed"), (24.0, "loaded"), (math.inf, "computed")])
def test_a_reader_obeys_the_break_even_and_changes_no_token(
    llm: LLM, tmp_path: Path, break_even: float, how: str
) -> None:
    store = DocumentStore(llm, tmp_path)
    store.add(FIRST)
    prompt = {"prompt_token_ids": [*FIRST, *QUESTION]}
    [plain] = llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    reader = moving.Reader(store, offload.Link(1e12), 0.0, break_even)
    assert reader.prepare(FIRST) == how
    assert (reader.link.num_bytes > 0) == (how == "loaded")
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 24 and output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_the_stated_time_of_a_reader_contains_latency_and_bytes(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DocumentStore(llm, tmp_path)
    store.add(FIRST)
    link = offload.Link(store.load(FIRST).num_bytes / 50.0)
    monkeypatch.setattr(link, "wait", lambda seconds: None)
    assert moving.Reader(store, link, 100.0, 0).seconds(FIRST, load=True) >= 150
    assert link.num_bytes == 3 * store.load(FIRST).num_bytes


def test_the_timeline_of_loading_has_no_gaps_and_every_part(llm: LLM, tmp_path: Path) -> None:
    store = DocumentStore(llm, tmp_path)
    for piece in (FIRST, SECOND):
        store.add(piece)
    parts = moving.load_timeline(store, [FIRST, SECOND], QUESTION)
    each = ["keys and values", "rotate", "keys and values"]
    assert [part.name for part in parts] == [*each, *each, "prefill"]
    assert all(a.end <= b.start for a, b in pairwise(parts))
    drawn = moving.as_parts([offload.Interval("link", "activations", 1.0, 2.0, 8)])
    assert drawn == [moving.TimedPart("link", "activations", 1.0, 2.0)]


# --------------------------------------------------------------------------------------------------- the store of spans


def filled(llm: LLM, store: SpanStore, *texts: tuple[Sequence[int], Sequence[int]]) -> SpanStore:
    for before, text in texts:
        store.add(llm, before, text, "m")
    return store


def rows_of(llm: LLM, prompt: moving.Prompt) -> Tensor:
    return moving.served(llm, prompt, len(QUESTION))


def test_exact_entries_need_no_salt_and_change_nothing(llm: LLM) -> None:
    store = filled(llm, SpanStore(find_entry), ([], FIRST), (FIRST, SECOND))
    made = store.prompt(llm, [FIRST, SECOND], QUESTION, "m")
    assert made.exact and made.used == [0, 1] and "cache_salt" not in made.prompt
    rows = rows_of(llm, made.prompt)
    llm.reset_prefix_cache()
    torch.testing.assert_close(rows, moving.computed(llm, made.prompt["prompt_token_ids"], 4), rtol=1e-4, atol=1e-4)


def test_moved_entries_are_under_a_salt_and_are_what_the_span_says(llm: LLM) -> None:
    store = filled(llm, SpanStore(find_entry, rotate=rerotate), ([], FIRST), ([], SECOND))
    made = store.prompt(llm, [FIRST, SECOND], QUESTION, "m")
    assert not made.exact and made.used == [0, 1] and made.prompt["cache_salt"]
    config = llm.engine.runner.model.config
    moved = store.spans[1].moved_to(len(FIRST), config)
    expected = on_top_of(llm, [store.spans[0], moved], made.prompt["prompt_token_ids"], 4)
    torch.testing.assert_close(rows_of(llm, made.prompt), expected, rtol=1e-3, atol=1e-3)
    plain = {"prompt_token_ids": made.prompt["prompt_token_ids"]}
    torch.testing.assert_close(
        rows_of(llm, plain), moving.computed(llm, plain["prompt_token_ids"], 4), rtol=1e-4, atol=1e-4
    )


def test_what_the_store_does_not_have_is_computed(llm: LLM) -> None:
    store = filled(llm, SpanStore(find_entry), ([], FIRST))
    made = store.prompt(llm, [FIRST, SECOND], QUESTION, "another model")
    assert made.used == [None, None] and made.exact
    assert digest([]) == NOTHING and digest([1, 23]) != digest([12, 3])


@pytest.mark.parametrize("name", list(broken.MISTAKES))
def test_each_broken_store_makes_its_own_mistake(llm: LLM, tiny: TinyPair, name: str) -> None:
    other = LLM(str(tiny.target), block_size=4, enforce_eager=True)
    with torch.inference_mode():
        for weights in other.engine.runner.model.parameters():
            weights.mul_(1.1)
    twin = [*SECOND[:16], 1, 2, 3, 4]
    store = broken.MISTAKES[name](find_entry)
    store.add(llm, [], twin, "m")
    store.add(other, [], SECOND, "tuned")
    store.add(llm, [], SECOND, "m")
    llm.reset_prefix_cache()
    made = store.prompt(llm, [FIRST, SECOND], QUESTION, "m")
    used = {"no model in the key": 1, "hash of the first tokens": 0}.get(name, 2)
    assert made.used == [None, used]
    ids = made.prompt["prompt_token_ids"]
    mine, others = rows_of(llm, made.prompt), rows_of(llm, {"prompt_token_ids": ids})
    llm.reset_prefix_cache()
    plain = moving.computed(llm, ids, 4)
    assert torch.allclose(others, plain, atol=1e-3) == (name != "moved is called exact")
    assert not torch.allclose(mine, plain, atol=1e-3)
    moved = store.spans[2].moved_to(len(FIRST), llm.engine.runner.model.config)
    right = KVSpan(FIRST, 0, *_first(llm))
    is_right = torch.allclose(mine, on_top_of(llm, [right, moved], ids, 4), atol=1e-3)
    assert is_right == (name in ("right", "moved is called exact"))


def _first(llm: LLM) -> tuple[Tensor, Tensor]:
    with Scratch(llm, len(FIRST)) as scratch:
        scratch.forward(FIRST, 0)
        span = scratch.read(0, len(FIRST), FIRST)
    return span.keys, span.values


def test_a_key_is_an_entry_and_a_wish() -> None:
    assert find_entry([KEY], KEY) == (0, 0, True)
    assert find_entry([KEY], replace(KEY, before="x", start=7)) == (0, 7, False)


def test_an_edit_behind_the_last_line_boundary_is_made_at_it() -> None:
    llm = LLM("minicoder", num_kv_blocks=8, enforce_eager=True)
    ids = llm.engine.tokenizer.encode("import os\nimport re\nprint(os.getcwd())")
    inserted, deleted = moving.edits(llm, [ids], 0.99)
    assert llm.engine.tokenizer.decode(ids[inserted.start :]) == "print(os.getcwd())"
    assert deleted.stop == len(ids)
