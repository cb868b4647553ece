"""The GPU benchmark runs without a GPU: all stages in rehearsal, and what they rest on one by one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from gc import collect
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from minillm import cli
from minillm.bench import device_clock, gpu, kernel_timing, kernels
from minillm.bench.device_clock import CpuClock, CudaClock, Timing
from minillm.bench.kernel_cases import REFERENCE, Case, Implementation
from minillm.bench.on_gpu import random_models as gpu_models
from minillm.bench.on_gpu import stage_check as gpu_check
from minillm.bench.on_gpu import stage_decode, stage_kernels
from minillm.bench.on_gpu import stage_runner as gpu_stages
from minillm.bench.on_gpu.findings import Findings, Report, Target
from minillm.bench.on_gpu.stage_runner import STAGES, Stage, StageProcesses, run_stage
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.bench.on_gpu.stage_speculation import SyntheticJudge, tokens_per_round
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.quantize import quantize_model
from minillm.ops.dispatch import OPS, has_triton, op
from minillm.quantization.int8 import Int8
from minillm.runtime.runner import ModelRunner
from minillm.speculative.drafter import Draft
from minillm.speculative.rejection_sampler import Verdict

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not there to rehearse with")
SETUP = StageSetup.here(is_rehearsal=True)
PROMISED = {
    "decode: half decode, MBU": "≥ 0.8",
    "decode: int8 over half": "≥ 1.6",
    "decode: half verify 5 / decode 1": "≤ 1.15",
    "kernels: decode after 100, half KV, bandwidth": "≥ 0.85",
    "kernels: int8 KV over half": "≥ 1.7",
    "speculation: mechanical efficiency": "≥ 0.9",
}
"""What takes a GPU to be told."""


# ---- the whole of it


@pytest.mark.long
@needs_triton
def test_a_rehearsal_runs_every_stage_and_tells_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert cli.main(["bench", "gpu", "--rehearse", "--json", str(file)]) == 0
    outcome = json.loads(file.read_text())
    endings = {stage["name"]: (stage["status"], stage["error"]) for stage in outcome["stages"]}
    assert endings == {stage.name: ("done", None) for stage in STAGES}
    figures = [figure for stage in outcome["stages"] for figure in stage["metrics"]]
    assert all((figure["value"] is None) == (figure["kind"] != "counted") for figure in figures)
    assert all(figure["rehearsed"] and figure["low"] is None for figure in figures if figure["kind"] != "counted")
    assert not any(stage["rows"] for stage in outcome["stages"])
    told = {f"{s['name']}: {f['name']}": f["met"] for s in outcome["stages"] for f in s["metrics"] if f["target"]}
    targets = {f"{s['name']}: {f['name']}": f["target"] for s in outcome["stages"] for f in s["metrics"] if f["target"]}
    assert {name: targets[name] for name in PROMISED} == PROMISED
    assert {name for name, met in told.items() if met is None} == set(PROMISED)
    assert {name for name, met in told.items() if met is False} == set()
    on_off = [name for name in told if name.endswith("graphs on = off")]
    assert len(on_off) == 8 and f"check: {next(iter(OPS))}, worst error" in told
    notes = {key: value for stage in outcome["stages"] for key, value in stage["notes"].items()}
    assert not [key for key in notes if "fail" in key or "wrong" in key], notes
    printed = capsys.readouterr().out
    assert "a rehearsal" in printed and "NOT" not in printed


def test_without_a_gpu_it_says_how_to_rehearse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    with pytest.raises(UnsupportedError, match="--rehearse runs the stages on a CPU"):
        gpu.run()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match="unset it"):
        gpu.run()
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    with pytest.raises(UnsupportedError, match="Triton is not installed"):
        gpu.run(rehearse=True)
    with pytest.raises(ConfigError, match=r"no stage 'decoding'; there are: environment, check"):
        gpu.run(stages=["decoding"])


def test_stages_share_the_time_and_each_is_saved_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, seen = SimpleNamespace(now=0.0), []
    file = tmp_path / "out.json"

    def fake(stage: Stage, rehearse: bool, seconds: float, lines: Path, processes: StageProcesses) -> dict[str, Any]:
        saved = json.loads(file.read_text())["stages"] if file.exists() else []
        seen.append((stage.name, seconds, len(saved)))
        assert [path.name for path in tmp_path.iterdir()] == ["out.json"] * bool(saved)
        assert lines == tmp_path / f"out.json.{stage.name}.jsonl"
        lines.write_text("{}")
        clock.now += 100
        return {"name": stage.name, "status": "done", "metrics": [], "notes": {}, "rows": [], "seconds": 100.0}

    monkeypatch.setattr(gpu, "_check_machine", lambda rehearse: None)
    monkeypatch.setattr(gpu, "run_stage", fake)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock.now)
    outcome = gpu.run(save_to=file)
    assert [name for name, *_ in seen] == [stage.name for stage in STAGES]
    left = [470.0 - 100 * i for i in range(len(STAGES))]
    assert [s for _, s, _ in seen] == [min(one.budget_s, s) for one, s in zip(STAGES, left, strict=True)]
    assert [count for *_, count in seen][-1] == len(STAGES) - 1
    assert outcome["config"]["seconds"] == 100.0 * len(STAGES)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert gpu_stages.TOTAL_S < 480


# ---- stages in processes of their own


def tells(setup: StageSetup, report: Report) -> None:
    """A stage that a worker runs."""
    report.note("interpret", os.environ.get("TRITON_INTERPRET"))
    report.note("rehearsal", setup.is_rehearsal)


WRITES = 'import json, os, sys, time; line = lambda **c: open(sys.argv[1], "a").write(json.dumps(c) + "\\n")'
CRASHES = WRITES + '; line(name="before", value=1.0); os.kill(os.getpid(), 6)'
RAISES = WRITES + '; line(note="how far", value="here"); raise RuntimeError("no more memory")'
HANGS = WRITES + '; line(note="child", value=os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")); time.sleep(60)'


def ends_like(monkeypatch: pytest.MonkeyPatch, code: str, seconds: float = 60) -> dict[str, Any]:
    """What is kept of a stage that runs this code."""
    monkeypatch.setattr(gpu_stages, "LEAST_S", 0.0)
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(gpu_stages, "command", lambda stage, lines, deadline, rehearse: [*command, str(lines)])
    return run_stage(STAGES[0], True, seconds)


def has_ended(process: int) -> bool:
    """Whether a process ends within five seconds."""
    state = Path(f"/proc/{process}/stat")
    for _ in range(50):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_what_a_stage_found_outlives_its_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends_like(monkeypatch, CRASHES)
    assert (found["status"], [figure["value"] for figure in found["metrics"]]) == ("failed", [1.0])
    assert "exited with code -6" in found["error"]
    found = ends_like(monkeypatch, RAISES)
    assert found["status"] == "failed" and "no more memory" in found["error"] and found["notes"] == {"how far": "here"}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
def test_a_stage_that_hangs_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends_like(monkeypatch, HANGS, seconds=4)
    assert found["status"] == "out of time" and "its time limit" in found["error"]
    assert has_ended(found["notes"]["child"])


RUN = """
import signal, sys
from pathlib import Path
from minillm.bench import gpu
from minillm.bench.on_gpu import stage_runner
stage_runner.command = lambda stage, lines, deadline, rehearse: [sys.executable, "-c", sys.argv[2], str(lines)]
gpu._check_machine = lambda rehearse: None
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
gpu.run(["check", "engine", "decode"], rehearse=sys.argv[3] == "rehearse", save_to=Path(sys.argv[1]))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("measure", signal.SIGTERM, 128 + signal.SIGTERM),
        ("rehearse", signal.SIGTERM, 128 + signal.SIGTERM),
        ("rehearse", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_signal_ends_the_stages_too_and_leaves_what_they_have_found(
    tmp_path: Path, how: str, number: int, code: int
) -> None:
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "gpu.json"), HANGS, how])
    lines = tmp_path / "gpu.json.check.jsonl"
    try:
        for _ in range(600):
            if (child := Findings.read(lines).notes.get("child")) is not None:
                break
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(30) == code
    finally:
        process.kill()
    assert has_ended(child)
    assert Findings.read(lines).notes == {"child": child}
    assert not (tmp_path / "gpu.json.decode.jsonl").exists(), "no further stage is started"


def test_a_stage_that_starts_when_all_are_ended_is_ended_too() -> None:
    early, late = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in "ab")
    processes = StageProcesses()
    processes.add(early)
    processes.end()
    processes.add(late)
    assert early.wait(1) == late.wait(1) == -signal.SIGKILL


def faults(setup: StageSetup, report: Report) -> None:
    """A stage whose second part breaks the device of the process for good."""
    broken = []

    def part(number: int) -> None:
        if number == 1 or broken:
            broken.append(number)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        report.note(f"part {number}", os.getpid())

    for number in range(4):
        report.part(f"part {number}", part, number)


def test_after_a_cuda_error_the_other_parts_get_a_new_process() -> None:
    found = run_stage(Stage("faults", f"{__name__}:faults", 60, "a double"), True, 60)
    assert (found["status"], found["restarts"]) == ("done", 1)
    assert found["notes"].keys() == {"part 0", "part 1 failed", "part 2", "part 3"}
    assert len({found["notes"][f"part {number}"] for number in (0, 2, 3)}) == 1


@pytest.mark.parametrize(("note", "restarts"), [("", 0), ("the same", 1)])
def test_a_stage_is_started_again_only_after_it_has_found_a_new_failure(
    monkeypatch: pytest.MonkeyPatch, note: str, restarts: int
) -> None:
    found = ends_like(monkeypatch, f"{WRITES}; {note!r} and line(note={note!r}, value=1); os._exit(75)")
    assert (found["status"], found["restarts"]) == ("failed", restarts)
    assert "exited with code 75" in found["error"]


def test_a_stage_knows_its_deadline(tmp_path: Path) -> None:
    stage = Stage("deadline", f"{__name__}:tells_deadline", 60, "a double")
    found = run_stage(stage, True, 60, tmp_path / "lines")
    assert 30 < found["notes"]["left"] < 60
    assert Findings.read(tmp_path / "lines").notes == found["notes"]


def tells_deadline(setup: StageSetup, report: Report) -> None:
    """A stage that a worker runs."""
    report.note("left", setup.seconds_left())


def test_only_a_rehearsal_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu_stages.environment(False).get("TRITON_INTERPRET") is None
    found = run_stage(Stage("tells", f"{__name__}:tells", 60, "a double"), True, 60)
    assert (found["status"], found["notes"]) == ("done", {"interpret": "1", "rehearsal": True})


def test_a_stage_without_time_is_not_begun() -> None:
    found = run_stage(STAGES[0], True, 3.0)
    assert (found["status"], found["metrics"]) == ("left out", [])
    assert found["error"] == f"no time was left; --stages {STAGES[0].name} runs it alone"


# ---- figures


def test_a_figure_is_a_median_beside_its_target(tmp_path: Path) -> None:
    report = Report(tmp_path / "lines", is_rehearsal=False)
    report.measured("gain", [1.5, 1.9, 1.7], "times", Target(at_least=1.6), "2, the ratio of bytes", batch=1)
    report.measured("cost", 1.2, "times", Target(at_most=1.15))
    report.modelled("promise", 2.0, "times", [1.9, 2.2])
    [gain, cost, promise] = Findings.read(report.path).metrics
    assert (gain["value"], gain["low"], gain["high"], gain["target"], gain["met"]) == (1.7, 1.5, 1.9, "≥ 1.6", True)
    assert gain["bound"] == "2, the ratio of bytes" and gain["config"] == {"batch": 1}
    assert (cost["target"], cost["met"]) == ("≤ 1.15", False)
    assert (promise["kind"], promise["met"]) == ("modelled", None)
    assert (promise["value"], promise["low"], promise["high"]) == (2.0, 1.9, 2.2)
    assert not Target(at_least=1).is_met(float("nan")) and Target(at_most=0).is_met(0)


@pytest.mark.parametrize(("half", "weaker"), [(6.6, 1), (7.2, 0)])
def test_a_target_of_a_gain_counts_for_the_weaker_of_two_baselines(tmp_path: Path, half: float, weaker: int) -> None:
    """Timed in turn with the other, the baseline may be slower than by itself."""
    report = Report(tmp_path / "lines", is_rehearsal=False)
    report.measured("half", half, "ms")
    report.measured("int8", 4.4, "ms")
    report.gain("int8 over half", [1.59, 1.61, 1.62], ("half", "int8"), Target(at_least=1.6), "2, the ratio of bytes")
    gains = Findings.read(report.path).metrics[2:]
    assert [gain["name"] for gain in gains] == ["int8 over half", "int8 over half, by the two times"]
    assert [gain["value"] for gain in gains] == [1.61, pytest.approx(half / 4.4)]
    assert [gain["target"] for gain in gains] == [None, "≥ 1.6"] if weaker else ["≥ 1.6", None]
    assert gains[weaker]["met"] is (weaker == 0)


def test_a_rehearsal_writes_nothing_that_was_measured(tmp_path: Path) -> None:
    report = Report(tmp_path / "lines", is_rehearsal=True)
    report.measured("gain", [1.5, 1.9], "times", Target(at_least=1.6))
    report.modelled("promise", 2.0, "times")
    report.rows([{"p50_ms": 3.0}])
    report.counted("same", 1.0, "of all", Target(at_least=1))
    text = report.path.read_text()
    assert not any(number in text for number in ("1.5", "1.9", "1.7", "2.0", "3.0"))
    assert [figure["met"] for figure in Findings.read(report.path).metrics] == [None, None, True]
    for wrong in ([], [0.0], [-1.0], [float("nan")], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="must be positive and finite"):
            report.measured("gain", wrong, "times")


def test_what_is_written_again_replaces_what_was_there(tmp_path: Path) -> None:
    report = Report(tmp_path / "lines", is_rehearsal=False)
    for value in (1.0, 2.0):
        report.counted("worst", value, "of the limit")
        report.note("model", value)
        report.rows([{"system": "x", "value": value}, {"system": "y"}])
        report.counted(f"after {value}", 0.0, "of 1")
    found = report.so_far()
    assert [(f["name"], f["value"]) for f in found.metrics] == [("worst", 2.0), ("after 1.0", 0.0), ("after 2.0", 0.0)]
    assert found.notes == {"model": 2.0} and found.rows == [{"system": "x", "value": 2.0}, {"system": "y"}]


def test_the_table_shows_what_has_failed() -> None:
    stage = {"name": "decode", "what": "", "seconds": 1.0, "status": "done", "error": None, "metrics": []}
    notes = {"int8 failed": "ValueError:\n  no scales", "model": "8B"}
    outcome = {"config": {"rehearsal": True}, "hardware": {"gpu": None}, "stages": [{**stage, "notes": notes}]}
    cells = [list(column.cells) for column in gpu.table(outcome).columns]
    assert cells[1][1] == "int8 failed" and cells[7][1] == "ValueError: no scales" and len(cells[1]) == 2


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    report = Report(tmp_path / "lines", is_rehearsal=False)
    report.note("a", 1)
    report.rows([{"system": "x"}])
    with report.path.open("a") as file:
        file.write('{"name": "half a fig')
    assert Findings.read(report.path) == Findings([], {"a": 1}, [{"system": "x"}])
    assert Findings.read(tmp_path / "nothing") == Findings([], {}, [])


# ---- the models, and the bytes that are divided by


def test_weight_bytes_are_those_of_the_tensors_a_token_needs() -> None:
    model = gpu_models.random_model(SETUP, "rehearsal")
    every = sum(p.nbytes for p in model.parameters())
    assert gpu_models.weight_bytes(model) == every - model.embed_tokens.weight.nbytes
    tied = gpu_models.random_model(SETUP, "rehearsal draft")
    assert gpu_models.weight_bytes(tied) == sum(p.nbytes for p in tied.parameters())
    linears = sum(linear.weight.numel() for linear in model.layers.modules() if isinstance(linear, torch.nn.Linear))
    assert gpu_models.product_weights(model) == linears
    rounded = quantize_model(gpu_models.random_model(SETUP, "rehearsal"), Int8())
    rows = sum(linear.out_features for linear in model.layers.modules() if isinstance(linear, torch.nn.Linear))
    assert gpu_models.weight_bytes(rounded) == gpu_models.weight_bytes(model) - 3 * linears + 4 * rows


def test_the_int8_model_has_the_unembedding_in_int8_too() -> None:
    """As in the engine."""
    model, rounded = gpu_models.random_model(SETUP, "rehearsal"), stage_decode._int8_model(SETUP, "rehearsal")
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    saved = sum(3 * linear.weight.numel() - 4 * linear.out_features for linear in linears)
    assert gpu_models.weight_bytes(rounded) == gpu_models.weight_bytes(model) - saved


@pytest.mark.parametrize("layout", [PagedKVCache, PagedInt8KVCache])
def test_kv_bytes_are_those_of_the_pools(layout: type) -> None:
    model = gpu_models.random_model(SETUP, "rehearsal")
    cache = layout(model.config, 3, gpu_models.BLOCK_SIZE, torch.float32, torch.device("cpu"))
    gpu_models.fill(cache)
    pools = [cache.keys, cache.values] if layout is PagedKVCache else [*cache.keys, *cache.values]
    assert all(pool.float().isfinite().all() and pool.float().abs().sum() > 0 for pool in pools)
    runner = ModelRunner(model, cache, gpu_models.BLOCK_SIZE)
    assert gpu_models.kv_bytes(runner, 3 * gpu_models.BLOCK_SIZE) == cache.num_bytes


def test_the_shapes_are_those_of_the_checkpoints() -> None:
    """8.03 and 1.24 billion parameters, as their cards say."""
    for name, billions in ((gpu_models.LARGE, 8.03), (gpu_models.SMALL, 1.236)):
        c = gpu_models.CONFIGS[name]
        layer = c.hidden_size * (2 * c.q_size + 2 * c.kv_size + 3 * c.intermediate_size + 2)
        tables = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        assert (c.num_layers * layer + tables + c.hidden_size) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_requests_of_a_step_share_no_block() -> None:
    items = gpu_models.segments(3, 5, past=20, length=40, vocab=7)
    blocks = [block for item in items for block in item.block_table]
    assert len(set(blocks)) == len(blocks) == 9
    assert all(max(item.token_ids) < 7 and item.num_logits == 5 for item in items)
    assert gpu_models.segments(1, 30, 0, 30, 7)[0].num_logits == 1


# ---- the check


@needs_triton
def test_the_check_finds_a_kernel_that_is_wrong_and_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The references stand in for the kernels; five of them are changed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def planted(name: str, device: Any, implementation: str | None = None) -> Any:
        function = op(name, device, "reference")
        if implementation != "triton":
            return function
        if name == "rope":
            return lambda *arguments: function(*arguments) * (1 + 3e-5)
        if name == "advance":  # a request that only fills up does not stay empty
            return lambda lengths, *rest: (function(lengths, *rest)[0], lengths + 1)
        if name == "argmax":
            return lambda logits: 1 / 0
        if name == "store_kv":
            return lambda k, v, *rest: function(v, k, *rest)
        if name == "paged_attention":
            return lambda q, k, v, batch, window: function(q, k, v, batch, window) + torch.nan
        return function

    monkeypatch.setattr(gpu_check, "op", planted)
    monkeypatch.setattr(gpu_check, "implementations", lambda name, device: ["triton", "reference"])
    report = Report(tmp_path / "lines", is_rehearsal=True)
    gpu_check.check(SETUP, report)
    found = Findings.read(report.path)
    [verdict] = [f for f in found.metrics if f["name"] == "ops whose kernel is wrong or fails"]
    assert verdict["config"]["names"] == ["paged_attention", "store_kv", "rope", "argmax", "advance"]
    assert verdict["met"] is False and "ZeroDivisionError" in found.notes["argmax failed"]
    met = {f["name"].removesuffix(", worst error"): f["met"] for f in found.metrics if "worst" in f["name"]}
    assert met["rms_norm"] is met["int4_linear"] is met["tree_attention"] is met["rejection"] is True


def test_a_device_that_runs_no_kernel_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "implementations", lambda name, device: ["reference"])
    with pytest.raises(UnsupportedError, match="no kernel runs on cpu"):
        gpu_check.check(SETUP, Report(tmp_path / "lines", is_rehearsal=True))


@pytest.mark.parametrize(("capability", "num_missing"), [((7, 5), 1), ((8, 0), 0), ((9, 0), 0)])
def test_a_gpu_need_not_run_kernels_that_are_for_newer_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], num_missing: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(gpu_check, "implementations", lambda name, device: ["reference"])
    setup, report = StageSetup.here(is_rehearsal=False), Report(tmp_path / "lines", is_rehearsal=False)
    with pytest.raises(UnsupportedError, match="no kernel runs on cuda"):  # as without Triton
        gpu_check.check(setup, report)
    [metric] = Findings.read(report.path).metrics
    assert (metric["value"], metric["target"]) == (0, f"≥ {len(OPS) - num_missing}")


# ---- speculation


def test_tokens_per_round_sums_up_all_outcomes() -> None:
    for acceptance, drafts in itertools.product((0.0, 0.5, 0.8), (1, 3)):
        outcomes = [(acceptance**n * (1 - acceptance), n + 1) for n in range(drafts)]
        outcomes.append((acceptance**drafts, drafts + 1))
        assert sum(p for p, _ in outcomes) == pytest.approx(1)
        assert tokens_per_round(acceptance, drafts) == pytest.approx(sum(p * n for p, n in outcomes))


def test_the_synthetic_judge_accepts_as_often_as_it_is_told() -> None:
    """20 000 rounds, whose number of tokens has a standard deviation of 1.61: with a probability below 1e-6 the mean is
    off by more than five standard errors."""
    inner = SimpleNamespace(judge=lambda *arguments: [Verdict([9], 0)])
    judge, drafts = SyntheticJudge(inner, 0.8), [Draft([1, 2, 3, 4])]
    lengths = []
    for _ in range(20_000):
        [verdict] = judge.judge([], drafts, torch.empty(0), torch.empty(0))
        assert verdict.token_ids == [*[1, 2, 3, 4][: verdict.num_accepted], 9]
        lengths.append(len(verdict.token_ids))
    assert abs(sum(lengths) / 20_000 - tokens_per_round(0.8, 4)) < 5 * 1.61 / 20_000**0.5
    assert set(lengths) == {1, 2, 3, 4, 5}


# ---- the seam to CUDA


class FakeCuda:
    """The few things of `torch.cuda` that the clock uses, telling what it was asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.capturing = False

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=None)
        event.record = lambda: (self.log.append("event"), setattr(event, "at", self.now))
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def Stream(self, device: Any) -> Any:  # noqa: N802
        return SimpleNamespace(wait_stream=lambda other: self.log.append("wait"))

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("wait"), name="as before")

    def set_stream(self, which: Any) -> None:
        self.log.append(which.name)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def stream(self, which: Any) -> Any:
        return _Logged(self, "side")

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def graph_pool_handle(self) -> None:
        pass

    def graph(self, which: Any, **options: Any) -> Any:
        return _Logged(self, "capture")


class _Logged:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def __enter__(self) -> None:
        self.cuda.log.append(f"{self.name} begins")
        self.cuda.capturing = self.name == "capture"

    def __exit__(self, *problem: object) -> None:
        self.cuda.log.append(f"{self.name} ends")
        self.cuda.capturing = False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(device_clock.torch, "cuda", fake)
    return fake


def test_time_on_a_gpu_is_between_two_events_that_are_waited_for(cuda: FakeCuda) -> None:
    def run() -> None:
        cuda.log.append("run")
        cuda.now += 250.0  # milliseconds

    assert CudaClock().seconds(run) == 0.25
    assert cuda.log == ["synchronize", "event", "run", "event", "synchronize"]


def test_a_graph_is_recorded_after_it_was_warmed_up_on_the_side(cuda: FakeCuda) -> None:
    replay = CudaClock().recorded(lambda: cuda.log.append("run"))
    warm = ["wait", "side begins", "run", "run", "side ends", "wait"]
    assert cuda.log == [*warm, "capture begins", "run", "capture ends", "as before"]
    replay()
    assert cuda.log[-1] == "replay"


def test_a_graph_keeps_the_tensors_that_it_reads(cuda: FakeCuda) -> None:
    """Kernels of several cases are timed in turn after their cases are gone; on an H100 their pools were gone too."""

    class Pool:
        pass

    pool = Pool()
    reads, freed = (lambda pool=pool: None), ref(pool)
    replay = CudaClock().recorded(reads)
    del pool, reads
    collect()
    assert freed() is not None
    replay()
    del replay
    collect()
    assert freed() is None


def test_a_recording_that_fails_leaves_the_stream_as_it_was(cuda: FakeCuda) -> None:
    """PyTorch does not restore it if the end of the capture raises."""

    def waits() -> None:
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaClock().recorded(waits)
    assert cuda.log[-1] == "as before"


class GraphClock(CpuClock):
    """A device with graphs, whose replay does what was recorded."""

    device = "cuda"

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.recordings = refuses, 0

    def recorded(self, run: Any) -> Any:
        self.recordings += 1
        if self.recordings == 1 and self.refuses:
            raise RuntimeError(self.refuses)
        return run


@pytest.mark.parametrize("refuses", ["", "operation not permitted when stream is capturing"])
def test_on_a_gpu_calls_are_recorded_unless_they_cannot_be(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    monkeypatch.setattr(kernels, "RUN_S", 1e-6)
    read: list[int] = []

    def call(copy: int) -> torch.Tensor:
        read.append(copy)
        return torch.ones(2)

    ways = {REFERENCE: Implementation(call)}
    case = Case("linear", "", "tiny", 1, None, 8, None, 1, ways, (torch.ones(2),))
    [row] = kernels.case_rows(case, GraphClock(refuses), [SimpleNamespace(median=1.0)], 3, {REFERENCE})  # type: ignore
    assert row.config["recorded"] is (not refuses)
    if not refuses:
        assert row.config["warm_calls"] % kernel_timing.RECORDED_CALLS == 0
        assert (len(read) - 3) % kernel_timing.RECORDED_CALLS == 0  # two to compare, one to see how long it takes


@pytest.mark.parametrize(("took", "copies", "per_graph"), [(1e-5, 2, 20), (1e-5, 50, 50), (0.2, 2, 2), (0.2, 1, 1)])
def test_a_graph_of_a_slow_call_has_no_more_than_one_for_each_copy(
    monkeypatch: pytest.MonkeyPatch, took: float, copies: int, per_graph: int
) -> None:
    """Products in fp64 are slow on a GPU with few units for them: twenty at a time would use up the time of a stage."""
    clock, read = GraphClock(), []
    monkeypatch.setattr(clock, "seconds", lambda run: run() or took)
    one = Implementation(lambda copy: read.append(copy))
    function = kernel_timing.timed_function("slow", one, copies, kernel_timing.Position(), clock)
    assert function.multiple == per_graph
    read.clear()
    function.run(per_graph)
    assert read == [i % copies for i in range(per_graph)]


def test_gains_of_caches_are_ratios_of_runs_of_the_same_round(tmp_path: Path) -> None:
    """A slow second round hits all of them. Ratios of medians, lowest and highest would not show it."""
    seconds = {"half": [2.0, 30.0, 4.0], "int8": [1.0, 10.0, 4.0], "int4": [4.0, 60.0, 8.0]}
    setup = SimpleNamespace(time=lambda *functions: {name: Timing(1, each) for name, each in seconds.items()})
    report = Report(tmp_path / "lines", is_rehearsal=False)
    for kind, us in (("half", 6.0), ("int8", 4.0), ("int4", 8.0)):
        report.measured(f"decode after 9, {kind} KV", us, "µs")
    stage_kernels._gains(setup, report, [], 9)  # type: ignore[arg-type]
    found = {m["name"]: (m["low"], m["value"], m["high"]) for m in report.so_far().metrics[3:]}
    assert found == {
        "int8 KV over half": (1.0, 2.0, 3.0),
        "int8 KV over half, by the two times": (1.5, 1.5, 1.5),
        "int4 KV over half": (0.5, 0.5, 0.5),
        "int4 KV over half, by the two times": (0.75, 0.75, 0.75),
    }
