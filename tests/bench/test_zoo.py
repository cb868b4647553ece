"""The zoo measures what it says: equal bytes, tokens behind the prompt, definitions that are really that far back."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import cli
from minillm.bench import zoo, zoo_recall
from minillm.bench.quality import Quality
from minillm.bench.zoo_cache import (
    build,
    calibrated,
    continuation,
    float16_bytes,
    plain_bytes,
    read_prompt,
    share_read,
    stored_bytes,
)
from minillm.bench.zoo_systems import BUDGETS, TECHNIQUES, TOLERANCE, Setting, ZooSystem, list_systems
from minillm.bench.zoo_texts import (
    ANSWER,
    CUE,
    long_files,
    recall_tasks,
    rows_of,
    scored_texts,
    without_definition,
)
from minillm.cache.layouts import LAYOUTS, find_layout
from minillm.config import CacheConfig
from minillm.errors import ConfigError
from minillm.models.calibration import CalibrationTexts
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.held_out import calibration_prompts
from minillm.models.hub import resolve
from minillm.models.loading import load_config, load_model
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair

SHAPE = ModelConfig(96, 128, 96, 2, 2, 2, 64, 1024)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyPair) -> Tokenizer:
    return Tokenizer.from_folder(tiny.target)


@pytest.fixture(scope="module")
def random_model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SHAPE).requires_grad_(False)


def setting(budget: float, prompt_len: int = 960) -> Setting:
    return Setting(budget, prompt_len, SHAPE.head_dim, SHAPE.kv_size, SHAPE.num_layers)


# --- texts ----------------------------------------------------------------------------------------------------------


def test_what_is_fitted_and_what_is_measured_are_different_files(tokenizer: Tokenizer) -> None:
    fitted, measured = long_files(tokenizer)
    sources = {prompt.source for prompt in calibration_prompts()}
    assert fitted and measured
    assert all(file.source in sources for file in fitted) and not any(file.source in sources for file in measured)


def test_the_definition_is_as_far_back_as_it_says_and_nowhere_without_it(tokenizer: Tokenizer) -> None:
    _, files = long_files(tokenizer)
    for distance in (1, 40, 140):
        for task in recall_tasks(files, tokenizer, 200, distance, 6):
            definition = [*task.prompt[-CUE:], *task.answer]
            assert len(task.prompt) == 200 and len(definition) == CUE + ANSWER
            end = 200 - CUE - distance
            assert task.prompt[end - len(definition) : end] == definition
            assert tokenizer.decode(definition).startswith(("def ", "class "))
            control = without_definition(task, files, distance)
            changed = [i for i, (a, b) in enumerate(zip(task.prompt, control.prompt, strict=True)) if a != b]
            assert changed and end - len(definition) <= min(changed) and max(changed) < end
            assert control.answer == task.answer


def test_a_distance_without_room_is_refused(tokenizer: Tokenizer) -> None:
    _, files = long_files(tokenizer)
    with pytest.raises(ConfigError, match=r"distance=160 must be from 1 to 159, what a prompt of 200 tokens has room"):
        recall_tasks(files, tokenizer, 200, 160, 1)
    with pytest.raises(ConfigError, match=r"rows of 1000 tokens; 999 were asked for"):
        rows_of(files, 1000, 999)


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_every_lossy_layout_is_in_the_zoo() -> None:
    found = [system.options for system in list_systems(setting, BUDGETS) if system.options is not None]
    layouts = {
        find_layout(CacheConfig.from_options(one.get("kv_cache_dtype", "auto"), one.get("kv_cache_config")))
        for one in found
    }
    assert layouts == set(LAYOUTS.values()) - {LAYOUTS["paged", "auto"], LAYOUTS["contiguous", "auto"]}


@pytest.mark.parametrize(
    "technique", [t for t in TECHNIQUES if t.name not in ("squeezed", "anchors")], ids=lambda t: t.name
)
def test_options_for_a_budget_take_that_many_bytes(technique: Any, random_model: Decoder) -> None:
    """Counted on a filled cache. The exact techniques come within 4% of each budget; the others stay below."""
    whole = plain_bytes(random_model, 960)
    assert whole == 960 * 2 * 2 * 128 * 2
    for budget in BUDGETS:
        options = technique.at(setting(budget))
        if options is None:
            assert technique.name in ("int8", "int4", "kivi", "two levels", "think")
            continue
        share = stored_bytes(options, random_model, 960)[0] / whole
        assert share <= budget * TOLERANCE
        assert technique.name == "int4" or share > 0.96 * budget


def test_the_index_of_anchors_is_as_large_in_float16(tiny: TinyPair, tokenizer: Tokenizer) -> None:
    model = load_model(tiny.target, torch.float32, CPU)
    options = {"kv_cache_config": {"layout": "anchors", "window": 64}}
    runner = build(options, model, 40, texts=CalibrationTexts(tokenizer))
    read_prompt(runner, [1] * 40, 40)
    assert float16_bytes(runner.cache) == plain_bytes(model, 40) + 40 * (8 + 8 + 1)


@pytest.mark.parametrize("name", ["tiny", "minicoder"])
def test_a_calibrated_threshold_reads_what_the_budget_allows(name: str, tiny: TinyPair, tokenizer: Tokenizer) -> None:
    """Also of a trained model, which gives most keys a minute weight."""
    fitted, _ = long_files(tokenizer)
    folder = tiny.target if name == "tiny" else resolve(name)
    rows, model = rows_of(fitted, 160, 2), load_model(folder, torch.float32, CPU)
    technique = next(t for t in TECHNIQUES if t.name == "squeezed")
    for budget in (0.3, 0.6, 0.9):
        options = calibrated(technique.at(setting(budget, 120)), budget, model, rows, 120)
        shares = []
        for row in rows:
            runner = build(options, model, 160)
            read_prompt(runner, row, 120)
            continuation(runner, row, 120)
            shares.append(share_read(runner, 120))
        assert sum(shares) / 2 == pytest.approx(budget, abs=0.06)
    assert stored_bytes(options, model, 120)[0] > plain_bytes(model, 120)  # it stores more, not less


# --- measuring ------------------------------------------------------------------------------------------------------


def test_only_tokens_behind_the_prompt_are_scored_and_each_once(tiny: TinyPair, tokenizer: Tokenizer) -> None:
    """Against one forward over the whole row; tokens that run together and one by one."""
    model = load_model(tiny.target, torch.float32, CPU)
    _, files = long_files(tokenizer)
    [row] = rows_of(files, 150, 1)
    texts = scored_texts([row], 100, tokenizer)
    assert texts.scored == [list(range(101, 150))]
    runner = build({}, model, 150)
    read_prompt(runner, row, 100)
    found = continuation(runner, row, 100, one_by_one=9)
    assert len(found.seconds) == 9 and len(found.logprobs) == len(texts.targets) == 49
    from minillm.models.causal import CausalAttention

    with torch.inference_mode():
        whole = model.logits(model(torch.tensor(row), torch.arange(150), CausalAttention(150)))
    torch.testing.assert_close(found.logprobs, whole[100:149].log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_a_window_forgets_and_its_recall_is_that_without_the_definition(tiny: TinyPair, tokenizer: Tokenizer) -> None:
    """A definition before the window cannot change anything."""
    model = load_model(tiny.target, torch.float32, CPU)
    _, files = long_files(tokenizer)
    tasks = recall_tasks(files, tokenizer, 150, 60, 4)
    guesses = [without_definition(task, files, 60) for task in tasks]
    small = {"kv_cache_config": {"layout": "window", "window": 30 // 2, "spare": 0}}
    seen, gone = (zoo_recall.recall(build(small, model, 200), 60, some) for some in (tasks, guesses))
    assert seen == gone  # two layers with a window of 15 reach back 30 tokens
    plain = [zoo_recall.recall(build({}, model, 200), 60, some).nats for some in (tasks, guesses)]
    assert plain[0] != plain[1]


def test_the_best_of_each_budget_are_named() -> None:
    quality = Quality(1, 1, 0.1, 0, 1, 1)
    one = zoo.ZooRow("a 25%", "a", 0.25, quality=quality, recall=[zoo_recall.Recall(10, 1, 0, 0.5, 0, 1)])
    other = zoo.ZooRow(
        "b 25%", "b", 0.25, quality=replace(quality, mean_kl=0.2), recall=[zoo_recall.Recall(10, 1, 0, 1, 0, 1)]
    )
    failed = zoo.ZooRow("c 25%", "c", 0.25, error="no")
    assert zoo.best([one, other, failed]) == {"25.0%": {"mean_kl": "a", "recall": "b"}}


def test_speed_is_relative_to_a_plain_run_of_the_same_row(
    tiny: TinyPair, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that gets slower with every run makes no technique slower."""
    real, runs = zoo.continuation, itertools.count()

    def slower(*arguments: Any) -> Any:
        found = real(*arguments)
        return replace(found, seconds=[1.1 ** next(runs)] * len(found.seconds))

    monkeypatch.setattr(zoo, "continuation", slower)
    shape, model = load_config(tiny.target), load_model(tiny.target, torch.float32, CPU)
    rows = rows_of(long_files(tokenizer)[1], 256, 2)
    material = zoo.Material(model, scored_texts(rows, 192, tokenizer), 192, {}, rows, CalibrationTexts(tokenizer))
    reference = zoo.measure({}, material)

    def of(budget: float) -> Setting:
        return Setting(budget, 192, shape.head_dim, shape.kv_size, shape.num_layers)

    for system in list_systems(of, (0.25, 0.5), ["snapkv"]):
        row = zoo.measure_system(system, material, reference)
        assert 0.85 < row.speed_min <= row.speed <= row.speed_max < 1.15
    alone = zoo.measure_system(system, material, reference, compare_speed=False)
    assert alone.quality == row.quality and alone.speed is alone.speed_min is alone.speed_max is None


def test_a_run_that_was_ended_names_what_it_has_not_measured(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names: list[str] = []

    def ended(system: ZooSystem, material: zoo.Material, reference: zoo.Measured) -> zoo.ZooRow:
        if names:
            raise KeyboardInterrupt
        names.append(system.name)
        return zoo.ZooRow(system.name, system.technique, system.budget, error="no")

    monkeypatch.setattr(zoo, "measure_system", ended)
    with pytest.raises(KeyboardInterrupt):
        zoo.run(str(tiny.target), ["snapkv"], [20], quick=True, save_to=tmp_path / "zoo.json")
    outcome = json.loads((tmp_path / "zoo.json").read_text())
    assert [row["system"] for row in outcome["rows"]] == ["plain", *names] == ["plain", "snapkv 12.5%"]
    assert outcome["config"]["unfinished"][:3] == ["snapkv 25%", "snapkv 37.5%", "snapkv 50%"]


def test_run_gives_a_table_and_json(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    command = ["bench", "zoo", "--model", str(tiny.target), "--quick", "--systems", "snapkv,int8,two levels,kivi"]
    assert cli.main([*command, "--distances", "20,90", "--json", str(tmp_path / "zoo.json")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "recall at 20" in printed and "snapkv 50%" in printed and "two levels" in printed
    assert "int8 25% (has no size of at most 25.0%)" in printed
    outcome = json.loads((tmp_path / "zoo.json").read_text())
    rows = {row["system"]: row for row in outcome["rows"]}
    assert rows["plain"]["quality"]["mean_kl"] == 0 and rows["plain"]["share"] == 1
    assert rows["snapkv 25%"]["share"] == pytest.approx(0.25, abs=0.01)
    assert 0 < rows["snapkv 50%"]["quality"]["mean_kl"] < rows["snapkv 25%"]["quality"]["mean_kl"]
    assert [one["distance"] for one in rows["snapkv 25%"]["recall"]] == [20, 90]
    assert outcome["config"]["prompt_tokens"] == 192 and len(outcome["config"]["recall_without_definition"]) == 2
    assert outcome["config"]["unfinished"] == [] and rows["snapkv 50%"]["speed_min"] > 0


def test_an_unknown_technique_is_refused_before_anything_runs(tiny: TinyPair) -> None:
    with pytest.raises(ConfigError, match=r"unknown techniques kiwi; there are: int8, int4"):
        zoo.run(str(tiny.target), systems=["kiwi", "kivi"])
