"""`minillm quantize`: what it writes, what it says, and what it refuses before it does any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from minillm import LLM, SamplingParams, cli
from minillm.commands import quantize
from minillm.quantization.schemes import SCHEMES
from tests.conftest import TinyPair


def test_help_names_every_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(quantize.SCHEMES) == set(SCHEMES)
    with pytest.raises(SystemExit):
        cli.main(["quantize", "--help"])
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in SCHEMES)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("int8", []), ("w8a8", []), ("int4", ["--group-size", "16"]), ("awq", ["--bits", "3"]), ("squeezellm", [])],
)
def test_what_it_writes_runs(scheme: str, options: list[str], tiny: TinyPair, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert cli.main(["quantize", str(tiny.target), "--scheme", scheme, "--out", str(out), *options]) == 0
    printed = capsys.readouterr()
    assert f"Load it with LLM('{out}')." in printed.out
    assert "quantising: 100%" in printed.err
    assert ("calibrating: 100%" in printed.err) is (scheme in ("awq", "squeezellm"))
    llm = LLM(str(out))
    linear = llm.engine.runner.model.layers[0].qkv_proj
    assert linear.scheme.method == scheme
    assert [linear.scheme.bits] == [3 if options[:1] == ["--bits"] else 8 if "8" in scheme else 4]
    [output] = llm.generate("def add(a, b):", SamplingParams(max_tokens=4), use_tqdm=False)
    assert output.outputs[0].token_ids


def test_it_prints_the_bytes_of_the_file(tiny: TinyPair, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "out"
    cli.main(["quantize", str(tiny.target), "--scheme", "int4", "--out", str(out)])
    printed = capsys.readouterr().out
    before, after = (
        sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
        for folder in (tiny.target, out)
    )
    [total] = [line for line in printed.splitlines() if "│ all " in line]
    assert f"{before:,}" in total and f"{after:,}" in total and f"{before / after:.2f}×" in total
    assert "zero points" in printed


@pytest.mark.parametrize("exists", [True, False])
def test_the_folder_that_is_written_to_must_be_writable(
    exists: bool, tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point may be writable where the folder that it is in is not."""
    out, checked = tmp_path / "out", []
    if exists:
        out.mkdir()
    monkeypatch.setattr(quantize, "check_writable", lambda option, folder: checked.append(folder))
    assert cli.main(["quantize", str(tiny.target), "--scheme", "int8", "--out", str(out)]) == 0
    assert checked == [out if exists else tmp_path]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--scheme", "int5"], "'int5' is not available; there are: int8, w8a8, int4, awq, squeezellm"),
        (["--scheme", "int8", "--group-size", "64"], "scheme 'int8' has no such option"),
        (["--scheme", "int4", "--bits", "3"], "bits=3"),
        (["--scheme", "awq", "--group-size", "7"], "group_size=7 must be a multiple of 8"),
        (["--scheme", "int8", "--out", "{taken}"], "already exists and is not empty"),
        (["--scheme", "int8", "--out", "{tmp}/no/out"], "there is no folder"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_loaded(
    argv: list[str], words: str, tiny: TinyPair, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("minillm.export.write_quantized.load_model", lambda *_: pytest.fail("loaded first"))
    argv = [word.format(taken=tiny.draft, tmp=tmp_path) for word in argv]
    out = [] if "--out" in argv else ["--out", str(tmp_path / "out")]
    assert cli.main(["quantize", str(tiny.target), *argv, *out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minillm: ") and error.count("\n") == 1 and words in error
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys) -> None:
    assert cli.main(["quantize", "no-such-model", "--scheme", "int8", "--out", str(tmp_path / "out")]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_scheme_and_a_folder_are_asked_for(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["quantize", "minicoder"])
    assert stopped.value.code == 2
    assert "--scheme, --out" in capsys.readouterr().err
