"""`minillm bench speculation`: its counts, its rows, and that no method changes a token."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minillm.bench import shapes
from minillm.bench.draft_counts import Counts
from minillm.bench.harness import Counted, Row
from minillm.bench.speculation import AGAIN, METHODS, PLAIN, SliceRun, _with_figures, run, slice_prompts, table
from minillm.commands.bench import names
from minillm.errors import ConfigError
from minillm.trace import DraftProposed, Event, StepFinished, StepRan, TokensCommitted, Work
from minillm.training.slice_prompts import SLICES
from tests.conftest import TinyPair
from tests.speculative.test_reading_drafter import saved


def test_every_slice_has_prompts() -> None:
    found = slice_prompts()
    assert list(found) == list(SLICES)
    assert all(len(prompts) >= 4 and len(set(prompts)) == len(prompts) for prompts in found.values())


def test_every_method_can_be_asked_for_by_name() -> None:
    """`--methods` takes a list with commas."""
    assert names(",".join(METHODS)) == list(METHODS)


def test_each_method_is_compared_with_plain_decoding_and_gives_its_tokens(tiny: TinyPair) -> None:
    given = {"methods": ["ngram", "draft_model"], "slices": ["edits", "long files"], "weights": ["int8"]}
    sizes = {"batches": [2], "rounds": 1, "seconds": 0, "prompts": 2, "new_tokens": 12, "drafts": 3}
    result = run(str(tiny.target), str(tiny.draft), **sizes, **given)
    rows = [row for row in result["rows"] if row["baseline"] is not None]
    systems = ["draft_model", "draft_model, adaptive", AGAIN, "ngram", "ngram, adaptive"]
    assert [row["system"] for row in rows] == 2 * systems
    assert {row["config"]["slice"] for row in rows} == {"edits", "long files"}
    assert all(row["baseline"] == PLAIN and row["outputs_equal"] for row in rows)
    assert {row["config"]["rounds"] for row in rows} == {1} and result["config"]["unfinished"] == []
    drafted = rows[0]["config"]
    assert 1 <= drafted["tau"] <= 4 and len(drafted["alpha"]) <= 3 and drafted["c"] > 0 and drafted["v"] > 0
    shown = Console(width=160, record=True)
    shown.print(table(result))
    assert "int8, 2 together" in shown.export_text()


def test_more_drafts_than_a_method_makes_are_refused_before_anything_is_measured() -> None:
    given = {"methods": ["heads"], "slices": ["edits"], "weights": ["fp32"], "batches": [1]}
    with pytest.raises(ConfigError, match=r"^--drafts 6, method 'heads': .* can propose per round, 5; lower it$"):
        run(drafts=6, **given)


def test_a_result_names_trained_weights_but_not_the_folder_that_they_lie_in() -> None:
    given = {"methods": ["heads"], "slices": ["edits"], "weights": ["fp32"], "batches": [1]}
    config = run(**given, drafts=2, rounds=1, seconds=0, prompts=1, new_tokens=4)["config"]
    assert config["methods"] == {"heads": {"method": "heads"}} and config["drafters"] == ["minicoder-heads"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": 50}, "--prompts 50 is more than the 8 prompts of a slice; give at most 8"),
        ({"shape": "0.4b", "drafters": Path("x")}, "--drafters x is not used with --shape 0.4b"),
    ],
)
def test_options_without_an_effect_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**given)


def test_short_runs_get_more_rounds(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is said to take a quarter of the second for which plain decoding is to run."""
    count = Counts.count

    def counted(self: Counts, events: Sequence[Event]) -> Counted:
        count(self, events)
        return Counted(0.25, 8)

    monkeypatch.setattr(Counts, "count", counted)
    given = {"methods": ["ngram"], "slices": ["edits"], "weights": ["fp32"], "batches": [1]}
    result = run(str(tiny.target), rounds=1, seconds=1, prompts=1, new_tokens=8, **given)
    drafting = [row for row in result["rows"] if row["baseline"] is not None]
    assert drafting and {row["config"]["rounds"] for row in drafting} == {4}


def test_a_run_in_which_no_step_counts_is_refused(tiny: TinyPair) -> None:
    """Blocks as long as the context keep no prompt in the prefix cache, so some requests still read their prompts when
    others end."""
    given = {"methods": ["ngram"], "slices": ["functions"], "weights": ["fp32"], "batches": [16], "block_size": 256}
    with pytest.raises(ConfigError, match=r"no step in which 16 requests decode; raise --new-tokens, or lower"):
        run(str(tiny.target), rounds=1, seconds=1, new_tokens=2, **given)


def test_a_slice_that_fails_leaves_the_result_of_those_before_it(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = SliceRun.rows

    def rows(self: SliceRun, rounds: int, seconds: int, labels: Mapping[str, Any]) -> list[Row]:
        if labels["slice"] == "long files":
            raise KeyboardInterrupt
        return measure(self, rounds, seconds, labels)

    monkeypatch.setattr(SliceRun, "rows", rows)
    given = {"methods": ["ngram"], "slices": ["edits", "long files"], "weights": ["fp32"], "batches": [1]}
    with pytest.raises(KeyboardInterrupt):
        run(str(tiny.target), rounds=1, seconds=0, prompts=1, new_tokens=8, save_to=tmp_path / "kept.json", **given)
    kept = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    assert {row["config"]["slice"] for row in kept["rows"]} == {"edits"} and len(kept["rows"]) == 4
    assert kept["config"]["unfinished"] == ["long files (fp32, 1 together)"]


@pytest.mark.parametrize("batch", [1, 4])
def test_every_prompt_stays_cached_so_that_only_decoding_is_measured(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    runs: list[int] = []
    count = Counts.count

    def counted(self: Counts, events: Sequence[Event]) -> Counted:
        works = [work for event in events if isinstance(event, StepRan) for work in event.work]
        runs.append(max(work.num_tokens for work in works if work.kind == "prefill"))
        return count(self, events)

    monkeypatch.setattr(Counts, "count", counted)
    given = {"methods": ["ngram"], "slices": ["long files"], "weights": ["fp32"], "batches": [batch]}
    run(str(tiny.target), rounds=2, seconds=0, prompts=3, new_tokens=8, block_size=16, **given)
    first = 4 if batch > 1 else 12  # each of four engines, for all prompts together or for each of three
    assert min(runs[:first]) > 16 >= max(runs[first:])


def test_a_shape_is_measured_with_drafts_accepted_at_given_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = replace(shapes.SHAPES["0.4b"], hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    for name in ("small", "small-draft"):
        monkeypatch.setitem(shapes.SHAPES, name, replace(small, intermediate_size=64, vocab_size=300))
    given = {"slices": ["edits"], "weights": ["fp32"], "batches": [1], "rounds": 1, "seconds": 0}
    result = run(shape="small", prompts=2, new_tokens=200, drafts=4, **given)
    assert (result["config"]["model"], result["config"]["draft"]) == ("small", "small-draft")
    rows = {row["system"]: row["config"] for row in result["rows"]}
    assert list(rows) == [PLAIN, AGAIN, "synthetic", "synthetic, adaptive"]
    assert rows[AGAIN]["tau"] == 1 and rows[AGAIN]["rounds_with_drafts"] == 0
    # 400 tokens in rounds of 1 to 5, mean 3.1: further from it than 0.9 with probability below 1e-6.
    assert 2.2 < rows["synthetic"]["tau"] < 4.0
    assert len(rows["synthetic"]["alpha"]) == 4 and all(rows["synthetic"]["alpha"])


def test_trained_drafters_are_measured_where_there_are_weights(tiny: TinyPair, tmp_path: Path) -> None:
    saved(tiny.target, "long", tmp_path / "target-long")
    given = {
        "slices": ["edits"],
        "weights": ["fp32"],
        "batches": [1],
        "rounds": 1,
        "seconds": 0,
        "prompts": 1,
        "new_tokens": 8,
    }
    result = run(str(tiny.target), drafters=tmp_path, methods=["ngram", "long"], **given)
    rows = [row for row in result["rows"] if row["baseline"] is not None]
    assert [row["system"] for row in rows] == ["ngram", "ngram, adaptive", AGAIN, "long", "long, adaptive"]
    assert all(row["outputs_equal"] for row in rows)
    with pytest.raises(ConfigError, match="no weights of method 'spire'"):
        run(str(tiny.target), drafters=tmp_path, methods=["spire"], **given)
    with pytest.raises(ConfigError, match="method 'staged' needs a draft model, and none is bundled for"):
        run(str(tiny.target), methods=["ngram", "staged"], **given)
    with pytest.raises(ConfigError, match=r"--drafters .*nowhere: there is no such folder"):
        run(str(tiny.target), drafters=tmp_path / "nowhere", **given)


def test_counts_are_those_of_the_trace() -> None:
    """Two steps with drafts, one without; the prefill does not count."""

    def step(number: int, kind: str, tokens: int, drafts: int, accepted: int) -> list[object]:
        committed = TokensCommitted("a", [1] * tokens, [""] * tokens, ["sampled"] * tokens, drafts, accepted, 0)
        work = Work("a", kind, 0, drafts + 1)  # type: ignore[arg-type]
        return [StepRan(number, [work]), committed, StepFinished(number, 2.5 + 0.25 * drafts, 0.25 * drafts, 2.0, 0)]

    events = [*step(1, "prefill", 1, 0, 0), *step(2, "verify", 3, 3, 2), *step(3, "verify", 1, 2, 0)]
    counts = Counts()
    counts.count([*events, *step(4, "decode", 1, 0, 0)])  # type: ignore[list-item]
    assert (counts.tokens, counts.forwards) == (5, 3)
    assert (counts.judged, counts.accepted) == ([2, 1, 1], [1, 1, 0])
    assert (counts.draft_s, counts.verify_s, counts.plain_s) == ([0.75, 0.5], [2.5, 2.5], [2.5])


def test_the_prediction_is_the_tokens_of_a_step_over_its_cost() -> None:
    """Of 20 steps with 1.5 tokens each, five have drafts and take three times as long."""
    plain = Counts(tokens=40, forwards=40, plain_s=[1.0] * 40)
    drafted = Counts(tokens=30, forwards=20, draft_s=[1.0] * 5, verify_s=[2.0] * 5, plain_s=[1.0] * 15)
    row = Row("draft_model", PLAIN, 0.5, 0.5, 0.5, 1.0, 1.0, None, True)
    found = _with_figures(row, drafted, plain, {"batch": 1}).config
    assert (found["tau"], found["c"], found["v"], found["predicted"]) == (1.5, 1.0, 2.0, 1.0)


def test_steps_count_in_which_all_seats_decode(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests for two seats: what counts are the steps of two requests, not those of the last one alone."""
    given = {"methods": ["draft_model"], "slices": ["edits"], "weights": ["fp32"], "batches": [2], "drafts": 3}
    seen: list[tuple[list[int], Counted]] = []
    count = Counts.count

    def counted(self: Counts, events: Sequence[Event]) -> Counted:
        found = count(self, events)
        steps = [event.work for event in events if isinstance(event, StepRan)]
        seen.append(([len(work) for work in steps if all(part.kind != "prefill" for part in work)], found))
        return found

    monkeypatch.setattr(Counts, "count", counted)
    result = run(str(tiny.target), str(tiny.draft), rounds=1, seconds=0, prompts=3, new_tokens=12, **given)
    plain, drafted = seen[0], seen[2]
    assert set(plain[0]) == {2} and plain[1].num_tokens == 2 * len(plain[0])
    assert {1, 2} <= set(drafted[0]) and drafted[1].num_tokens >= 2 * drafted[0].count(2)
    [measured] = [row for row in result["rows"] if row["system"] == "draft_model"]
    last = seen[-4][1]  # the last runs: drafts, plain decoding, adaptive drafts, plain decoding
    assert measured["p50_ms"] == pytest.approx(1000 * last.seconds / last.num_tokens)


def test_a_run_that_counts_begins_with_a_few_tokens_that_do_not(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    generate = SliceRun._generate

    def generated(self: SliceRun, name: str) -> list[list[int]]:
        before = _num_steps(self)
        outputs = generate(self, name)
        made.append(sum((_num_steps(self) - before).values()))
        return outputs

    monkeypatch.setattr(SliceRun, "_generate", generated)
    given = {"methods": ["ngram"], "slices": ["edits"], "weights": ["fp32"], "batches": [1]}
    run(str(tiny.target), rounds=1, seconds=0, prompts=1, new_tokens=12, **given)
    assert made[0] == 12 and made[4] == 12 + 8  # plain decoding: the warm-up round, and the first that counts


def test_of_the_warm_up_run_nothing_counts(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, Counts] = {}
    measure = SliceRun.rows

    def rows(self: SliceRun, rounds: int, seconds: int, labels: Mapping[str, Any]) -> list[Row]:
        found = measure(self, rounds, seconds, labels)
        counts.update(self.counts)
        return found

    monkeypatch.setattr(SliceRun, "rows", rows)
    given = {"methods": ["ngram"], "slices": ["edits"], "weights": ["fp32"], "batches": [1]}
    run(str(tiny.target), rounds=2, seconds=0, prompts=1, new_tokens=12, **given)
    assert counts[AGAIN].tokens == 2 * 11  # of each round the tokens behind the first one, which comes with the prompt


def test_every_run_of_a_method_is_between_the_two_engines_of_plain_decoding(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So both engines of plain decoding, which are not equally fast, are the baseline equally often."""
    used: list[tuple[str, str]] = []
    generate = SliceRun._generate

    def generated(self: SliceRun, name: str) -> list[list[int]]:
        before = _num_steps(self)
        outputs = generate(self, name)
        [engine] = _num_steps(self) - before
        used.append((name, engine))
        return outputs

    monkeypatch.setattr(SliceRun, "_generate", generated)
    given = {"methods": ["ngram", "suffix"], "slices": ["edits"], "weights": ["fp32"], "batches": [1]}
    run(str(tiny.target), rounds=2, seconds=0, prompts=1, new_tokens=4, **given)
    warm_up, rounds = used[:6], used[6:]
    assert all(name == engine for name, engine in warm_up)  # each engine runs once
    baselines = [engine for name, engine in rounds if name == PLAIN]
    assert baselines == [AGAIN, PLAIN] * 4
    assert [engine for name, engine in rounds if name == AGAIN] == [PLAIN, AGAIN]
    assert all(name == engine for name, engine in rounds if name not in (PLAIN, AGAIN))


def _num_steps(run_: SliceRun) -> Counter[str]:
    """The steps that each engine has made."""
    return Counter({name: llm.llm_engine.engine.num_steps for name, llm in run_.engines.items()})


@pytest.mark.parametrize(
    ("path", "judged", "accepted"),
    [
        ([], [1], [0]),
        ([0], [1, 1], [1, 0]),
        ([0, 2], [1, 1], [1, 1]),  # a leaf: there is no third position
        ([1], [1], [1]),  # a leaf, too, beside a longer branch
    ],
)
def test_a_tree_has_as_many_positions_as_its_branch(path: list[int], judged: list[int], accepted: list[int]) -> None:
    """Drafts 0 and 1 follow the root, 2 and 3 follow 0."""
    proposed = DraftProposed("a", [5, 6, 7, 8], [""] * 4, [-1, -1, 0, 0])
    count = len(path) + 1
    committed = TokensCommitted("a", [1] * count, [""] * count, ["sampled"] * count, 4, len(path), 0, path)
    events = [proposed, StepRan(1, [Work("a", "verify", 0, 5)]), committed, StepFinished(1, 2.5, 0.5, 2.0, 0)]
    counts = Counts()
    counts.count(events)
    assert (counts.judged, counts.accepted) == (judged, accepted)


def test_an_unknown_name_is_refused_before_a_model_is_loaded() -> None:
    for wrong in ({"methods": ["guess"]}, {"weights": ["int3"]}):
        with pytest.raises(ConfigError, match="there are:"):
            run("no such model", "no such draft", **wrong)  # type: ignore[arg-type]
