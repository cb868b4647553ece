"""Prefill, latency, verify and ladder count what they say, and compare what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.bench import harness, ladder, latency, llama_cpp, prefill, systems, verify
from minillm.bench.benchmarks import find_table
from minillm.bench.completion import Completion
from minillm.bench.harness import common_prefix_share
from minillm.bench.systems import Workload
from minillm.bench.tables import speed_table
from minillm.errors import ConfigError
from tests.conftest import TinyPair


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory has a test of its own; here it would only take time."""
    for module in (harness, ladder, latency):
        monkeypatch.setattr(module, "peak_memory_of", lambda code: compile(code, "code", "exec") and 7)
    monkeypatch.setattr(prefill, "peak_memory", lambda name, workload: 7)


def printed(outcome: dict, capsys: pytest.CaptureFixture[str]) -> str:
    from rich.console import Console

    json.dumps(outcome)
    Console(width=200).print((find_table(outcome["name"]) or speed_table)(outcome))
    return capsys.readouterr().out


def test_same_start_is_a_share_of_the_other_ones_tokens() -> None:
    assert common_prefix_share([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert common_prefix_share([[1]], [[1, 2]]) == 0.5 and common_prefix_share([[9, 2]], [[1, 2]]) == 0.0


def test_prefill_counts_prompt_tokens_by_length(tiny: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["transformers fp32", "minillm fp32"]
    outcome = prefill.run(str(tiny.target), systems=names, rounds=1, lengths=(16, 200))
    found = [(row["system"], row["config"]["prompt_tokens"], row["peak_memory_bytes"]) for row in outcome["rows"]]
    assert found == [(names[0], 16, None), (names[1], 16, None), (names[0], 200, 7), (names[1], 200, 7)]
    assert all(row["outputs_equal"] for row in outcome["rows"][1::2])
    assert "200" in printed(outcome, capsys)


def test_a_peer_has_its_fastest_setting_at_each_length(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first setting is the faster one up to 40 tokens."""
    flash, exact = llama_cpp.SETTINGS
    rooms: list[int] = []

    class Peer:
        def __init__(self, workload: Workload, setting: str) -> None:
            self.details = {"setting": setting}
            rooms.append(workload.context)

        def complete(self, prompt: list[int], new_tokens: int) -> Completion:
            return Completion([7], 0.005 if self.details["setting"] == exact else 0.001 + 0.0001 * len(prompt), 0.0)

    @contextmanager
    def no_files(workload: Workload, names: Sequence[str]) -> Iterator[Workload]:
        yield workload

    monkeypatch.setattr(prefill, "exported", no_files)
    monkeypatch.setattr(prefill, "left_out", lambda names, draft: {})
    monkeypatch.setattr(systems, "_load_peer", lambda name, workload, setting: Peer(workload, setting))
    outcome = prefill.run(str(tiny.target), systems=["llama.cpp f32"], rounds=1, lengths=(16, 200))
    at = [row["config"] for row in outcome["rows"]]
    assert [(config["prompt_tokens"], config["setting"]) for config in at] == [(16, flash), (200, exact)]
    assert set(at[0]["tried_ms_per_prompt"]) == {flash, exact}
    assert rooms == [17, 17, 201, 201, 201, 201], "tried with one length each; what is measured serves all lengths"


def test_lengths_without_room_are_left_out_before_anything_is_measured(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has room for 256 tokens, one of which is new."""
    outcome = prefill.run(str(tiny.target), systems=["minillm fp32"], rounds=1, lengths=(16, 255, 256, 1000))
    assert (
        [row["config"]["prompt_tokens"] for row in outcome["rows"]] == [16, 255] == outcome["config"]["prompt_tokens"]
    )
    left_out = outcome["config"]["left_out"]
    assert left_out == dict.fromkeys(
        ("prompts of 256 tokens", "prompts of 1000 tokens"), "the model has room for prompts of 255 tokens"
    )
    monkeypatch.setattr(prefill, "load", lambda name, workload: pytest.fail("a system was loaded"))
    with pytest.raises(ConfigError, match="has room for prompts of 255 tokens; the shortest here has 512"):
        prefill.run(str(tiny.target), systems=["minillm fp32"], lengths=(512, 1000))


def test_a_joined_prompt_has_just_the_length(tiny: TinyPair) -> None:
    assert [len(prefill.joined_prompt(str(tiny.target), length)) for length in (1, 77, 900)] == [1, 77, 900]


def test_latency_is_cold_then_warm(tiny: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    engines = ["minillm fp32", "minillm fp32 + draft"]
    outcome = latency.run(str(tiny.target), str(tiny.draft), engines, rounds=5, prompts=4, new_tokens=3)
    rows = {row["system"]: row for row in outcome["rows"]}
    assert {name: row["baseline"] for name, row in rows.items()} == {
        "cold": None,
        "warm": "cold",
        "cold fp32 + draft": "cold",
        "warm fp32 + draft": "cold fp32 + draft",
    }
    assert all(row["outputs_equal"] for row in rows.values() if row["baseline"])
    assert rows["cold"]["config"]["cached_tokens"] == 0
    assert rows["warm"]["config"]["cached_tokens"] == 192  # of 200: whole blocks of 16
    assert rows["warm"]["config"]["p90_ms"] >= rows["warm"]["p50_ms"]
    assert outcome["config"]["completions"] == 20 and rows["cold"]["peak_memory_bytes"] == 7
    table = printed(outcome, capsys)
    assert "p90 ms" in table and "ms per completion" in table
    assert "tokens/s" in table and "completions/s" not in table  # 3 new tokens over the time of a completion
    assert rows["cold"]["tokens_per_s"] == pytest.approx(3 / rows["cold"]["p50_ms"] * 1000)


def test_a_round_of_completions_is_one_value_of_the_ratio() -> None:
    """Two prompts of which one gains: its repeats do not make an interval."""
    made = {"base": [1.0, 3.0] * 6, "own": [1.0, 1.0] * 6}
    base, own = (
        SimpleNamespace(name=name, seconds={"cold": times}, tokens={"cold": [[1]] * 12}, cached_tokens={"cold": 0})
        for name, times in made.items()
    )
    row = latency._row(own, "cold", (base, "cold"), 1, 6, None)  # type: ignore[arg-type]
    assert row.ratio == row.ratio_min == row.ratio_max == 2.0 and row.interval == (2.0, 2.0)


def test_too_few_completions_have_no_percentile(tiny: TinyPair) -> None:
    with pytest.raises(ConfigError, match="3 rounds of 6 prompts are 18 completions"):
        latency.run(str(tiny.target), None, rounds=3, prompts=6)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in range(20, 0, -1)]
    assert latency.percentile(values, 0.9) == 18.0
    assert latency.percentile(values, 0.5) == 10.0 and latency.percentile([3.0], 0.9) == 3.0
    assert latency.percentile(values, 1.0) == 20.0


def test_verify_runs_both_forwards_on_the_same_past(
    tiny: TinyPair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, str | None] = {}

    def load(model: str, **options: Any) -> LLM:
        loaded[model] = options["quantization"]
        return LLM(model, **options)

    monkeypatch.setattr("minillm.LLM", load)
    outcome = verify.run(str(tiny.target), str(tiny.draft), systems=["minillm fp32"], rounds=2, drafts=3)
    decode, verified, draft = outcome["rows"]
    assert decode["system"] == "minillm fp32 decode 1" and decode["config"]["tokens"] == 1
    assert verified["system"] == "minillm fp32 verify 4" and verified["config"]["tokens"] == 4
    assert verified["outputs_equal"] and verified["config"]["verify_over_decode"] == 1 / verified["ratio"]
    assert draft["outputs_equal"] is None and draft["same_start"] is None, "another model's tokens say nothing"
    assert outcome["config"]["draft_quantization"] == "w8a8" == loaded[str(tiny.draft)]
    assert loaded[str(tiny.target)] is None
    assert draft["baseline"] == decode["system"] and draft["config"]["draft_over_target"] == 1 / draft["ratio"]
    assert outcome["config"]["verified_tokens"] == 4 and "forwards/s" in printed(outcome, capsys)


def test_verifying_reads_the_cache_that_decoding_reads(tiny: TinyPair) -> None:
    """The first of the verified tokens follows the 128 in the cache, so what comes next is what `generate` gives."""
    ids = prefill.joined_prompt(str(tiny.target), verify.PAST + 4)
    llm = LLM(str(tiny.target), enable_prefix_caching=False)
    prompt = {"prompt_token_ids": ids[: verify.PAST + 1]}
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    for width in (1, 4):
        assert verify._system("any", llm.engine.runner, ids, width).run() == [output.outputs[0].token_ids]


def test_every_rung_gives_the_same_requests_and_says_what_is_in_it(
    tiny: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = ladder.run(str(tiny.target), str(tiny.draft), rounds=1, prompts=3, new_tokens=5, drafts=2)
    rows = {(row["system"], row["baseline"]): row for row in outcome["rows"]}
    assert [key for key in rows if "INT8 KV" not in key[0] and key[0] != "all"] == [
        ("transformers fp32", None),
        ("plain", "transformers fp32"),
        ("speculation", "plain"),
        ("speculation", "transformers fp32"),
        ("paged batching", "plain"),
        ("paged batching", "transformers fp32"),
    ]
    exact = ("plain", "speculation", "paged batching")
    assert all(row["outputs_equal"] for (name, base), row in rows.items() if name in exact and base)
    kv = {name: row["config"].get("kv_bytes_per_token") for (name, _), row in rows.items()}
    assert kv["plain"] == 2 * 2 * 2 * 16 * 4 and kv["INT8 KV"] == 2 * 2 * 2 * (16 + 2)
    assert kv["speculation"] == 2 * kv["plain"] and kv["all"] == 2 * kv["INT8 KV"]
    assert (
        outcome["config"]["requests_at_a_time"]["all"] == 3
        and outcome["config"]["requests_at_a_time"]["speculation"] == 1
    )
    steps = {name: row["config"].get("steps") for (name, _), row in rows.items()}
    assert steps["plain"] == 3 * 5 and steps["paged batching"] == 5 and steps["all"] <= 5
    assert rows["speculation", "plain"]["config"]["tokens_per_forward"] > 1
    table = printed(outcome, capsys)
    assert "3.7×" in table and "125 GB" in table, "as the article prints them"


def test_a_ladder_without_a_draft_leaves_its_rungs_out(tiny: TinyPair) -> None:
    outcome = ladder.run(str(tiny.target), None, ["plain", "speculation"], rounds=1, prompts=1, new_tokens=2)
    assert [row["system"] for row in outcome["rows"]] == ["plain"]
    assert outcome["config"]["left_out"] == {"speculation": "there is no draft model for it"}
