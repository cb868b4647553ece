"""`minillm serve`: its options, and what it refuses before it loads a model."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from minillm import cli
from minillm.commands import serve
from minillm.commands.parser import parser
from minillm.config import EngineArgs


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
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    monkeypatch.setattr(serve, "NEEDED", ("argparse", "uvicorn"))
    assert refusal(capsys) == "minillm: uvicorn is not installed; run: pip install 'minillm-lessons[serve]'\n"


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


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_speculative_config_is_a_json_object(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "minicoder", "--speculative-config", text])
    assert "--speculative-config" in capsys.readouterr().err


def test_every_engine_option_is_one_of_the_engine_and_defaults_are_its_own() -> None:
    args = parser().parse_args(["serve", "minicoder"])
    assert serve.engine_args(args, EngineArgs) == EngineArgs("minicoder")
    words = [
        "--max-model-len",
        "64",
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "-q",
        "int8",
        "--block-size",
        "8",
    ]
    words += ["--speculative-config", '{"method": "suffix"}']
    args = parser().parse_args(["serve", "minicoder", *words])
    assert serve.engine_args(args, EngineArgs) == EngineArgs(
        "minicoder",
        max_model_len=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        quantization="int8",
        block_size=8,
        speculative_config={"method": "suffix"},
    )
