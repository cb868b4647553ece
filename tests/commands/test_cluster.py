"""`minillm cluster`: its jobs, and what it refuses before it starts anything."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.table import Table

from minillm import cli
from minillm.bench.processes import free_port
from minillm.cluster import session
from minillm.commands import cluster
from minillm.commands.parser import parser
from minillm.errors import ConfigError
from tests.cluster import ray_stand_in
from tests.cluster.this_process import ThisProcess
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
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("minillm.cluster.session.NEEDED", ("ray",))
    for words in (["serve", "minicoder"], ["sweep", "--out", "x"], ["failover"]):
        said = refusal(capsys, *words)
        assert said == 'minillm: ray is not installed; run: pip install "minillm-lessons[ray]"\n'


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


@pytest.fixture
def application(installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that starts Serve, with a stand-in for Ray; SIGTERM is handled as before after the test."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    ray_stand_in.install(monkeypatch)
    handler = signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("minillm.cluster.application")
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("application")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-queued-reqs", "0"], "max_num_queued_reqs=0 must be"),
        (["--max-num-seqs", "0"], "max_num_seqs=0 must be"),
        (["--cpus", "-1"], "cpus_per_replica=-1"),
        (["--max-imbalance", "-1"], "max_imbalance=-1"),
        (["--api-key", ""], "an API key is empty"),
        (["--allowed-origins", '["example.org"]'], "allowed origin 'example.org': no page has it"),
        ([], "no model 'no-such-model'"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refusal(capsys, "serve", "no-such-model", "--port", str(free_port()), *words)


@pytest.mark.usefixtures("application")
def test_a_template_that_is_no_jinja_is_not_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}")
    words = ["serve", "minicoder", "--port", str(free_port()), "--chat-template", str(file)]
    assert "is not valid Jinja" in refusal(capsys, *words)


def test_what_was_given_reaches_the_cluster(
    application: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from minillm.cluster.replica import ReplicaSettings

    seen: list[Any] = []

    def fake(*given: Any) -> Any:
        seen.extend(given)
        if len(seen) > 1:
            raise ConfigError("enough")
        return nullcontext()

    monkeypatch.setattr(session, "ray_session", fake)
    monkeypatch.setattr(application, "serving", fake)
    template = tmp_path / "template.jinja"
    template.write_text("")
    words = "serve minicoder --address auto --replicas 3 --gateways 2 --cpus 2.5 --gpus 0.5 --router power_of_two "
    words += "--max-imbalance 5 --host 0.0.0.0 --port 9000 --api-key secret other --served-model-name first second "
    words += f'--chat-template {template} --max-num-queued-reqs 7 --allowed-origins ["https://a.b"] --block-size 8'
    assert cli.main(["cluster", *words.split()]) == 2
    replica = ReplicaSettings(
        "minicoder",
        {"block_size": 8},
        model_names=("first", "second"),
        allowed_origins=("https://a.b",),
        max_num_queued_reqs=7,
        chat_template=str(template),
    )
    settings = application.ClusterSettings(
        replica,
        num_replicas=3,
        num_gateways=2,
        cpus_per_replica=2.5,
        gpus_per_replica=0.5,
        router="power_of_two",
        max_imbalance=5,
        api_keys=("secret", "other"),
    )
    assert seen == ["auto", settings, "0.0.0.0", 9000]


@pytest.mark.parametrize("job", ["generate prompts.jsonl --out x", "sweep --out x", "grade folder --out x"])
def test_what_was_given_reaches_the_workers(job: str) -> None:
    words = f"cluster {job} --address auto --workers 3 --cpus 2.5 --gpus 2"
    pool = cluster._pool(parser().parse_args(words.split()))
    assert (pool.num_workers, pool.address) == (3, "auto")
    assert (pool.options["num_cpus"], pool.options["num_gpus"]) == (2.5, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
@pytest.mark.parametrize("when", ["ray", "serve", "serves", "Ctrl-C"])
def test_sigterm_stops_what_was_started_even_before_it_serves(
    application: ModuleType, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    ended: list[str] = []

    @contextmanager
    def starting(name: str, *_: Any) -> Iterator[str]:
        try:
            if name == when:
                signal.raise_signal(signal.SIGTERM)
            if name == "ray":  # as `ray.init` does
                signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
            yield "http://127.0.0.1:8000"
        finally:
            signal.raise_signal(signal.SIGTERM)  # impatience does not keep it from the end of the clean-up
            ended.append(name)

    class Waiting(Event):
        def wait(self, timeout: float | None = None) -> bool:
            if when == "Ctrl-C":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
            return super().wait(timeout=1)

    monkeypatch.setattr(session, "ray_session", partial(starting, "ray"))
    monkeypatch.setattr(application, "serving", partial(starting, "serve"))
    monkeypatch.setattr(cluster, "Event", Waiting)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the command has no handler yet"))
    words = ["cluster", "serve", "minicoder", "--address", "auto"]
    if when == "Ctrl-C":
        assert cli.main(words) == 130
    else:
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 0
    assert ended == (["ray"] if when == "ray" else ["serve", "ray"])


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
@pytest.mark.parametrize(
    ("words", "job"),
    [(["failover"], "failover.run"), (["sweep", "--out", "here"], "sweep.sweep")],
)
def test_a_table_in_a_file_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], job: str
) -> None:
    module = job.partition(".")[0]
    long, wide = "x" * 150, Table("a column")
    wide.add_row(long)
    monkeypatch.setattr(f"minillm.cluster.{job}", lambda *_: None)
    monkeypatch.setattr(f"minillm.cluster.{module}.table", lambda _: wide)
    monkeypatch.setattr("minillm.cluster.failover.passed", lambda _: True)
    assert cli.main(["cluster", *words]) == 0
    assert long in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_a_result_that_cannot_be_printed_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minillm.cluster.failover.run", lambda settings: {"name": "failover"})
    monkeypatch.setattr("minillm.cluster.failover.table", str)
    monkeypatch.setattr("rich.console.Console.print", full)
    file = tmp_path / "out.json"
    assert cli.main(["cluster", "failover", "--json", str(file)]) == 2
    assert '"failover"' in file.read_text()


def test_importing_minillm_imports_no_ray() -> None:
    code = "import sys, minillm, minillm.async_llm, minillm.commands.cluster, minillm.cluster.worker_pool\n"
    code += "import minillm.cluster.generation, minillm.cluster.session, minillm.cluster.sweep\n"
    code += "sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
