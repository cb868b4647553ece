"""The benchmarks of threads and of other processors count what they say; the processes they start are stand-ins."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from minillm.bench import parallel, processors, threads
from minillm.bench.benchmarks import find, find_table
from minillm.errors import ConfigError
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
    outcome = processors.run(systems=["haswell fp32", "x86-64 int8"])
    assert asked == [("haswell", ["fp32"]), ("x86-64", ["int8"])]
    text = printed(outcome, capsys)
    assert "3.00×" in text and "refused: no FMA" in text and "24 sdot" in text
    assert "| haswell | minillm fp32 | 3.00× | 2.50 to 3.50 | yes |" in processors.markdown(outcome)
    with pytest.raises(ConfigError, match="haswell fp16"):
        processors.run(systems=["haswell fp16"])


def test_pytorch_may_use_the_byte_products_that_the_compiled_step_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        return subprocess.CompletedProcess(command, 1)

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
