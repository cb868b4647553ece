"""`minillm serve`: its options, and what it refuses before it loads a model."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minillm import cli
from minillm.commands import serve
from minillm.commands.parser import parser
from minillm.config import EngineArgs
from tests.conftest import TinyPair


@pytest.fixture
def installed() -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["serve", "no-such-model", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr(serve, "NEEDED", ("argparse", "uvicorn"))
    assert refusal(capsys) == 'minillm: uvicorn is not installed; run: pip install "minillm-lessons[serve]"\n'


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1 must be at least 0"),
        (["--max-body-bytes", "0"], "max_body_bytes=0 must be an integer of at least 1"),
        (["--max-logprobs", "-2"], "max_logprobs=-2 must be"),
        (["--api-key", ""], "an API key is empty"),
        (["--served-model-name", ""], "must be one or more non-empty names"),
        (["--uvicorn-log-level", "loud"], "must be one of critical, error"),
        (["--allowed-origins", "[5]"], "allowed origin 5: no page has it"),
        (["--api-key", "secret\n"], "begins or ends with white space"),
        (["--host", "é..x"], "é..x:8000 cannot be listened on"),
        (["--port", "70000"], "127.0.0.1:70000 cannot be listened on"),
        (["--port", "0", "--max-num-queued-reqs", "0"], "max_num_queued_reqs=0 must be"),
        (["--port", "0", "--max-num-seqs", "0"], "max_num_seqs=0 must be"),
        (["--port", "0"], "no-such-model"),
    ],
)
def test_a_bad_option_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in refusal(capsys, *words)


@pytest.mark.usefixtures("installed")
def test_an_ipv6_address_is_written_in_brackets() -> None:
    from minillm.serve.server import url_of

    assert url_of("::1", 8000) == "http://[::1]:8000"
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"


@pytest.mark.usefixtures("installed")
def test_a_port_in_use_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} cannot be listened on" in refusal(capsys, "--port", str(port))


@pytest.mark.usefixtures("installed")
def test_a_template_that_is_no_jinja_is_not_served(
    tiny: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so before it loads the model."""
    monkeypatch.setattr("minillm.async_llm.AsyncLLM", None)
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}")
    words = [str(tiny.target), "--port", "0", "--device", "cpu", "--enforce-eager", "--chat-template", str(file)]
    assert cli.main(["serve", *words]) == 2
    printed = capsys.readouterr()
    assert "is not valid Jinja" in printed.err and printed.out == ""


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_speculative_config_is_a_json_object(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "minicoder", "--speculative-config", text])
    assert "--speculative-config" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "{}", "https://example.org"])
def test_allowed_origins_are_a_json_list(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "minicoder", "--allowed-origins", text])
    assert "argument --allowed-origins: " in capsys.readouterr().err


ENGINE_VALUES: dict[str, tuple[str, Any]] = {
    "dtype": ("--dtype bfloat16", "bfloat16"),
    "device": ("--device cpu", "cpu"),
    "seed": ("--seed 7", 7),
    "quantization": ("-q int8", "int8"),
    "kv_cache_dtype": ("--kv-cache-dtype int4", "int4"),
    "kv_cache_config": ('--kv-cache-config {"layout":"sinks"}', {"layout": "sinks"}),
    "block_size": ("--block-size 8", 8),
    "num_kv_blocks": ("--num-kv-blocks 9", 9),
    "kv_cache_memory_bytes": ("--kv-cache-memory-bytes 1000000", 1_000_000),
    "gpu_memory_utilization": ("--gpu-memory-utilization 0.5", 0.5),
    "max_model_len": ("--max-model-len 64", 64),
    "max_num_seqs": ("--max-num-seqs 3", 3),
    "max_num_batched_tokens": ("--max-num-batched-tokens 512", 512),
    "enable_chunked_prefill": ("--no-enable-chunked-prefill", False),
    "long_prefill_token_threshold": ("--long-prefill-token-threshold 32", 32),
    "enable_prefix_caching": ("--no-enable-prefix-caching", False),
    "scheduling_policy": ("--scheduling-policy priority", "priority"),
    "tensor_parallel_size": ("-tp 2", 2),
    "enforce_eager": ("--enforce-eager", True),
    "speculative_config": ('--speculative-config {"method":"suffix"}', {"method": "suffix"}),
}
NOT_FOR_A_COMMAND_LINE = {"model", "distributed_executor_backend", "scheduler_cls", "block_pool_cls", "ops"}
"""The model is no option, a server has only one backend; the others are code."""


def test_every_engine_option_can_be_given() -> None:
    assert list(ENGINE_VALUES) == list(serve.ENGINE_OPTIONS)
    assert {f.name for f in fields(EngineArgs)} == ENGINE_VALUES.keys() | NOT_FOR_A_COMMAND_LINE


@pytest.mark.parametrize("command", ["serve minicoder", "cluster serve minicoder"])
@pytest.mark.parametrize("name", ENGINE_VALUES)
def test_an_engine_option_reaches_the_engine_and_the_others_keep_its_defaults(command: str, name: str) -> None:
    words, value = ENGINE_VALUES[name]
    plain = serve.engine_args(parser().parse_args(command.split()), EngineArgs)
    assert plain == EngineArgs("minicoder") and getattr(plain, name) != value
    given = serve.engine_args(parser().parse_args([*command.split(), *words.split()]), EngineArgs)
    assert given == EngineArgs("minicoder", **{name: value})


@pytest.fixture
def own_logger() -> Iterator[logging.Logger]:
    """minillm's logger, which is as it was after the test."""
    logger = logging.getLogger("minillm")
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("installed", "own_logger")
def test_the_log_level_shows_what_is_ignored_in_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    from fastapi import FastAPI

    from minillm.serve.requests import CompletionRequest
    from minillm.serve.server import make_server

    for level, is_shown in (("debug", True), ("info", False), ("trace", True)):
        make_server(FastAPI(), None, None, level, access_log=False)
        CompletionRequest(prompt="a", field_of_the_future=1).check_fields("fcfs")
        assert ("a field 'field_of_the_future', which is ignored" in capsys.readouterr().err) == is_shown


@pytest.fixture
def open_files() -> Iterator[Any]:
    """The module `resource`. The limit of open files is as it was after the test."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield resource
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("installed")
def test_a_server_may_open_as_many_files_as_the_system_lets_it(open_files: Any) -> None:
    from minillm.serve.server import OPEN_FILES, allow_open_files

    _, hard = open_files.getrlimit(open_files.RLIMIT_NOFILE)
    open_files.setrlimit(open_files.RLIMIT_NOFILE, (256, hard))
    for _ in range(2):
        allow_open_files(1024)
        soft, kept = open_files.getrlimit(open_files.RLIMIT_NOFILE)
        assert kept == hard and soft == (OPEN_FILES if hard == open_files.RLIM_INFINITY else min(OPEN_FILES, hard))


@pytest.mark.usefixtures("installed", "own_logger")
@pytest.mark.parametrize(("num_requests", "is_too_few"), [(1024, True), (100, False)])
def test_too_few_open_files_for_the_queue_are_reported(
    open_files: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_requests: int,
    is_too_few: bool,
) -> None:
    from minillm.serve.server import allow_open_files

    with monkeypatch.context() as patch:
        patch.setattr(open_files, "getrlimit", lambda which: (256, 256))
        patch.setattr(open_files, "setrlimit", lambda *_: None)
        allow_open_files(num_requests)
    assert ("may open 256 files at once" in caplog.text) == is_too_few


@pytest.mark.usefixtures("installed", "own_logger")
def test_the_command_provides_for_as_many_open_files_as_its_queue_is_long(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("minillm.serve.server.allow_open_files", asked.append)
    monkeypatch.setattr("minillm.serve.server.Server.run", lambda server, sockets: sockets[0].close())
    words = ["--port", "0", "--device", "cpu", "--enforce-eager", "--max-num-queued-reqs", "700"]
    assert cli.main(["serve", str(tiny.target), *words]) == 0
    assert asked == [700]
