"""What fails in a stage of the GPU benchmark, or finds no time, costs the stage nothing else."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minillm
from minillm.bench.device_clock import TimedFunction
from minillm.bench.kernel_cases import TRITON, Maker
from minillm.bench.on_gpu import (
    random_models,
    stage_bundled,
    stage_check,
    stage_decode,
    stage_engine,
    stage_kernels,
    stage_training,
)
from minillm.bench.on_gpu.failures import DeviceFault, error_text
from minillm.bench.on_gpu.findings import Findings, Report
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.cache.base import KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.doctor.machine_limits import MachineLimit
from minillm.models.decoder import Decoder
from minillm.ops.dispatch import OPS, has_triton, op
from minillm.runtime.runner import ModelRunner
from minillm.training.compiling import Compiled

SETUP = StageSetup.here(is_rehearsal=True)
FAULT = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not there to rehearse with")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "lines", is_rehearsal=False)


def names(report: Report) -> list[str]:
    return [metric["name"] for metric in report.so_far().metrics]


def values(report: Report) -> dict[str, Any]:
    return {metric["name"]: metric["value"] for metric in report.so_far().metrics}


def fails(text: str = "no such instruction") -> Callable[..., Any]:
    def failing(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(text)

    return failing


# ---- errors


def test_the_text_of_an_error_keeps_both_ends_and_the_first_cause() -> None:
    source = "\n".join(f"    line {number} of a kernel" for number in range(99))
    text = error_text(RuntimeError(f"at 33:10:\n{source}\nthe sides of a dot must be at least 16"))
    assert text.startswith("RuntimeError: at 33:10:") and text.endswith("must be at least 16") and len(text) < 1000
    assert error_text(ValueError()) == "ValueError"
    try:
        raise RuntimeError("at 3:4:") from ValueError("no such name")
    except RuntimeError as problem:
        assert error_text(problem) == "RuntimeError: at 3:4:; its cause is ValueError: no such name"


def test_a_part_that_fails_leaves_a_note_and_is_not_run_again(report: Report) -> None:
    assert report.part("good", lambda x: x + 1, 2) == 3
    assert report.part("bad", fails()) is None
    assert report.so_far().notes == {"bad failed": "RuntimeError: no such instruction"}
    assert report.part("bad", lambda: 1) is None


@pytest.mark.parametrize(
    "text", [FAULT, "Triton Error [CUDA]: an illegal instruction was encountered", "CUDA driver error: unknown error"]
)
def test_a_cuda_error_ends_the_stage_also_behind_another_error(report: Report, text: str) -> None:
    def wrapped() -> None:
        try:
            raise RuntimeError(text)
        except RuntimeError:
            raise ValueError("a step failed") from None

    with pytest.raises(DeviceFault, match="outer ended with a CUDA error"):
        report.part("outer", wrapped)
    with pytest.raises(DeviceFault, match="inner"):
        report.part("around", report.part, "inner", fails(text))
    assert report.so_far().notes.keys() == {"outer failed", "inner failed"}
    report.part("memory", fails("CUDA out of memory. Tried to allocate 2.00 GiB"))
    for refused in ("operation not permitted when stream is capturing", "operation failed … during capture"):
        report.part("capture", fails(f"steps ran without CUDA graphs: CUDA error: {refused}\nSee the CUDA manual."))


# ---- the check


def stand_in(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Callable[..., Any]]) -> None:
    """Let the references stand in for all kernels but these."""

    def chosen(name: str, device: Any, implementation: str | None = None) -> Any:
        own = kernels.get(name) if implementation == "triton" else None
        return own or op(name, device, "reference")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(stage_check, "op", chosen)
    monkeypatch.setattr(stage_check, "implementations", lambda name, device: ["triton", "reference"])


@needs_triton
def test_after_a_cuda_error_the_check_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    run: list[tuple[str, int]] = []
    example = stage_check._example

    def counted(setup: StageSetup, name: str, number: int) -> Any:
        run.append((name, number))
        return example(setup, name, number)

    monkeypatch.setattr(stage_check, "_example", counted)
    stand_in(monkeypatch, {"rope": fails(FAULT), "argmax": fails()})
    with pytest.raises(DeviceFault):
        stage_check.check(SETUP, report)
    [wrong] = [m for m in report.so_far().metrics if m["name"] == "ops whose kernel is wrong or fails"]
    assert wrong["config"]["names"] == ["rope"]
    stage_check.check(SETUP, report)
    [wrong] = [m for m in report.so_far().metrics if m["name"] == "ops whose kernel is wrong or fails"]
    assert wrong["config"]["names"] == ["rope", "argmax"] and wrong["met"] is False
    failing = ("rope", "argmax")
    assert sorted(run) == sorted((name, n) for name in OPS for n in range(1 if name in failing else 3))
    assert values(report)["rope, worst error"] == stage_check.INFINITE


def test_every_op_is_checked_before_any_is_checked_again(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    run: list[tuple[str, int]] = []

    def ends_at_the_second(setup: StageSetup, name: str, number: int) -> tuple[float, float]:
        run.append((name, number))
        if number:
            raise KeyboardInterrupt  # as the time limit, which nothing catches
        return (2.0 if name == "sample" else 0.5), 1.0

    stand_in(monkeypatch, {})
    monkeypatch.setattr(stage_check, "_example", ends_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        stage_check.check(SETUP, report)
    assert [name for name, number in run if number == 0] == list(OPS)
    [wrong] = [m for m in report.so_far().metrics if m["name"] == "ops whose kernel is wrong or fails"]
    assert wrong["config"]["names"] == ["sample"]


def test_the_time_for_the_check_is_shared_among_the_ops(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    clock, run = SimpleNamespace(now=0.0), dict.fromkeys(OPS, 0)

    def takes_a_second(setup: StageSetup, name: str, number: int) -> tuple[float, float]:
        clock.now += 1.0
        run[name] += 1
        return 0.0, 1.0

    stand_in(monkeypatch, {})
    monkeypatch.setattr(stage_check, "_example", takes_a_second)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(StageSetup, "half", torch.bfloat16)
    stage_check.check(StageSetup(False, SETUP.clock, deadline=212 + stage_check.LAST_EXAMPLE_S), report)
    shares = {name: stage_check.SHARES.get(name, stage_check.OTHER_SHARE) for name in OPS}
    assert sum(shares.values()) == 106
    assert run == {name: 2 * share for name, share in shares.items()}
    late = StageSetup(False, SETUP.clock, deadline=clock.now)
    run.update(dict.fromkeys(OPS, 0))
    report.path.unlink()
    stage_check.check(late, report)
    assert run == dict.fromkeys(OPS, 1)


@needs_triton
def test_the_check_finds_a_kernel_that_is_wrong_only_where_it_splits_the_keys(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    def adds_splits(q: Any, keys: Any, values: Any, batch: Any, window: int | None) -> Any:
        from minillm.ops.triton.tiling import Tiling

        chosen = batch.plans.get((Tiling,))
        return op("paged_attention", "cpu", "reference")(q, keys, values, batch, window) + (chosen is not None)

    stand_in(monkeypatch, {"paged_attention": adds_splits})
    stage_check.check(SETUP, report)
    [wrong] = [m for m in report.so_far().metrics if m["name"] == "ops whose kernel is wrong or fails"]
    assert wrong["config"]["names"] == ["paged_attention"]


# ---- the bundled model


def test_transformers_is_compiled_in_both_dtypes_and_the_mode_is_noted(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    """The page tells results with CUDA graphs from earlier ones by the note."""
    names: list[str] = []

    @contextmanager
    def pair(setup: StageSetup) -> Iterator[tuple[str, str]]:
        yield "target", "draft"

    monkeypatch.setattr(stage_bundled, "models", pair)
    monkeypatch.setattr(stage_bundled, "prompt_ids", lambda *sizes: [[5]])
    monkeypatch.setattr(stage_bundled, "_minillm", lambda *arguments: None)
    monkeypatch.setattr(stage_bundled, "_transformers", lambda setup, model, dtype, way: (dtype, way))
    monkeypatch.setattr(stage_bundled, "_measure", lambda setup, report, name, *rest: names.append(name))
    monkeypatch.setattr(StageSetup, "half", torch.bfloat16)
    stage_bundled.bundled(StageSetup(False, SETUP.clock), report)
    assert names[-2:] == ["transformers fp32 compiled", "transformers half compiled"]
    assert report.so_far().notes == {"compile mode": "reduce-overhead"}


# ---- the engine


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-in for the engine: way → tokens, or an error to raise. `runs` lists what was run."""
    answers: dict[str, Any] = {"graphs": [[1, 2]], "kernels": [[1, 2]], "eager": [[1, 2]], "runs": []}

    def generate(setup: Any, sampling: Any, model: str, options: Any, prompts: Any, way: str) -> Any:
        answers["runs"].append((options, sampling, way))
        if isinstance(answers[way], Exception):
            raise answers[way]
        return answers[way]

    @contextmanager
    def pair(setup: StageSetup) -> Iterator[tuple[str, str]]:
        yield "target", "draft"

    monkeypatch.setattr(stage_engine, "_generate", generate)
    monkeypatch.setattr(stage_engine, "models", pair)
    monkeypatch.setattr(stage_engine, "_prompts", lambda setup, model: [[1]])
    return answers


def test_plain_pytorch_that_fails_says_nothing_about_graphs(tokens: dict[str, Any], report: Report) -> None:
    tokens["eager"] = RuntimeError("no such attention")
    stage_engine.engine(SETUP, report)
    assert values(report) == {k.metric: 1.0 for k in stage_engine.KINDS if not k.is_half}
    assert "no such attention" in report.so_far().notes["plain in plain PyTorch failed"]


def test_graphs_that_fail_or_differ_are_told(tokens: dict[str, Any], report: Report) -> None:
    tokens["graphs"] = [[1, 3]]
    stage_engine.engine(SETUP, report)
    found = values(report)
    assert found["plain: graphs on = off"] == found["plain: kernels = PyTorch"] == 0.5
    report.path.unlink()
    tokens["graphs"] = RuntimeError("cannot capture")
    stage_engine.engine(SETUP, report)
    assert values(report) == {k.metric: 0.0 for k in stage_engine.KINDS if not k.is_half}
    assert {k for k in report.so_far().notes if "failed" in k} >= {"plain failed", "int8 KV failed"}


@pytest.mark.parametrize(("way", "share"), [("kernels", 0.0), ("eager", 1.0)])
def test_after_a_cuda_error_the_engine_goes_on_with_the_next_kind(
    tokens: dict[str, Any], report: Report, way: str, share: float
) -> None:
    tokens[way] = RuntimeError(FAULT)
    with pytest.raises(DeviceFault):
        stage_engine.engine(SETUP, report)
    assert values(report) == {"plain: graphs on = off": share}
    tokens[way] = [[1, 2]]
    stage_engine.engine(SETUP, report)
    kinds = [k for k in stage_engine.KINDS if not k.is_half]
    on_off = {k.metric: 1.0 for k in kinds} | {"plain: graphs on = off": share}
    assert values(report) == on_off | {f"{k.name}: kernels = PyTorch": 1.0 for k in kinds[1:] if k.with_eager}


def test_the_engine_runs_16_bits_int4_and_a_seeded_sample(
    monkeypatch: pytest.MonkeyPatch, tokens: dict[str, Any], report: Report
) -> None:
    monkeypatch.setattr(StageSetup, "half", torch.bfloat16)
    stage_engine.engine(StageSetup(False, SETUP.clock), report)
    runs = tokens["runs"]
    assert {options["dtype"] for options, *_ in runs} == {"float32", "bfloat16"}
    assert {options.get("quantization") for options, *_ in runs} == {None, "int8", "w8a8", "int4"}
    assert {options.get("kv_cache_dtype") for options, *_ in runs} == {None, "int8", "int4"}
    sampled = [(way, "speculative_config" in options) for options, sampling, way in runs if sampling["temperature"]]
    assert sampled == [("graphs", True), ("kernels", True)]
    assert len(names(report)) == len(stage_engine.KINDS) + 5


def test_a_kind_without_time_is_left_out_with_a_note(tokens: dict[str, Any], report: Report) -> None:
    stage_engine.engine(StageSetup(True, SETUP.clock, deadline=time.monotonic() + 5), report)
    assert tokens["runs"] == [] and names(report) == []
    assert report.so_far().notes["plain"] == "left out for lack of time"


def test_an_engine_without_an_executor_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class FallsBack:
        """An engine that warns and runs plain PyTorch."""

        def __init__(self, model: str, **options: Any) -> None:
            warnings.warn("the GPU runs plain PyTorch: ptxas is missing", stacklevel=2)
            self.engine = SimpleNamespace(runner=SimpleNamespace(executor=None), drafter=None)
            self.max_model_len = 8

    monkeypatch.setattr(minillm, "LLM", FallsBack)
    monkeypatch.setattr(stage_engine, "use_kernels", lambda *arguments, **options: None)
    with pytest.raises(RuntimeError, match=r"no executor supports the model.*ptxas is missing"):
        stage_engine._generate(SETUP, stage_engine.GREEDY, "target", {}, [[1]], "graphs")


@pytest.mark.parametrize(("capture", "prepared"), [(print, {}), (None, {"the first shape": 1})])
def test_an_engine_that_captures_no_step_or_gives_up_says_why(
    monkeypatch: pytest.MonkeyPatch, capture: Any, prepared: dict[str, int]
) -> None:
    class Uncaptured:
        """An engine that warns at a step and goes on without graphs."""

        def __init__(self, model: str, **options: Any) -> None:
            executor = SimpleNamespace(capture=capture, prepared=prepared)
            self.engine = SimpleNamespace(runner=SimpleNamespace(executor=executor), drafter=None)

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            warnings.warn("new shapes run without CUDA graphs from now on: not permitted", RuntimeWarning, stacklevel=2)
            return []

    monkeypatch.setattr(minillm, "LLM", Uncaptured)
    monkeypatch.setattr(stage_engine, "use_kernels", lambda *arguments, **options: None)
    setup = StageSetup(False, SETUP.clock)
    run = partial(stage_engine._generate, setup, stage_engine.GREEDY, "target", {}, [[1]])
    with pytest.raises(RuntimeError, match=r"steps ran without CUDA graphs: .*not permitted"):
        run("graphs")
    assert run("eager") == []


# ---- training


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-in for training: its losses by whether steps are captured, or an error to raise."""
    answers = SimpleNamespace(losses={True: 8.30, False: 8.31}, num_graphs=1)

    def new(model: Any, batches: Any, recipe: Any, folder: Path, loss: Any, capture: bool) -> Any:
        def train_step() -> float:
            print("a notice" if capture else "", end="")
            if isinstance(answers.losses[capture], Exception):
                raise answers.losses[capture]
            return answers.losses[capture]

        return SimpleNamespace(train_step=train_step, num_graphs=answers.num_graphs)

    monkeypatch.setattr(stage_training, "Trainer", new)
    monkeypatch.setattr(stage_training, "Compiled", lambda function: function)
    monkeypatch.setattr(stage_training, "new_model", lambda config: torch.nn.Linear(1, 1))
    return answers


RATES = [f"training the target, {name}" for name in (stage_training.CAPTURED, stage_training.PLAIN)]
GRAPHS, APART = "training steps captured as CUDA graphs", "losses of captured steps, largest difference"


def met(report: Report) -> dict[str, bool]:
    return {metric["name"]: metric["met"] for metric in report.so_far().metrics if metric["target"]}


def test_training_reports_each_way_and_compares_them(trainer: SimpleNamespace, report: Report) -> None:
    stage_training.training(StageSetup(False, SETUP.clock), report)
    assert names(report) == [GRAPHS, *RATES, APART] and met(report) == {GRAPHS: True, APART: True}
    assert report.so_far().notes == {f"{RATES[0]}: notices": "a notice" * 50}


def test_training_whose_steps_are_not_captured_does_not_pass(trainer: SimpleNamespace, report: Report) -> None:
    trainer.num_graphs = 0
    stage_training.training(StageSetup(False, SETUP.clock), report)
    assert met(report) == {GRAPHS: False, APART: True}


def test_training_that_is_not_compiled_says_why(
    trainer: SimpleNamespace, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_training, "Compiled", Compiled)
    monkeypatch.setattr("minillm.training.compiling.has_compiler", lambda: False)
    stage_training.training(StageSetup(False, SETUP.clock), report)
    notes = report.so_far().notes
    assert all("no C++ compiler was found" in notes[f"{rate}: notices"] for rate in RATES)


@pytest.mark.parametrize("capture", [True, False])
def test_a_way_of_training_that_fails_costs_nothing_of_the_other(
    trainer: SimpleNamespace, report: Report, capture: bool
) -> None:
    trainer.losses[capture] = RuntimeError("no more memory")
    stage_training.training(StageSetup(False, SETUP.clock), report)
    assert names(report) == ([RATES[1]] if capture else [GRAPHS, RATES[0]])
    assert "no more memory" in report.so_far().notes[f"{RATES[0 if capture else 1]} failed"]


# ---- decoding


def plain_runner(setup: StageSetup, model: Decoder, layout: type[KVCache], requests: int, length: int) -> ModelRunner:
    """Return a runner like `fast_runner`, in plain PyTorch."""
    blocks = requests * -(-length // random_models.BLOCK_SIZE)
    cache = layout(model.config, blocks, random_models.BLOCK_SIZE, setup.half, setup.device)
    random_models.fill(cache)
    runner, plain = (ModelRunner(model, cache, random_models.BLOCK_SIZE) for _ in range(2))
    runner.executor = SimpleNamespace(runs_trees=True, max_num_seqs=requests, run=plain.run)  # type: ignore
    return runner


def no_int8_cache(setup: StageSetup, model: Decoder, layout: type[KVCache], *sizes: int) -> ModelRunner:
    if layout is PagedInt8KVCache:
        raise RuntimeError("no such cache")
    return plain_runner(setup, model, layout, *sizes)


HALF_FIRST = [
    *("half decode", "half decode, MBU", "half verify 5 / decode 1"),
    *("half decode, nothing read", "half decode, nothing read, MBU", "half batch 1", "half batch 2"),
    *("half prefill 9", "half prefill 9, MFU", "half prefill 30", "half prefill 30, MFU"),
]
INT8_AFTER = [
    *("int8 decode", "int8 decode, MBU", "half decode, beside int8", "int8 over half"),
    *("int8 over half, by the two times", "int8 verify 5 / decode 1"),
]


@pytest.mark.parametrize(
    ("name", "broken", "part", "missing"),
    [
        ("quantize_model", fails(), "int8 weights", INT8_AFTER),
        ("fast_runner", no_int8_cache, "int8 + int8 KV", []),
        ("_int8_gain", fails(), "int8 decode", INT8_AFTER[:-1]),
        ("_batch", fails(), "batch 1", ["half batch 1", "half batch 2"]),
        ("_prefill", fails(), "prefill", [name for name in HALF_FIRST if "prefill" in name]),
    ],
)
def test_what_fails_in_decoding_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, report: Report, name: str, broken: Any, part: str, missing: list[str]
) -> None:
    monkeypatch.setattr(stage_decode, "fast_runner", plain_runner)
    monkeypatch.setattr(stage_decode, name, broken)
    stage_decode.decode(SETUP, report)
    found = [name for name in names(report) if "int8 KV" not in name]
    assert found == [name for name in HALF_FIRST + INT8_AFTER if name not in missing]
    assert f"{part} failed" in report.so_far().notes


# ---- single kernels


def formats(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Replace the long context by stand-ins, one of which fails."""

    def made(kind: str) -> Any:
        if kind == broken:
            raise RuntimeError("no such format")
        return SimpleNamespace(kind=kind, num_bytes=8)

    makers = [Maker("paged_attention", lambda kind=kind: made(kind)) for kind in ("", "int8", "int4")]
    monkeypatch.setattr(stage_kernels, "attention_cases", lambda setting: makers)
    config = {"implementation": TRITON, "warm_us_spread": [1.0, 2.0]}
    row = SimpleNamespace(config=config, p50_ms=0.0015, outputs_equal=True)
    monkeypatch.setattr(stage_kernels, "_rows", lambda setup, case, limits: [row])

    def timed(case: Any, which: str, name: str, clock: Any) -> TimedFunction:
        return TimedFunction(name, lambda count: sum(range(10_000)))

    monkeypatch.setattr(stage_kernels, "timed_implementation", timed)


LIMITS = [MachineLimit("copy bandwidth", "cpu", "B/s", 1e9, 0, 0, 7)]


@pytest.mark.parametrize(
    ("broken", "gains"), [("int4", ["int8 KV over half"]), ("int8", ["int4 KV over half"]), ("", [])]
)
def test_a_format_that_fails_costs_neither_the_others_nor_their_gains(
    monkeypatch: pytest.MonkeyPatch, report: Report, broken: str, gains: list[str]
) -> None:
    formats(monkeypatch, broken)
    stage_kernels._long_context(SETUP, report, SimpleNamespace(contexts=(100,)), LIMITS)  # type: ignore[arg-type]
    kinds = {"": "half", "int8": "int8", "int4": "int4"}
    worked = [name for kind, name in kinds.items() if kind != broken]
    each = [f"decode after 100, {name} KV{more}" for name in worked for more in ("", ", bandwidth")]
    assert names(report) == each + [gain + how for gain in gains for how in ("", ", by the two times")]
    assert report.so_far().notes.keys() == {f"decode after 100, {kinds[broken]} KV failed"}


def test_cases_are_written_one_by_one_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    def made(name: str) -> Any:
        if name == "killed":
            raise KeyboardInterrupt
        if name == "bad":
            raise RuntimeError("no such op")
        return name

    monkeypatch.setattr(stage_kernels, "asdict", lambda row: row)
    monkeypatch.setattr(stage_kernels, "_rows", lambda setup, case, limits: [{"system": case}])
    makers = [Maker(name, lambda name=name: made(name)) for name in ("a", "bad", "b", "killed", "c")]
    with pytest.raises(KeyboardInterrupt):
        stage_kernels._every_op(SETUP, report, makers, LIMITS)
    found = report.so_far()
    assert found.rows == [{"system": "a"}, {"system": "b"}] and "no such op" in found.notes["bad (case 1) failed"]
    report.path.unlink()
    late = StageSetup(False, SETUP.clock, deadline=time.monotonic() + stage_kernels.LAST_CASE_S - 1)
    stage_kernels._every_op(late, report, makers[:3], LIMITS)
    assert report.so_far() == Findings([], {"left out for lack of time": ["a", "bad", "b"]}, [])


def test_no_op_without_a_kernel_is_measured(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    """Its reference alone may take more time than all the others, and shows nothing of this device."""
    monkeypatch.setattr(
        stage_kernels, "implementations", lambda name, device: [TRITON] * (name != "w8a8_linear") + ["reference"]
    )
    monkeypatch.setattr(stage_kernels, "asdict", lambda row: row)
    monkeypatch.setattr(stage_kernels, "_rows", lambda setup, case, limits: [{"system": case}])
    ops = ["rope", "w8a8_linear", "linear", "w8a8_linear", "int8_linear"]
    stage_kernels._every_op(SETUP, report, [Maker(op, lambda op=op: op) for op in ops], LIMITS)
    found = report.so_far()
    assert [row["system"] for row in found.rows] == ["rope", "linear", "int8_linear"]
    assert found.notes == {"without a kernel on this device": ["w8a8_linear"], "left out for lack of time": []}


# ---- tiles


@needs_triton
@pytest.mark.parametrize(("is_rehearsal", "seconds", "most"), [(False, 0.0, 2), (True, 60.0, 2), (False, 60.0, 10)])
def test_the_tiles_in_use_are_tried_whatever_the_time(is_rehearsal: bool, seconds: float, most: int) -> None:
    from minillm.bench.on_gpu.stage_tiles import _tiles_to_try
    from minillm.bench.on_gpu.tune_tiles import candidates

    known = list(candidates(4))
    always = [replace(known[0], stages=5), known[4]]
    others = [tiles for tiles in known if tiles not in always]
    found = list(_tiles_to_try(StageSetup(is_rehearsal, SETUP.clock), [*always, always[0]], 4, seconds))
    assert found == [*always, *others][:most]


@needs_triton
@pytest.mark.parametrize(
    ("times", "is_default_the_best", "medians"),
    [
        ([0.5, 0.6] * 5, False, [0.5, 0.6]),
        ([0.5, 0.6, *[0.7, 0.6] * 4], True, [0.6, 0.6]),  # it won the search, and the first turn, by chance
    ],
)
def test_tiles_that_won_on_another_gpu_are_tried_even_if_they_are_unlikely_and_time_is_over(
    times: list[float],
    is_default_the_best: bool,
    medians: list[float],
    monkeypatch: pytest.MonkeyPatch,
    report: Report,
) -> None:
    from minillm.bench.on_gpu import stage_tiles
    from minillm.ops.triton.tiles import Tiles

    default, theirs, other = Tiles(16, 32, 64), Tiles(16, 32, 256, stages=4), Tiles(16, 64, 256)
    keys = ("int8", "few"), ("int8", "some"), ("w8a8", "few"), ("int8", "few, narrow")
    known = {("another GPU", *key): theirs if key == keys[0] else other for key in keys}
    tried: list[Tiles] = []

    def measure(run: Callable[[Tiles], str], chosen: Iterator[Tiles]) -> tuple[Tiles, float, int]:
        tried.extend(tiles for tiles in chosen if run(tiles) == "ran")
        return theirs, 0.5, len(tried)

    ours = iter(times)
    monkeypatch.setattr(stage_tiles, "product", lambda setup, kind, rows: lambda chosen: "ran")
    monkeypatch.setattr(stage_tiles.tiles, "MEASURED", known)
    monkeypatch.setattr(stage_tiles.tune_tiles, "measure", measure)
    monkeypatch.setattr(stage_tiles.tiles, "choose", lambda kind, *shape: default)
    monkeypatch.setattr(stage_tiles.testing, "do_bench", lambda run, return_mode: next(ours))
    monkeypatch.setattr(stage_tiles.machine, "gpu_name", lambda: "some GPU")
    monkeypatch.setattr(StageSetup, "half", torch.float16)
    report.note(stage_tiles.LINES, ["before"])
    stage_tiles._one_product(StageSetup(False, SETUP.clock), report, "int8", "few", seconds=0.0)
    assert tried == [default, theirs] and not list(ours)
    best = default if is_default_the_best else theirs
    assert report.so_far().notes[stage_tiles.LINES] == ["before", f'    ("some GPU", "int8", "few"): {best},']
    found = {metric["name"]: metric for metric in report.so_far().metrics}
    assert [found[f"int8 few, {which}"]["value"] for which in ("best", "default")] == medians
    assert found["int8 few, best"]["config"]["tiles"] == str(best) and len(found) == 2


@needs_triton
def test_a_product_whose_tiles_fail_costs_no_line_of_the_others(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    from minillm.bench.on_gpu import stage_tiles
    from minillm.ops.triton.tiles import Tiles

    measured: list[str] = []

    def measure(run: partial[None], chosen: Iterator[Tiles]) -> tuple[Tiles, float, int]:
        assert next(chosen) == Tiles(16, 32, 64)
        measured.append(run.args)
        if measured == [("int8", 1), ("int8", 4)]:
            raise RuntimeError("no such instruction")
        if len(measured) == 5:
            raise RuntimeError(FAULT)
        return Tiles(16, 64, 128), 0.5, 1

    def do_bench(run: partial[None], return_mode: str) -> float:
        if run.args[0] == "w8a8":
            raise RuntimeError("no time of the default")
        return 0.6

    monkeypatch.setattr(stage_tiles, "product", lambda setup, kind, rows: partial(print, kind, rows))
    monkeypatch.setattr(stage_tiles, "_kernels", lambda setup: {f"{kind}_linear" for kind in stage_tiles.KINDS})
    monkeypatch.setattr(stage_tiles.tune_tiles, "measure", measure)
    monkeypatch.setattr(stage_tiles.tiles, "choose", lambda kind, *shape: Tiles(16, 32, 64))
    monkeypatch.setattr(stage_tiles.testing, "do_bench", do_bench)
    monkeypatch.setattr(stage_tiles.machine, "gpu_name", lambda: "some GPU")
    monkeypatch.setattr(StageSetup, "half", torch.float16)
    setup = StageSetup(False, SETUP.clock)
    with pytest.raises(DeviceFault):
        stage_tiles.find_tiles(setup, report)
    stage_tiles.find_tiles(setup, report)
    assert len(measured) == len(set(measured)) == 10
    lines = report.so_far().notes[stage_tiles.LINES]
    assert lines == [
        f'    ("some GPU", "{kind}", "{rows}"): {Tiles(16, 64, 128)},'
        for rows in stage_tiles.ROWS
        for kind in stage_tiles.KINDS
        if (kind, rows) not in (("w8a8", "one"), ("int4", "one"), ("int8", "few"), ("int8", "some"))
    ]
