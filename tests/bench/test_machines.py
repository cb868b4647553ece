"""The benchmarks of threads and of other processors count what they say; the processes they start are stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from llvmlite import binding

from minillm.bench import parallel, processors, threads
from minillm.bench.benchmarks import find, find_table
from minillm.errors import ConfigError, MinillmError
from minillm.ops.cpu.processor import inspect_processor
from tests.conftest import TinyPair


def printed(outcome: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    from rich.console import Console

    json.dumps(outcome)
    Console(width=200).print(find_table(outcome["name"])(outcome))
    return capsys.readouterr().out


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Path | None]]:
    """Workers that answer at once; what was started."""
    started: list[tuple[int, Path | None]] = []

    @contextmanager
    def fake(model: str, count: int, group: Path | None) -> Iterator[threads.Worker]:
        started.append((count, group))
        command = ["python", "-c", "import sys\nfor line in sys.stdin: print('[7, 7]', flush=True)"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield threads.Worker(count, process)
            process.kill()

    monkeypatch.setattr(threads.Worker, "started", fake)
    return started


def test_split_model_is_compared_with_the_whole(tiny: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = parallel.run(str(tiny.target), rounds=1, new_tokens=3)
    rows = {row["system"]: row for row in outcome["rows"]}
    assert list(rows) == ["1 process, compiled step", "1 process", "2 processes", "4 processes"]
    layers, hidden, vocab = 2, 48, 300
    for count in (2, 4):
        row = rows[f"{count} processes"]
        assert row["outputs_equal"] and row["baseline"] == "1 process"
        assert row["config"]["all_reduces_per_step"] == 2 * layers + 1
        tokens = (parallel.PROMPT_TOKENS + 2) / 3  # a step: the prompt, then one at a time
        bytes_per_step = 4 * (tokens * (2 * layers + 1) * hidden + vocab // count)
        assert row["config"]["bytes_per_step"] == pytest.approx(bytes_per_step)
        assert row["config"]["wait_ms"] > 0
    assert "all-reduces a step" in printed(outcome, capsys)
    assert find("parallel") is parallel.run


def test_every_number_of_threads_runs_in_every_condition(
    tiny: TinyPair,
    stand_ins: list[tuple[int, Path | None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def group() -> Iterator[Path]:
        yield tmp_path

    monkeypatch.setattr(threads, "control_group", group)
    outcome = threads.run(str(tiny.target), rounds=1, new_tokens=2)
    assert find("threads") is threads.run
    assert stand_ins == [(n, where) for where in (None, None, tmp_path) for n in (1, 2, 4, 8)]
    assert [row["baseline"] for row in outcome["rows"]] == [None, "1 thread", "1 thread", "1 thread"] * 3
    assert all(row["outputs_equal"] for row in outcome["rows"] if row["baseline"])
    assert "a busy process for each processor" in printed(outcome, capsys)


def test_where_no_share_can_be_made_the_others_are_measured(
    tiny: TinyPair, stand_ins: list[tuple[int, Path | None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threads, "CONTROL_GROUPS", (tmp_path, tmp_path / "unified"))
    outcome = threads.run(str(tiny.target), rounds=1, new_tokens=2)
    assert list(outcome["config"]["left_out"]) == [threads.LIMITED] and len(outcome["rows"]) == 8


@pytest.mark.parametrize("run", [threads.run, processors.run])
def test_new_tokens_without_room_are_refused_before_a_process_starts(
    run: Callable[..., Any], tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match="--new-tokens 256 leaves 0 of 256 tokens for a prompt"):
        run(str(tiny.target), new_tokens=256)


def test_a_worker_that_has_ended_is_named() -> None:
    """It may end before it has read the prompt, or after."""
    for code in ("pass", "input()"):
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            if code == "pass":
                process.wait()
            with pytest.raises(MinillmError, match="the process with 2 threads ended"):
                threads.Worker(2, process).complete([5], 1)
            with suppress(BrokenPipeError):
                process.stdin.close()


@pytest.mark.skipif(os.name != "posix", reason="a process of Windows has the same parent for ever")
def test_busy_processes_end_with_a_parent_that_a_signal_ended() -> None:
    """SIGKILL, as SIGTERM without a handler, runs no `finally`."""
    code = (
        "import time\nfrom minillm.bench import threads\nimport psutil\n"
        "with threads.busy_processes(1):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        busy = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.5)  # it has asked for its parent
        parent.kill()
    try:
        with suppress(psutil.NoSuchProcess):
            busy.wait(10)
        assert not busy.is_running() or busy.status() == psutil.STATUS_ZOMBIE
    finally:
        with suppress(psutil.NoSuchProcess):
            busy.kill()


def test_busy_processes_end_with_what_they_were_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    really = subprocess.Popen

    def noted(*args: Any) -> subprocess.Popen[bytes]:
        begun.append(really(*args))
        return begun[-1]

    monkeypatch.setattr(threads.subprocess, "Popen", noted)
    with threads.busy_processes(2):
        assert [process.poll() for process in begun] == [None, None]
    assert all(process.poll() is not None for process in begun)


def test_processors_that_ran_were_refused_or_only_compiled_all_have_their_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"system": "minillm eager fp32", "baseline": None, "ratio": None, "ratio_min": None, "ratio_max": None}
    rest = {"tokens_per_s": 1.0, "p50_ms": 1.0, "peak_memory_bytes": None, "config": {}, "same_start": None}
    rows = [
        {**plain, **rest, "outputs_equal": None, "config": {}},
        {
            **rest, "system": "minillm fp32", "baseline": "minillm eager fp32", "ratio": 3.0, "ratio_min": 2.5,
            "ratio_max": 3.5, "outputs_equal": True, "config": {},
        },
    ]  # fmt: skip
    asked: list[tuple[str, list[str]]] = []

    def pretend(name: str, arguments: list[Any]) -> dict[str, Any]:
        asked.append((name, arguments[1]))
        return {"reason": "no FMA", "rows": []} if name == "x86-64" else {"reason": None, "rows": rows}

    monkeypatch.setattr(processors, "_measure_as", pretend)
    monkeypatch.setattr(processors, "unsupported_reason", lambda name: None)
    outcome = processors.run(systems=["haswell fp32", "x86-64 int8"])
    assert asked == [("haswell", ["fp32"]), ("x86-64", ["int8"])]
    text = printed(outcome, capsys)
    assert "3.00×" in text and "refused: no FMA" in text and "24 sdot" in text
    assert "| haswell | minillm fp32 | 1 | 1 | 3.00× | 2.50 to 3.50 | yes |" in processors.markdown(outcome)
    with pytest.raises(ConfigError, match="haswell bf16"):
        processors.run(systems=["haswell bf16"])


def test_processors_whose_code_this_one_does_not_run_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ARM, LLVM would compile for a generic ARM processor, under the name of the other one."""
    features: dict[str, bool] = {}
    monkeypatch.setattr(binding, "get_process_triple", lambda: "x86_64-pc-windows-msvc")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(processors, "count_loops", dict)
    monkeypatch.setattr(processors, "_measure_as", lambda name, arguments: {"reason": f"ran {name}", "rows": []})
    features |= dict.fromkeys(("avx2", "fma", "f16c"), True)
    wanted = ["haswell fp32", "alderlake fp32", "skylake-avx512 fp32"]
    found = processors.run(systems=wanted)["config"]["left_out"]
    assert found["haswell"] == "ran haswell" and found["alderlake"] == "this processor has no avxvnni"
    assert found["skylake-avx512"].startswith("this processor has no avx512f and no avx512bw")
    monkeypatch.setattr(binding, "get_process_triple", lambda: "arm64-apple-darwin")
    found = processors.run(systems=wanted)["config"]["left_out"]
    assert list(found) == ["haswell", "alderlake", "skylake-avx512"] and not any("ran" in why for why in found.values())


def test_a_failed_process_is_left_out_and_an_error_if_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"system": "minillm fp32", "baseline": None, "ratio": None, "ratio_min": None, "ratio_max": None}
    row |= {"tokens_per_s": 1.0, "p50_ms": 1.0, "peak_memory_bytes": None, "outputs_equal": None, "config": {}}
    answers = {"haswell": {"reason": None, "rows": [row]}}

    really = subprocess.run

    def run(command: list[str], env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        if env is None:  # git
            return really(command, **options)
        answer = answers.get(env["NUMBA_CPU_NAME"])
        return subprocess.CompletedProcess(command, 1 if answer is None else 0, json.dumps(answer))

    monkeypatch.setattr(processors, "unsupported_reason", lambda name: None)
    monkeypatch.setattr(processors, "count_loops", dict)
    monkeypatch.setattr(processors.subprocess, "run", run)
    outcome = processors.run(systems=["haswell fp32", "alderlake fp32"])
    assert len(outcome["rows"]) == 1
    assert outcome["config"]["left_out"]["alderlake"].startswith("the process ended with status 1")
    with pytest.raises(MinillmError, match=r"^alderlake: the process ended with status 1"):
        processors.run(systems=["alderlake fp32"])


def test_pytorch_may_use_the_byte_products_that_the_compiled_step_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, "{}")

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    monkeypatch.setattr(processors.subprocess, "run", run)
    for name in processors.HELD_TO:
        processors._measure_as(name, [])
        uses_vnni = inspect_processor("x86_64-unknown-linux-gnu", name).byte_products == "vpdpbusd"
        assert seen["NUMBA_CPU_NAME"] == name and seen["ONEDNN_MAX_CPU_ISA"].endswith("VNNI") is uses_vnni
    processors._measure_as("alderlake", [])
    assert (seen["ONEDNN_MAX_CPU_ISA"], seen["ATEN_CPU_CAPABILITY"]) == ("AVX2_VNNI", "avx2")


def test_a_process_that_pretends_to_be_too_old_says_why() -> None:
    found = processors._measure_as("ivybridge", ["minicoder", ["fp32"], 1, 1])
    assert found["rows"] == [] and found["reason"].endswith("no FMA")


def test_the_document_shows_the_lines_of_the_saved_result() -> None:
    root = Path(processors.__file__).parents[2]
    outcome = json.loads((root / "benchmarks" / "processors.json").read_text())
    assert processors.markdown(outcome) in (root / "docs" / "processors.md").read_text(encoding="utf-8")
    assert all(row["outputs_equal"] and row["ratio_min"] >= 1 for row in outcome["rows"] if row["baseline"])
