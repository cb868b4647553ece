"""The end of a server: running requests are answered first, or cut off when their time is up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.serve.running_server import NAME, PATIENCE_S, running_server  # isort: skip (it may skip this file)

import httpx
import openai

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
        assert server.engine.errored
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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
def test_the_command_serves_until_it_is_told_to_stop(tiny: TinyPair) -> None:
    words = ["serve", str(tiny.target), "--port", "0", "--enforce-eager", "--device", "cpu", "--max-model-len", "128"]
    words += ["--served-model-name", NAME, "--max-num-seqs", "4", "--block-size", "4"]
    words += ["--speculative-config", '{"method": "ngram"}']
    command = [sys.executable, "-m", "minillm.cli", *words]
    environment = {**os.environ, "MINILLM_API_KEY": "secret"}
    root = Path(minillm.__file__).parents[1]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            [url] = re.findall(r"minillm serves tiny at (http://127\.0\.0\.1:\d+/v1)", line)
            client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=PATIENCE_S)
            assert client.models.list().data[0].max_model_len == 128
            assert client.completions.create(model=NAME, prompt="a", max_tokens=3).choices
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == -signal.SIGTERM  # uvicorn raises it again, when all is done
        finally:
            process.kill()
