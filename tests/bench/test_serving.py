"""`minillm bench serve`: its client reads what the server wrote, and its percentiles are counted right."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest
from rich.console import Console

from tests.serve.running_server import NAME, running_server  # isort: skip (it may skip this file)

from minillm import LLM, SamplingParams
from minillm.bench import jupyter_process, processes, server_process, serving
from minillm.bench.benchmarks import find
from minillm.bench.jupyter_process import JupyterProcess
from minillm.bench.load_client import Answer, LoadClient, LoadError
from minillm.bench.server_process import ServerProcess, VllmServerProcess
from minillm.bench.vllm_peer import VllmPeer
from minillm.errors import ConfigError
from tests.conftest import TinyPair


def test_the_client_gets_the_tokens_of_the_offline_engine_in_order(tiny: TinyPair) -> None:
    prompts = [[5 + number, 9, 21, 40 + number] for number in range(12)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    llm = LLM(str(tiny.target), device="cpu", enforce_eager=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    own = {"model": NAME, "temperature": 0, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    with running_server(tiny.target) as server:
        client = LoadClient(f"{server.url}/v1", concurrent=4)
        for stream in (False, True):
            answers = client.run([{**own, "prompt": ids, "stream": stream} for ids in prompts])
            assert [answer.token_ids for answer in answers] == [output.outputs[0].token_ids for output in outputs]
            for answer in answers:
                assert answer.began < answer.arrivals[0] and answer.arrivals == sorted(answer.arrivals)
                assert len(answer.arrivals) == 10
        with pytest.raises(LoadError, match=r"400 bad request: .*is not supported"):
            client.run([{**own, "prompt": "a", "structured_outputs": {"regex": "a"}}])


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = chunk(b'data: {"choices": [{"token_ids": [5]}]}\n\n')
FAILED = chunk(b'data: {"error": {"message": "out of memory"}}\n\n') + b"0\r\n\r\n"


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """The address of a server that sends these bytes to its only client, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (HEAD + TOKEN + FAILED, "the server failed: .*out of memory"),
        (HEAD[:20], "the connection to the server at 127.0.0.1:.* broke"),
        (HEAD + TOKEN, "the connection to the server at 127.0.0.1:.* broke"),
    ],
    ids=["an error in the stream", "half a head", "half an answer"],
)
def test_an_answer_that_breaks_off_is_not_taken_for_a_short_one(answer: bytes, message: str) -> None:
    with raw_server(answer) as url, pytest.raises(LoadError, match=message):
        LoadClient(url, concurrent=1).run([{"prompt": [5]}])
    with pytest.raises(LoadError, match="broke"):  # nobody is there any more
        LoadClient(url, concurrent=1).run([{"prompt": [5]}])


def test_latencies_are_percentiles_over_requests_and_over_tokens() -> None:
    answers = [Answer(10.0, [1, 2, 3], [10.0 + wait, 10.5 + wait, 10.5 + wait]) for wait in (1.0, 2.0, 4.0)]
    told = serving.latencies(answers)
    assert (told["ttft_p50_ms"], told["ttft_p90_ms"]) == (2000, 4000)
    assert told["tpot_p50_ms"] == told["tpot_p90_ms"] == 250
    assert (told["itl_p50_ms"], told["itl_p90_ms"]) == (0, 500)
    assert told["tokens_per_event"] == 9 / 6


def test_the_benchmark_compares_the_server_with_the_offline_engine(tiny: TinyPair) -> None:
    assert find("serve") is serving.run
    outcome = serving.run(str(tiny.target), rounds=1, prompts=serving.CONCURRENT, new_tokens=3)
    rows = {row["system"]: row for row in outcome["rows"]}
    assert list(rows) == [serving.OFFLINE, serving.SERVER, serving.STREAMED]
    for name in (serving.SERVER, serving.STREAMED):
        assert rows[name]["baseline"] == serving.OFFLINE and rows[name]["outputs_equal"]
        assert rows[name]["config"]["cpu_ratio"] > 0
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(serving.table(outcome))
    text = console.export_text()
    assert "TTFT p50 ms" in text and "same tokens" in text and "server, streamed" in text
    assert rows[serving.STREAMED]["config"]["ttft_p90_ms"] >= rows[serving.STREAMED]["config"]["ttft_p50_ms"] > 0


VLLM = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port = int(sys.argv[sys.argv.index("--port") + 1])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", "/version") else 404)
        self.end_headers()
        self.wfile.write(b'{"version": "0.1"}')

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_vllms_server_is_waited_for_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of its name that answers for it: starting vLLM takes half a minute."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(VLLM)
    monkeypatch.chdir(tmp_path)  # `python -m` finds it here
    server = VllmServerProcess(sys.executable, "folder", "name", 1)
    assert server.url.endswith("/v1") and server.peak_memory and server.cpu_seconds > 0
    served = serving.Served(server, "name", [[5]], 1, streamed=False)
    served.cpu_ms_per_token = [9.0, 1.0]
    assert served.details() == {"cpu_ms_per_token": 1.0, "vllm": "0.1"}
    server.close()
    assert server.process.returncode is not None
    (package / "api_server.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match=r"vLLM's server under .* did not start"):
        VllmServerProcess(sys.executable, "folder", "name", 1)
    with pytest.raises(ConfigError, match=r"none cannot be run .*MINILLM_VLLM_PYTHON must name"):
        VllmServerProcess(str(tmp_path / "none"), "folder", "name", 1)


@pytest.mark.parametrize(
    "start",
    [
        lambda: ServerProcess("any"),
        lambda: VllmServerProcess("python", "folder", "name", 1),
        lambda: VllmPeer("python", 1),
        lambda: JupyterProcess({}),
    ],
    ids=["minillm", "vLLM", "vLLM offline", "Jupyter"],
)
def test_an_interrupt_while_a_server_starts_ends_it(start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    started, popen = [], subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    def sleeping(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE, text=True))
        started[0].stdout = SimpleNamespace(readline=interrupted)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    for module in (server_process, jupyter_process):
        monkeypatch.setattr(module, "open_own", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert len(started) == 1 and started[0].poll() is not None
    finally:
        started[0].kill()


@pytest.mark.parametrize(
    "start",
    [lambda: VllmServerProcess("python", "folder", "name", 3), lambda: VllmPeer("python", 3)],
    ids=["server", "offline"],
)
def test_vllm_sees_no_gpu(start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of vLLM for GPUs would run there, and the result would say that it ran on the CPU."""
    seen: dict[str, str] = {}

    def refused(command: list[str], *, env: dict[str, str], **options: Any) -> None:
        seen.update(env)
        raise OSError(2, "not there")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(ConfigError, match="cannot be run"):
        start()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["OMP_NUM_THREADS"]) == ("", "3")


def test_what_cannot_be_measured_is_refused(tmp_path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="5 prompts are fewer than the 32 clients"):
        serving.run(prompts=5)
    with pytest.raises(ConfigError, match="its error is above"):
        ServerProcess(str(tmp_path / "nothing"))
    assert "nothing" in capfd.readouterr().err


def test_a_server_that_is_not_there_is_listed_with_the_reason(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINILLM_VLLM_PYTHON", raising=False)
    outcome = serving.run(str(tiny.target), systems=[serving.VLLM], rounds=1, prompts=32, new_tokens=2)
    assert outcome["rows"] == [] and "MINILLM_VLLM_PYTHON" in outcome["config"]["left_out"][serving.VLLM]


def test_a_server_of_this_machine_is_asked_without_the_users_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(HTTPError, match="501"):  # the server's own answer: it knows no method
            processes.open_own(f"http://127.0.0.1:{server.server_port}/", timeout=5)
