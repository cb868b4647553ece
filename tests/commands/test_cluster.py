"""`minillm cluster`: its jobs, and what it refuses before it starts anything."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm import cli
from minillm.bench.processes import free_port
from minillm.cluster import session
from minillm.cluster.worker_pool import ThisProcess
from minillm.commands import cluster
from minillm.commands.parser import parser
from minillm.errors import ConfigError
from tests.conftest import TinyPair

JOBS = ("serve", "generate", "sweep", "grade", "failover")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray were there; what needs it is not reached."""
    monkeypatch.setattr(session, "check_ray", lambda: None)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["cluster", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    for words in (["serve", "minicoder"], ["sweep", "--out", "x"], ["failover"]):
        said = refusal(capsys, *words)
        assert said == "minillm: ray is not installed; run: pip install 'minillm-lessons[ray]'\n"


@pytest.mark.parametrize("job", JOBS)
def test_every_job_has_help(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["cluster", job, "--help"])
    assert stopped.value.code == 0
    assert f"usage: minillm cluster {job}" in capsys.readouterr().out


def test_the_examples_are_read_by_the_parser() -> None:
    lines = [line.split() for line in cluster.EXAMPLES.replace("'", "").splitlines() if line.startswith("  minillm")]
    jobs = []
    for _, *words in lines:
        text = " ".join(words)
        begin = text.find("{")
        if begin >= 0:
            words = [*text[:begin].split(), text[begin:]]
        jobs.append(parser().parse_args(words).job)
    assert [job.__name__ for job in jobs] == [f"_{job}" for job in JOBS]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "none.jsonl", "--out", "x", "--sampling", '{"n": 2, "temperature": 1}'], "n=2"),
        (["generate", "none.jsonl", "--out", "x", "--sampling", '{"top_p": 7}'], "top_p=7"),
        (["generate", "none.jsonl", "--out", "x", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["sweep", "--out", "x", "--methods", "guess"], "there is no method 'guess'"),
        (["sweep", "--out", "x", "--slices", "poems"], "there is no slice 'poems'"),
        (["generate", "prompts.jsonl", "--out", "x", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["sweep", "--out", "x", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["grade", "none", "--out", "x"], "none is no folder"),
        (["failover", "--json", "/no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_a_bad_option_is_refused_before_ray_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "def"}\n')
    assert message in refusal(capsys, *words)


@pytest.mark.usefixtures("installed")
def test_failover_of_a_model_that_is_not_there_starts_no_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pydantic", reason="the extra `ray` is not installed")
    monkeypatch.setattr("minillm.cluster.failover.two_nodes", lambda **options: pytest.fail("two nodes were started"))
    assert "no model 'no-such-model'" in refusal(capsys, "failover", "--model", "no-such-model")


@pytest.mark.usefixtures("installed")
def test_a_model_that_is_not_there_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    assert "no model 'no-such-model'" in refusal(capsys, "serve", "no-such-model", "--port", str(free_port()))


@pytest.mark.usefixtures("installed")
def test_prompts_that_could_not_be_run_are_counted(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "_pool", lambda args: ThisProcess())
    file = tmp_path / "prompts.jsonl"
    words = ["cluster", "generate", str(file), "--model", str(tiny.target), "--device", "cpu", "--enforce-eager"]
    file.write_text('{"prompt": "def"}\n{"prompt": ""}\n')
    assert cli.main([*words, "--out", str(tmp_path / "some")]) == 1
    assert "could not be run: 1; the first, with the id 1: the prompt is empty" in capsys.readouterr().err
    file.write_text('{"prompt": "def"}\n')
    assert cli.main([*words, "--out", str(tmp_path / "all")]) == 0


@pytest.mark.usefixtures("installed")
def test_what_was_given_reaches_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake(**given: Any) -> SimpleNamespace:
        seen.update(given)
        raise ConfigError("enough")

    monkeypatch.setattr("minillm.cluster.sweep.SweepSettings.__init__", lambda self, **given: fake(**given))
    words = "sweep --out x --methods ngram,suffix --drafts 2,4 --block-sizes 8 --rounds 2 --weights int8 --workers 3"
    assert cli.main(["cluster", *words.split()]) == 2
    assert seen == {
        "methods": ("ngram", "suffix"),
        "drafts": (2, 4),
        "block_sizes": (8,),
        "rounds": 2,
        "weights": "int8",
    }


@pytest.mark.usefixtures("installed")
def test_a_result_that_cannot_be_printed_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("minillm.cluster.failover.run", lambda settings: {"name": "failover"})
    monkeypatch.setattr("minillm.cluster.failover.table", str)
    monkeypatch.setattr("rich.console.Console.print", closed)
    file = tmp_path / "out.json"
    assert cli.main(["cluster", "failover", "--json", str(file)]) == 0
    assert '"failover"' in file.read_text()


def test_importing_minillm_imports_no_ray() -> None:
    code = "import sys, minillm, minillm.async_llm, minillm.commands.cluster, minillm.cluster.worker_pool\n"
    code += "import minillm.cluster.generation, minillm.cluster.session, minillm.cluster.sweep\n"
    code += "sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
