"""The end of a server: running requests are answered first, or cut off when their time is up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.serve.running_server import NAME, PATIENCE_S, running_server  # isort: skip (it may skip this file)

import httpx
import openai
import psutil

import minillm
from tests.conftest import TinyPair
from tests.held_engine import held

ENDLESS: dict[str, Any] = {"model": NAME, "prompt": "a", "temperature": 0, "max_tokens": 200, "stream": True}
ENDLESS["extra_body"] = {"ignore_eos": True}


def test_a_running_stream_is_drained_and_new_clients_are_turned_away(tiny: TinyPair) -> None:
    with running_server(tiny.target) as server:
        stream = server.client().completions.create(**ENDLESS)
        chunks = [next(iter(stream))]
        reader = Thread(target=lambda: chunks.extend(stream))
        server.server.should_exit = True
        reader.start()
        reader.join(PATIENCE_S)
        assert chunks[-1].choices[0].finish_reason == "length"
        server.thread.join(PATIENCE_S)
        assert server.engine.errored and not server.server.has_lost_engine
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_a_stream_that_outlasts_the_timeout_is_cut_off(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.engine.engine import Engine

    with running_server(tiny.target, shutdown_timeout=0) as server:
        with held(server.engine):
            stream = iter(server.client().completions.create(**ENDLESS))
            next(stream)
            monkeypatch.setattr(Engine, "_step", lambda self: [])  # it would go on for ever
        server.server.should_exit = True
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive() and server.engine.errored
        inner = server.engine.llm_engine.engine
        inner.scheduler.check_integrity()
        assert inner.pool.num_used == 0


def test_an_idle_connection_outlives_the_clients_own_limit(tiny: TinyPair) -> None:
    """Otherwise a request that is sent just when the server closes the connection is lost."""
    with running_server(tiny.target) as server:
        of_client = openai.OpenAI(api_key="none")._client._transport._pool._keepalive_expiry
        assert server.server.config.timeout_keep_alive > 4 * of_client


@contextmanager
def command(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """`minillm serve` in a process group of its own, and a client of it."""
    words = ("serve", str(folder), "--port", "0", "--device", "cpu", "--served-model-name", NAME, *words)
    environment = {**os.environ, "MINILLM_API_KEY": "secret"}
    with subprocess.Popen(
        [sys.executable, "-m", "minillm.cli", *words],
        cwd=Path(minillm.__file__).parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            [url] = re.findall(r"minillm serves tiny at (http://127\.0\.0\.1:\d+/v1)", line)
            yield process, openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=PATIENCE_S)
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
def test_the_command_serves_until_it_is_told_to_stop(tiny: TinyPair) -> None:
    words = ["--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4", "--block-size", "4"]
    with command(tiny.target, *words, "--speculative-config", '{"method": "ngram"}') as (process, client):
        assert client.models.list().data[0].max_model_len == 128
        assert client.completions.create(model=NAME, prompt="a", max_tokens=3).choices
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM  # uvicorn raises it again, when all is done


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
def test_a_signal_to_all_processes_of_a_server_lets_its_stream_end(tiny: TinyPair) -> None:
    with command(tiny.target, "-tp", "2") as (process, client):
        stream = iter(client.completions.create(**ENDLESS))
        next(stream)
        os.killpg(process.pid, signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_server_whose_engine_has_failed_ends_with_an_error(tiny: TinyPair) -> None:
    with command(tiny.target, "-tp", "2") as (process, client):
        [worker] = psutil.Process(process.pid).children()
        worker.kill()
        with pytest.raises(openai.InternalServerError, match="killed by SIGKILL"):
            client.completions.create(model=NAME, prompt="a")
        assert process.wait(PATIENCE_S) == 2
        assert process.stderr is not None
        *_, last = process.stderr.read().splitlines()
        assert last.startswith("minillm: the engine has failed, so the server has ended: the process of rank 1")
