"""The measured figures of the documentation are those of `benchmarks/*.json`."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minillm.bench.on_gpu.findings import MEASURED, Metric
from minillm.bench.on_gpu.stage_runner import SKIPPED
from minillm.bench.speculation import FIRST_ACCEPTED, NEXT_ACCEPTED

DOCS = Path(__file__).parents[1] / "docs"


def replace_result(monkeypatch: pytest.MonkeyPatch, module: ModuleType, file: str, result: dict[str, Any]) -> None:
    """Let `module` read `result` in place of a file of benchmarks."""
    real: Callable[[str], dict[str, Any]] = module.load
    monkeypatch.setattr(module, "load", lambda name: result if name == file else real(name))


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts of `docs/`, which is no package, find each other as when they are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield


@pytest.fixture(scope="module")
def figures(scripts: None) -> ModuleType:
    return importlib.import_module("figures")


@pytest.fixture(scope="module")
def techniques(scripts: None) -> ModuleType:
    return importlib.import_module("techniques")


@pytest.fixture(scope="module")
def results(scripts: None) -> ModuleType:
    return importlib.import_module("results")


def test_every_page_is_written_from_the_results(figures: ModuleType) -> None:
    for file, text in figures.pages().items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name}: run `python docs/figures.py`"


def test_brackets_of_a_technique_are_those_of_the_tables(
    results: ModuleType, figures: ModuleType, techniques: ModuleType
) -> None:
    row = results.row_of("latency", "warm", "cold")
    low, high = row["interval"]
    assert (low, high) != (row["ratio_min"], row["ratio_max"])
    shown = f"{row['ratio']:.2f}× ({low:.2f} to {high:.2f})"
    assert f"| {shown} for a completion of 24 tokens" in techniques.page() and f"{shown} cold |" in figures.measured()


def test_a_table_tells_where_tokens_differ(results: ModuleType) -> None:
    page = importlib.import_module("measured_page")
    part, result = page.SECTIONS[0], copy.deepcopy(results.load("decode"))
    [line] = [line for line in page._table(part, result).splitlines() if line.startswith("| llama.cpp Q8_0 |")]
    of_line = [row for row in result["rows"] if row["system"] == "llama.cpp Q8_0"]
    assert len(of_line) == 2 and line.endswith(f"| no, first {of_line[0]['same_start']:.0%} |")
    of_line[1]["outputs_equal"] = True
    assert f"first {of_line[0]['same_start']:.0%}<br>yes |" in page._table(part, result)
    for row in result["rows"]:
        row["outputs_equal"] = row["baseline"] and True
    assert "same tokens" not in page._table(part, result)


def test_the_version_of_vllm_is_told_as_far_as_it_is_known(results: ModuleType) -> None:
    page = importlib.import_module("measured_page")
    result = copy.deepcopy(results.load("batch_0.4b"))
    assert ", vLLM 0.32.0. Revision" in page._how("batch_0.4b", result) and "vLLM" not in page._vllm({"rows": []})
    at = result["rows"][0]["config"]
    at["vllm_torch"] = "2.13"
    assert page._vllm(result) == ", vLLM 0.32.0 with torch 2.13"
    at.clear()
    assert page._vllm(result) == ", vLLM (version not recorded)"


def test_a_compiled_op_is_compared_with_the_engines_pytorch_too(results: ModuleType) -> None:
    page = importlib.import_module("measured_page")
    us = {
        row["config"]["implementation"]: row["config"]["cold_us"]
        for row in results.load("kernels")["rows"]
        if [row["config"][key] for key in ("op", "shape", "tokens")] == ["w8a8_linear", "0.4b", 1]
    }
    found = {line.split(" | ")[0]: line for line in page.kernels().splitlines()}
    assert found["| w8a8_linear"].endswith(f"| {us['pytorch'] / us['compiled']:.2f}× |")
    assert found["| int8_linear"].endswith("|  |"), "the engine has no other way in PyTorch"


def test_what_is_said_of_two_measurements_goes_when_they_are_made_anew(
    results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("measured_page")
    assert "w8a8 differs so much" in page.apart_from_decoding() and page.repeated_prompts()
    monkeypatch.setattr(page, "row_of", lambda *names: {"p50_ms": 9.0})
    monkeypatch.setattr(page, "load", lambda file: {"config": {"prompts": 8}})
    assert page.apart_from_decoding() == page.repeated_prompts() == ""


def test_a_readme_without_its_marks_is_refused(figures: ModuleType) -> None:
    with pytest.raises(ValueError, match="once"):
        figures.with_table("# minillm\n")


def test_a_figure_is_taken_from_its_own_row(figures: ModuleType) -> None:
    """Decoding in float32 against llama.cpp: the row with this baseline, not the system's first."""
    rows = figures.load("decode")["rows"]
    [row] = [row for row in rows if (row["system"], row["baseline"]) == ("minillm fp32", "llama.cpp f32")]
    words = "decoding, fp32" + " (earlier weights)" * (not figures.is_of_bundled_weights("decode"))
    [line] = [line for line in figures.headline_table().splitlines() if line.startswith(f"| {words} |")]
    assert f"{row['ratio']:.2f}× ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) llama.cpp f32" in line
    assert line.startswith(f"| {words} | {figures.load('decode')['config']['rounds']} |")


@pytest.mark.parametrize(
    ("title", "rate", "time"),
    [
        ("A completion in an editor", "tokens/s", "ms per completion"),
        ("What verifying and drafting cost", "forwards/s", "ms per forward"),
        ("Verifying at 0.4 billion parameters", "forwards/s", "ms per forward"),
        ("Prefill", "prompt tokens/s", "ms per prompt token"),
        ("Decoding, batch 1", "tokens/s", "ms per token"),
        ("32 requests at once", "tokens/s of all requests", "ms per token of all requests"),
    ],
)
def test_a_table_says_what_was_counted(figures: ModuleType, title: str, rate: str, time: str) -> None:
    section = figures.measured().split(f"## {title}\n")[1].split("\n## ")[0]
    [heads] = [line for line in section.splitlines() if line.startswith("| system |")]
    assert f"| {rate} | {time} |" in heads


def test_what_peers_did_not_run_is_said_until_it_is_measured(
    figures: ModuleType, results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("measured_page")
    line = {"baseline": None, "config": {}}
    rows = [line | {"system": "vLLM CPU"}]
    measured = {"config": {"max_num_seqs": 8}, "rows": rows}
    monkeypatch.setattr(page, "load", lambda file: measured)
    assert page.at_a_time("any") == "At most 8 requests run at a time. vLLM with all 32 at a time was not measured."
    assert "a single run" in page.prefill_peers("any")
    rows += [line | {"system": "vLLM CPU, 32 seats"}]
    rows += [line | {"system": "minillm bf16", "baseline": "llama.cpp bf16", "config": {"tried_ms_per_prompt": {}}}]
    assert page.at_a_time("any") == "At most 8 requests run at a time, with `32 seats` 32."
    assert page.prefill_peers("any") == ""


def test_a_sentence_on_peers_that_were_not_measured_goes_when_they_are(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = copy.deepcopy(figures.load("batch_0.4b_xeon"))
    more["rows"].append({**more["rows"][0], "system": "vLLM CPU, 32 seats"})
    replace_result(monkeypatch, figures, "batch_0.4b_xeon", more)
    with pytest.raises(ValueError, match="no vLLM with all 32 requests at a time with AMX"):
        figures.headline_words()


def test_systems_that_run_unlike_numbers_of_requests_are_not_in_one_line(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlike = copy.deepcopy(figures.load("batch"))
    for row in unlike["rows"]:
        if row["system"] == "transformers generate_batch":
            row["config"]["max_requests_per_batch"] = 32
    replace_result(monkeypatch, figures, "batch", unlike)
    with pytest.raises(ValueError, match="of the line 32 requests, 8 at a time, fp32 run as many requests at a time"):
        figures.headline_words()


def test_lines_of_another_generation_of_processor_are_named(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = copy.deepcopy(figures.load("serve"))
    moved["hardware"]["cpu"]["simd"] = figures.load("batch_0.4b")["hardware"]["cpu"]["simd"]
    replace_result(monkeypatch, figures, "serve", moved)
    with pytest.raises(ValueError, match=r"only AVX2, Ice Lake and 0\.4B: 32 requests are without AVX-VNNI"):
        figures.headline_words()


def test_what_is_said_of_the_ladder_is_not_written_if_it_no_longer_holds(
    figures: ModuleType, results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claimed numbers are as the article prints them."""
    page = importlib.import_module("measured_page")
    assert "paged batching 3.7× in 110 GB" in page.claims()
    faster = copy.deepcopy(results.load("ladder"))
    for row in faster["rows"]:
        if row["system"] == "paged batching":
            row["ratio"] = 3.7
    monkeypatch.setattr(results, "load", lambda file: faster)
    with pytest.raises(ValueError, match="about the ladder is no longer true"):
        page.claims()


def test_vllm_in_other_floats_than_minillm_says_so(figures: ModuleType) -> None:
    lines = [line for line in figures.headline_table().splitlines() if "vLLM CPU" in line]
    assert lines and all(("vLLM CPU bf16" in line) is line.startswith("| 0.4B") for line in lines)


def test_brackets_that_are_no_intervals_are_named(
    figures: ModuleType, results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of six rounds and more from before there were intervals; from fewer rounds there are none."""
    page = importlib.import_module("measured_page")
    old = "prefill_0.4b_xeon"
    assert results.has_extremes_for_intervals(old)
    assert not any(map(results.has_extremes_for_intervals, ("verify", "batch_0.4b", "decode")))
    for file in (old, "verify"):
        said = page._how(file, results.load(file))
        assert ("In brackets are the lowest and the highest" in said) is (file == old)
    marked = [line for line in figures.headline_table().splitlines() if "(lowest to highest)" in line]
    assert marked and all(line.startswith("| 0.4B, AMX: prefill") for line in marked)
    assert "Lines with `(lowest to highest)`" in " ".join(figures.headline_words().split())
    words = " ".join(figures.headline_words().split())
    for row in results.load("prefill_0.4b_xeon")["rows"]:
        if (row["system"], row["baseline"]) == ("minillm bf16", "transformers bf16"):
            assert results.ratio(row) in words, "a ratio near 1 says nothing without its brackets"
    monkeypatch.setattr(figures, "has_extremes_for_intervals", lambda file: False)
    assert "(lowest to highest)" not in figures.headline_table() + figures.headline_words()


def test_settings_of_peers_and_compiled_ops_that_a_result_lacks_are_named(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("measured_page")
    assert "| transformers fp32 | dynamic |" in figures.measured()
    assert "The result lacks" not in page.kernels()
    less = copy.deepcopy(page.load("kernels"))
    less["rows"] = [r for r in less["rows"] if not (r["config"]["op"] == "int4_linear" and r["baseline"])]
    monkeypatch.setattr(page, "load", lambda file: less)
    assert "The result lacks the compiled `int4_linear`, which came later." in page.kernels()


def test_results_of_uncommitted_code_are_marked(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page, real = importlib.import_module("measured_page"), figures.load
    for dirty in (True, False, None):
        said = page._how("decode", {**real("decode"), "dirty": dirty})
        assert f"Revision {real('decode')['revision']}" in said and ("not committed" in said) is (dirty is True)
        assert ("was not recorded" in said) is (dirty is None)
    gpu, techniques = importlib.import_module("gpu_page"), importlib.import_module("technique_figures")
    for dirty in (True, False):
        for module in (gpu, techniques):
            monkeypatch.setattr(module, "load", lambda file, dirty=dirty: {**real(file), "dirty": dirty})
        for text in (gpu.gpu_words(), techniques.gpu_attention()):
            assert ("changes that were not committed" in " ".join(text.split())) is dirty
    monkeypatch.setattr(figures, "load", lambda file: {**real(file), "dirty": file == "serve"})
    lines = [line for line in figures.headline_table().splitlines() if "(uncommitted code)" in line]
    assert len(lines) == 2 and all(line.startswith("| HTTP server") for line in lines)


def test_a_result_of_a_run_that_was_ended_is_refused(
    results: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half.json").write_text('{"config": {"unfinished": ["snapkv 25%", "kivi"]}, "rows": []}')
    monkeypatch.setattr(results, "BENCHMARKS", tmp_path)
    with pytest.raises(ValueError, match=r"half\.json was ended before snapkv 25%, kivi"):
        results.load("half")


def test_a_stage_that_a_gpu_run_was_ended_before_is_named(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = importlib.import_module("gpu_page")
    real: Callable[[str], dict[str, Any]] = page.load
    name = page.newest_run("decode")
    for asked, is_said in (([], False), (["bundled"], True)):
        run = copy.deepcopy(real(name))
        run["config"]["stages"] = [stage["name"] for stage in run["stages"]] + asked
        monkeypatch.setattr(page, "load", lambda file, run=run: run if file == name else real(file))
        for text in (page.gpu_tables(), page.gpu_words()):
            assert ("The run was ended before its stage `bundled`." in " ".join(text.split())) is is_said


def test_a_stage_that_no_gpu_run_has_is_named(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = importlib.import_module("gpu_page")
    assert "Neither run has `training` (training steps as CUDA graphs)." in page.gpu_tables()
    real: Callable[[str], dict[str, Any]] = page.load
    run = copy.deepcopy(real(page.RUNS[0]))
    run["stages"].append({**run["stages"][0], "name": "training"})
    monkeypatch.setattr(page, "load", lambda file: run if file == page.RUNS[0] else real(file))
    assert "Neither run" not in page.gpu_tables()


def test_transformers_without_cuda_graphs_is_not_called_compiled_alone(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("gpu_page")
    without = "`compiled` is without CUDA graphs"
    assert "(fp32 compiled without CUDA graphs;" in " ".join(page.gpu_words().split()) and without in page.gpu_tables()
    real: Callable[[str], dict[str, Any]] = page.load
    name = page.newest_run("bundled")
    run = copy.deepcopy(real(name))
    [stage] = [stage for stage in run["stages"] if stage["name"] == "bundled"]
    stage["notes"]["compile mode"] = "reduce-overhead"
    monkeypatch.setattr(page, "load", lambda file: run if file == name else real(file))
    assert "(fp32 compiled;" in " ".join(page.gpu_words().split()) and without not in page.gpu_tables()


def test_int8_weights_of_the_layers_alone_are_called_so(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = importlib.import_module("gpu_page")
    real: Callable[[str], dict[str, Any]] = page.load
    name = page.newest_run("decode")
    for notes, is_said in (({}, True), ({"int8": "weights of the layers and the unembedding"}, False)):
        run = copy.deepcopy(real(name))
        [stage] = [stage for stage in run["stages"] if stage["name"] == "decode"]
        stage["notes"] |= notes
        monkeypatch.setattr(page, "load", lambda file, run=run: run if file == name else real(file))
        for text in (page.gpu_tables(), page.gpu_words()):
            assert bool(re.search(r"the unembedding (stays )?in 16 bits", " ".join(text.split()))) is is_said


def test_each_stage_is_taken_from_the_newest_gpu_run_that_has_it(
    results: ModuleType, techniques: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The newest one here has two stages on another GPU, and no time was left for a third one."""
    page, figures_of = importlib.import_module("gpu_page"), importlib.import_module("technique_figures")
    before, attention = page.gpu_tables(), figures_of.gpu_attention()
    run = copy.deepcopy(results.load("gpu"))
    [engine] = [stage for stage in run["stages"] if stage["name"] == "engine"]
    rate = asdict(Metric("training the target, captured", 1.5e6, "tokens/s", MEASURED, 1.4e6, 1.6e6))
    training = {**engine, "name": "training", "what": "training steps as CUDA graphs", "metrics": [rate]}
    left_out = {**engine, "name": "kernels", "status": SKIPPED, "metrics": []}
    run["stages"], run["config"]["stages"] = [engine, training, left_out], ["engine", "training", "kernels"]
    run["hardware"]["gpu"]["name"] = "Newer GPU"
    for name in page.RUNS:
        shutil.copy(results.BENCHMARKS / f"{name}.json", tmp_path)
    (tmp_path / "gpu_newer.json").write_text(json.dumps(run))
    monkeypatch.setattr(results, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(page, "RUNS", ("gpu_newer", *page.RUNS))
    now, words = page.gpu_tables(), " ".join(page.gpu_words().split())
    old, new = (re.findall(r"^## (.*)$", text, re.MULTILINE) for text in (before, now))
    first, earlier = ["Graphs on = off = plain PyTorch, token for token", "Training steps as CUDA graphs"], old[5]
    assert new == [*first, earlier, *(title for title in old[:-1] if title not in first)]
    assert now.startswith("Newer GPU") and "The run was ended before its stage `kernels`." in " ".join(now.split())
    assert words.startswith("On one NVIDIA H100") and "graphs as without (newer run; Newer GPU)." in words
    assert figures_of.gpu_attention() == attention


def test_each_processor_and_kind_of_weights_has_a_line(figures: ModuleType) -> None:
    result = figures.load("processors")
    lines = figures.processors_table().splitlines()
    ratios = [row for row in result["rows"] if row["baseline"]]
    assert sum("×" in line for line in lines) == len(ratios) > 0
    assert sum("refused: " in line for line in lines) == len(result["config"]["left_out"])
    row = ratios[0]
    [line] = (line for line in lines if line.startswith(f"| {row['config']['processor']} | {row['system']} |"))
    assert f"| {row['ratio']:.2f}× |" in line and f"| {row['tokens_per_s']:,.0f} |" in line


def test_the_speed_of_a_drafting_method_is_the_mean_over_its_own_lines(figures: ModuleType) -> None:
    ratios = [
        row["ratio"]
        for row in figures.load("speculation")["rows"]
        if (row["system"], row["config"]["weights"], row["config"]["batch"]) == ("ngram, adaptive", "int8", 4)
    ]
    table = figures.measured().split("| int8 | 1 request |")[1].split("\n\n")[0]
    [line] = [line for line in table.splitlines() if line.startswith("| ngram |")]
    cell = line.split(" | ")[4]
    assert cell == f"{sum(ratios) / len(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})" and len(ratios) == 7


def test_plain_decoding_that_was_measured_twice_tells_the_noise_and_is_no_method(
    results: ModuleType, figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("speculation_page")
    measured = copy.deepcopy(results.load("speculation"))
    line = next(row for row in measured["rows"] if row["system"] == "ngram")
    measured["rows"] = [row for row in measured["rows"] if row["system"] != "plain, again"]
    measured["rows"] += [
        line | {"system": "plain, again", "ratio": ratio, "interval": [ratio - 0.02, ratio + 0.02]}
        for ratio in (0.5, 0.96, 0.98, 9.0)
    ]
    replace_result(monkeypatch, page, "speculation", measured)
    text = page.speculation(lambda file, result: "")
    assert "is below 0.97× in 2 of 4 lines, 1 of them with their whole interval, its slowest one at 0.50×." in text
    assert "plain, again" not in text and "9.00" not in text


def test_drafts_of_random_weights_are_accepted_at_about_the_rates_of_the_bundled_pair(results: ModuleType) -> None:
    page = importlib.import_module("speculation_page")
    rows, _ = page._lines(results.load("speculation"))
    measured = [float(share.strip("%")) for share in page._accepted(rows, "draft_model").split(", ")]
    given = [100 * FIRST_ACCEPTED, *[100 * NEXT_ACCEPTED] * 3]
    assert measured == pytest.approx(given, abs=3)


def test_lines_without_a_modelled_value_are_counted(results: ModuleType, figures: ModuleType) -> None:
    page = importlib.import_module("speculation_page")
    rows, _ = page._lines(copy.deepcopy(results.load("speculation")))
    rows = [row for row in rows if "predicted" in row["config"]]
    assert f"in {len(rows)} lines, and" in re.sub(r"\d+ of ", "", page._prediction(rows))
    for count, words in ((1, "1 line"), (2, "2 lines")):
        del rows[-count]["config"]["predicted"]
        assert f"of {len(rows) - count} lines ({words} without a modelled value), and" in page._prediction(rows)


def test_what_resting_costs_is_the_mean_of_the_lines_with_few_drafts(figures: ModuleType) -> None:
    page = importlib.import_module("speculation_page")
    lines = [("ngram, adaptive", 0.96, 0.01), ("ngram, adaptive", 1.0, 0.029), ("heads, adaptive", 0.92, 0.0)]
    lines += [("heads, adaptive", 5.0, 0.03), ("ngram", 0.1, 0.0)]
    rows = [{"system": name, "ratio": ratio, "config": {"rounds_with_drafts": s}} for name, ratio, s in lines]
    said = page._resting(rows)
    assert said.startswith("In 3 adaptive lines less than 3% of the steps have drafts")
    assert "these lines run at 0.96×; heads has the lowest mean of a method, 0.92×." in said
    assert page._resting(rows[3:]) == "", "no adaptive line rests"


def test_a_drafting_method_that_changes_tokens_is_named(
    results: ModuleType, figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("speculation_page")
    assert "All methods gave the tokens of plain decoding." in figures.measured()
    changed = copy.deepcopy(results.load("speculation"))
    next(row for row in changed["rows"] if row["system"] == "heads, adaptive")["outputs_equal"] = False
    replace_result(monkeypatch, page, "speculation", changed)
    text = page.speculation(lambda file, result: "")
    assert "some tokens differ from plain decoding: heads (fp32)." in text


def test_a_verdict_on_an_idea_that_no_longer_holds_is_not_written(
    results: ModuleType, figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("ablations_page")
    changed = copy.deepcopy(results.load("ablations"))
    for row in changed["rows"]:
        if row["variant"] == "no sink":
            row["tokens_per_round"]["greedy"] -= 1
    assert "neither the sink" in page.ablations(lambda file, result: "")
    monkeypatch.setattr(page, "load", lambda file: changed)
    with pytest.raises(ValueError, match="says about self_sparse does not fit"):
        page.ablations(lambda file, result: "")
    changed["rows"][0]["method"] = "another"
    with pytest.raises(ValueError, match="says nothing about another"):
        page.ablations(lambda file, result: "")


def test_what_a_gpu_missed_is_named_in_words_and_large_figures_have_no_exponent(figures: ModuleType) -> None:
    page = importlib.import_module("gpu_page")
    missed = [metric["name"] for run in page.RUNS for _, metric in page._missed(run)]
    assert all(name.removesuffix(page.BY_TIMES) in page.WORDS for name in missed)
    shown = [page._digits(value, 3) for value in (0.75, 12.34, 99.96, 999.9, 36176.2)]
    assert shown == ["0.75", "12.3", "100", "1,000", "36,176"]


@pytest.mark.parametrize(("half_ms", "told"), [(6.6, [None, "≥ 1.6"]), (7.2, ["≥ 1.6", None])])
def test_a_target_of_a_gain_on_a_gpu_counts_for_the_weaker_baseline(
    figures: ModuleType, half_ms: float, told: list[str | None]
) -> None:
    """A run may tell only the gain over the baseline that was timed in turn."""
    page = importlib.import_module("gpu_page")
    times = [Metric(name, ms, "ms", MEASURED) for name, ms in (("half decode", half_ms), ("int8 decode", 4.4))]
    gain = Metric("int8 over half", 1.61, "times", MEASURED, 1.6, 1.62, "≥ 1.6", True)
    found = list(page._with_quotients([asdict(metric) for metric in (*times, gain)]))
    assert [metric["name"] for metric in found[2:]] == ["int8 over half", "int8 over half, by the two times"]
    assert found[3]["value"] == half_ms / 4.4 and found[3]["low"] is None
    assert [metric["target"] for metric in found[2:]] == told
    assert [metric["met"] for metric in found[2:]] == [None if target is None else half_ms > 7 for target in told]
    assert list(page._with_quotients(found)) == found, "a newer run has both"


def test_a_default_that_is_faster_than_the_best_tiles_tells_the_noise(figures: ModuleType) -> None:
    page = importlib.import_module("gpu_page")
    times = {"int8 few, best": 1.0, "int8 few, default": 0.95, "int4 few, best": 1.02, "int4 few, default": 1.0}
    metrics = [{"name": name, "value": value} for name, value in times.items()]
    assert "one below 5% may be noise" in " ".join(page._noise_of_tiles({"metrics": metrics}).split())
    assert page._noise_of_tiles({"metrics": [{"name": "int8 few, best", "value": 0.9}, *metrics[1:2]]}) == ""
    assert page._noise_of_tiles({"metrics": metrics[:1]}) == ""


def test_recall_is_told_apart_by_distance(techniques: ModuleType) -> None:
    """A window of half of the tokens has what is near, and not what is far."""
    assert techniques.recalled_from("window", 0.5, 0) > techniques.recalled_from("window", 0.5, -1)


def test_a_result_of_other_weights_is_marked(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def marked() -> bool:
        return any("(earlier weights)" in line for line in figures.headline_table().splitlines() if "decoding" in line)

    monkeypatch.setattr(figures, "is_of_bundled_weights", lambda file: True)
    assert not marked()
    monkeypatch.setattr(figures, "is_of_bundled_weights", lambda file: file != "decode")
    assert marked() and "earlier version of the model's weights" in " ".join(figures.headline_words().split())


def test_which_weights_a_result_is_of(results: ModuleType) -> None:
    """Recorded ones are compared; without a record only a result of random weights is of the bundled ones."""
    bundled = results.weights_of(["minicoder"])
    assert results.is_of_bundled_weights("any", {"weights": bundled})
    assert not results.is_of_bundled_weights("any", {"weights": {"minicoder": "0"}})
    assert results.is_of_bundled_weights("any", {"config": {"model": "0.4b"}})
    assert not results.is_of_bundled_weights("any", {"config": {"model": "minicoder"}})


def test_a_sentence_of_the_readme_that_no_longer_holds_is_not_written(
    figures: ModuleType, results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model gains more with 8-bit weights than without."""
    changed = copy.deepcopy(results.load("decode"))
    for row in changed["rows"]:
        if row["system"] == "minillm int8 + draft":
            row["ratio"] = 2.0
    replace_result(monkeypatch, results, "decode", changed)
    with pytest.raises(ValueError, match="less is gained with 8 bits"):
        figures.headline_words()


def test_the_page_of_techniques_is_written_from_results_cards_and_lessons(techniques: ModuleType) -> None:
    assert techniques.PAGE.read_text(encoding="utf-8") == techniques.page(), "run `python docs/techniques.py`"


def test_no_technique_lacks_a_command_a_figure_or_a_verdict(techniques: ModuleType) -> None:
    assert all(row.command and row.figure() and row.verdict for row in techniques.ROWS)
    assert len({row.name for row in techniques.ROWS}) == len(techniques.ROWS) >= 30


def test_a_verdict_that_no_longer_holds_is_not_written(techniques: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(techniques, "kl", lambda technique, budget: 1.0)
    with pytest.raises(ValueError, match="verdict on ThinK is no longer true"):
        techniques.page()


def test_a_drafting_method_loses_only_where_its_whole_interval_does(
    techniques: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = techniques.drafting

    def drafting(method: str, batch: int = 1) -> list[dict[str, Any]]:
        low, high = (0.9, 1.01) if batch == 4 else (1.01, 1.2)
        return [row | {"ratio": (low + high) / 2, "interval": [low, high]} for row in real(method, batch)]

    monkeypatch.setattr(techniques, "drafting", drafting)
    with pytest.raises(ValueError, match=r"verdict on Prompt lookup \(n-grams\) is no longer true"):
        techniques.page()


def test_a_verdict_on_a_lesson_depends_on_what_it_printed(
    techniques: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures_of = importlib.import_module("technique_figures")
    real = figures_of.printed
    less = partial(re.sub, r"(SqueezeLLM, engine .* KL +)\d+", r"\g<1>1")
    monkeypatch.setattr(figures_of, "printed", lambda number: less(real(number)))
    with pytest.raises(ValueError, match="verdict on SqueezeLLM is no longer true"):
        techniques.page()


def test_a_line_that_a_lesson_does_not_print_is_not_made_up(techniques: ModuleType) -> None:
    with pytest.raises(ValueError, match="lesson 02 prints nothing like"):
        techniques.lesson("02", "no such line", "{0}")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stages: stages["engine"].update(metrics=[]),
        lambda stages: stages["check"].update(status="stopped at its limit"),
        lambda stages: stages["check"]["metrics"][0].update(met=False),
    ],
)
def test_the_readme_does_not_praise_a_gpu_run_that_did_not_end(
    results: ModuleType, spoil: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("gpu_page")
    page.gpu_words()
    found = {name: copy.deepcopy(page.newest_stage(name)) for name in ("check", "engine")}
    spoil(found)
    real: Callable[[str], dict[str, Any]] = page.newest_stage
    monkeypatch.setattr(page, "newest_stage", lambda name: found[name] if name in found else real(name))
    with pytest.raises(ValueError, match="all kernels are correct"):
        page.gpu_words()


def test_kinds_of_text_that_were_left_out_are_named(
    results: ModuleType, figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("speculation_page")
    less = copy.deepcopy(results.load("speculation"))
    absent = {("edits", "int8", 4), ("long files", "int8", 4)}
    less["rows"] = [
        row
        for row in less["rows"]
        if row["config"]["batch"] != 16
        and (row["config"]["slice"], row["config"]["weights"], row["config"]["batch"]) not in absent
    ]
    replace_result(monkeypatch, page, "speculation", less)
    text = page.speculation(lambda file, result: "")
    names = "functions, docstrings, tests, imports, new code"
    assert f"The columns for 4 requests (int8) are means over {names} alone." in text
