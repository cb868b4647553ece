"""Where a command writes to may be closed, full, gone or unable to show ✓, γ and é: one line is said, or `?` shown."""

from __future__ import annotations

import errno
import io
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO
from unittest.mock import patch

import pytest

from minillm import cli
from minillm.commands import lab
from minillm.commands.parser import COMMANDS
from minillm.commands.streams import check_streams, close_quietly, reader_has_left
from tests.conftest import TinyPair

FULL = Path("/dev/full")
STREAMS = ("stdin", "stdout", "stderr")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


class Written(io.TextIOWrapper):
    """A terminal of some encoding that remembers what it was sent."""

    def __init__(self, encoding: str = "ascii") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)


@contextmanager
def terminal(out: TextIO | None = None) -> Iterator[tuple[Written, Written]]:
    """Standard output and error that can show ASCII alone; or a standard output of one's own."""
    shown, said = out or Written(), Written()
    with patch.object(sys, "stdout", shown), patch.object(sys, "stderr", said):
        yield shown, said


@contextmanager
def full_disk() -> Iterator[Written]:
    """Standard output on a full disk; gives what is said on standard error."""
    with FULL.open("w") as stream, terminal(stream) as (_, said):
        yield said


def started(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minillm.cli", *args]
    return subprocess.run(command, text=True, check=False, stdin=subprocess.DEVNULL, **options)


# --- what a terminal cannot show -------------------------------------------------------------------------------------


def test_what_can_be_shown_is_shown() -> None:
    latin, utf8 = Written("latin-1"), Written("utf-8")
    for stream in (latin, utf8):
        with terminal(stream):
            check_streams()
            print("é ✓ \udcff")
    assert latin.text == "é ? ?\n"
    assert utf8.text == "é ✓ ?\n"


@pytest.mark.parametrize("chosen", [None, "latin-1"])
def test_files_and_pipes_are_utf_8_unless_another_encoding_is_chosen(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own accord, Python takes that of the language of Windows."""
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if chosen:
        monkeypatch.setenv("PYTHONIOENCODING", chosen)
    encoding = chosen or "utf-8"
    streams = {name: io.TextIOWrapper(io.BytesIO("é ✓".encode()), encoding=chosen or "cp1252") for name in STREAMS}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    for _ in range(2):  # a second command in the same process
        check_streams()
        assert sys.stdin.read() in ("", "é ✓".encode().decode(encoding))
    print("é \udcff", flush=True)
    assert streams["stdout"].buffer.getvalue().startswith("é ?\n".encode(encoding))
    assert {stream.encoding for stream in streams.values()} == {encoding}


def test_what_is_not_utf_8_is_no_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 x"), encoding="cp1252"))
    assert cli.main(["generate", "-"]) == 2
    assert capsys.readouterr().err == "minillm: standard input is not utf-8; convert it\n"


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_generate_in_an_ascii_terminal(tiny: TinyPair, options: list[str]) -> None:
    words = ["generate", "# é ✓ naïve γ", "--model", str(tiny.target), "--max-tokens", "3", *options]
    with terminal() as (shown, _):
        assert cli.main(words) == 0
    assert shown.text.startswith("# ? ? na?ve ?")


def test_doctor_in_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.doctor.report import Report, Row

    rows = (Row("γ", "ok", "größer", "× …"), Row("b", "missing", "é", "m", "fix it"))
    monkeypatch.setattr(sys.modules["minillm.doctor.doctor"], "doctor", lambda measure: Report(rows))
    with terminal() as (shown, _):
        assert cli.main(["doctor"]) == 1
    assert "? ok       ?  gr??er" in shown.text and "? missing" in shown.text


def test_demo_in_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.commands.side_by_side.NEW_TOKENS", 4)
    with terminal() as (shown, _):
        assert cli.main(["demo"]) == 0
    assert "with a draft, ? = 3" in shown.text and "speed-up" in shown.text


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_help_in_an_ascii_terminal(name: str) -> None:
    with terminal() as (shown, _), pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0 and f"usage: minillm {name}" in shown.text


# --- what cannot be written ------------------------------------------------------------------------------------------


@needs_full
@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_generate_on_a_full_disk(tiny: TinyPair, options: list[str]) -> None:
    with full_disk() as said:
        assert cli.main(["generate", "x", "--model", str(tiny.target), "--max-tokens", "3", *options]) == 2
    assert said.text.endswith("minillm: No space left on device\n") and "Traceback" not in said.text


@needs_full
@pytest.mark.parametrize(
    "words",
    [["--version"], ["--help"], ["bench", "--help"], ["lab", "--no-open"], ["doctor"], ["doctor", "--json"], ["demo"]],
)
def test_every_command_says_that_the_disk_is_full(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.doctor.report import Report, Row

    report = Report((Row("a", "ok", "b", "c"),))
    monkeypatch.setattr(sys.modules["minillm.doctor.doctor"], "doctor", lambda measure: report)
    monkeypatch.setattr("minillm.commands.side_by_side.NEW_TOKENS", 2)
    with full_disk() as said:
        assert cli.main(words) == 2
    assert said.text == "minillm: No space left on device\n"


@needs_full
def test_nothing_more_is_said_at_the_end_of_the_process() -> None:
    """What could not be written is dropped, or Python would tell of it again, with an exit code of its own."""
    with FULL.open("w") as stream:
        done = started("--version", stdout=stream, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (2, "minillm: No space left on device\n")
        both = started("lab", "no-such-lesson", stdout=stream, stderr=stream)
    assert both.returncode == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_may_be_closed(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m minillm.cli lab --no-open --dir {tmp_path} {closed}"
    done = subprocess.run(["sh", "-c", command], text=True, capture_output=True, check=False)
    gone = ">&-" in closed.split() or closed.startswith(">")
    assert done.returncode == (2 if gone else 0)
    said = "minillm: standard output is closed; send it to a file, or to /dev/null\n"
    assert done.stderr == (said if gone and "2>" not in closed else "")


def test_a_prompt_from_a_closed_or_garbled_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["generate", "-"]) == 2
    assert capsys.readouterr().err == "minillm: standard input is closed; give the prompt itself instead of -\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert cli.main(["generate", "-"]) == 2
    assert capsys.readouterr().err == "minillm: standard input is not utf-8; convert it\n"


def test_an_input_without_end_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Endless(io.StringIO):
        def read(self, size: int = -1) -> str:
            assert 0 < size < 2**25, "it would be read for ever"
            return "x" * size

    monkeypatch.setattr(sys, "stdin", Endless())
    assert cli.main(["generate", "-"]) == 2
    assert "standard input has more than 16,777,216 characters" in capsys.readouterr().err


def test_a_reader_may_leave_at_any_byte() -> None:
    """As `minillm bench --help | head -c N` does."""
    whole = started("bench", "--help", stdout=subprocess.PIPE).stdout
    for wanted in (0, 1, len(whole) // 2):
        command = [sys.executable, "-m", "minillm.cli", "bench", "--help"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(wanted)
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


class PollOfMacOS:
    """It reports nothing of a file that is asked for nothing, and `POLLHUP` where Linux reports `POLLERR`."""

    def __init__(self, of_linux: select.poll) -> None:
        self.of_linux, self.events = of_linux, 0

    def register(self, stream: TextIO, events: int) -> None:
        self.events = events
        self.of_linux.register(stream, events)

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        found = self.of_linux.poll(milliseconds) if self.events else []
        return [(file, select.POLLHUP if events & select.POLLERR else events) for file, events in found]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="pipes of Windows cannot be asked")
@pytest.mark.parametrize("system", ["this", "macOS"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_reader_that_has_left_is_noticed_after_the_failed_write_too(
    size: int, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "macOS":
        poll = select.poll
        monkeypatch.setattr(select, "poll", lambda: PollOfMacOS(poll()))
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        assert not reader_has_left(stream)
        os.close(reading)
        with pytest.raises(BrokenPipeError):
            print("x" * size, file=stream, flush=True)
        assert reader_has_left(stream)
        close_quietly(stream)
    assert not reader_has_left(io.StringIO())


def test_on_windows_a_reader_that_has_left_may_be_an_invalid_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Problem(OSError):
        winerror: int | None = None

    problem = Problem(errno.EINVAL, "Invalid argument")

    def fail(_: object) -> int:
        raise problem

    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.setattr(cli, "_reader_has_left", lambda: True)
    monkeypatch.setattr(cli, "os", SimpleNamespace(name="nt"))
    assert (cli.main([]), capsys.readouterr().err) == (0, "")
    monkeypatch.setattr(problem, "winerror", 126)  # a library that Windows does not find: no pipe
    assert (cli.main([]), capsys.readouterr().err) == (2, "minillm: Invalid argument\n")
    monkeypatch.undo()
    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.setattr(cli, "_reader_has_left", lambda: True)
    monkeypatch.setattr(cli, "os", SimpleNamespace(name="posix"))
    assert (cli.main([]), capsys.readouterr().err) == (2, "minillm: Invalid argument\n")


@pytest.mark.parametrize("where", ["minillm.commands.parser.parser", "minillm.commands.streams.check_streams"])
def test_an_interrupt_while_it_starts_is_said_in_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, stop)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "minillm: interrupted\n"


# --- where nothing can be written ------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    return tmp_path / "file"


def one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert re.fullmatch(r"minillm: [^\n]+\n", printed.err), printed.err
    return printed.err


def impossible(file: Path) -> list[Path]:
    """A file, below a file, where the system allows nothing, and a name that is too long."""
    return [file, file / "below", Path("/proc/none"), file.parent / ("x" * 300)]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("command", "finds"),
    [
        (["lab", "--no-open", "--dir"], None),
        (["quantize", "minicoder", "--scheme", "int8", "--out"], "minillm.export.write_quantized.load_model"),
        (["export", "minicoder", "--gguf"], "minillm.export.gguf.load_model"),
        (["bench", "decode", "--json"], "minillm.commands.bench.find"),
        (["build", "--mutants", "l01.apply_rope", "--report"], "minillm.teaching.mutants.run"),
        (["book", "--no-run", "--out"], "minillm.book.site.build_book"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_out_before_any_work(
    command: list[str],
    finds: str | None,
    number: int,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = impossible(file)[number]
    if finds:
        monkeypatch.setattr(finds, lambda *_, **__: pytest.fail("it began to work"))
    if command[0] in ("bench", "build") and place == file:
        place = file.parent  # a result may be written over, and a folder may not
    assert str(place.parent) in one_line(capsys, [*command, str(place)])
    assert file.read_text() == "mine"


def test_a_result_that_may_not_be_overwritten_is_found_out_before_any_work(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.commands.bench.find", lambda *_: pytest.fail("it began to work"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file)  # to root the system allows everything
    assert "may not be overwritten" in one_line(capsys, ["bench", "decode", "--json", str(file)])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "words",
    [
        ["grade", "here", "--out", "report", "--secret-file", "here/02_pipe.ipynb"],
        ["serve", "minicoder", "--chat-template", "here/02_pipe.ipynb"],
        ["serve", "minicoder", "--chat-template", "/dev/zero"],
        ["progress", "here"],
    ],
)
def test_a_file_that_could_be_read_without_end_is_not_read(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    os.mkfifo(tmp_path / "here" / "02_pipe.ipynb")
    assert re.search("is not a regular file|has no notebook of a lesson", one_line(capsys, words))


def test_an_empty_host_is_not_every_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--host is empty" in one_line(capsys, ["serve", "minicoder", "--host", ""])


def test_a_disk_that_fills_up_while_lessons_are_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(lab, "copy_new", no_space)
    assert "No space left on device" in one_line(capsys, ["lab", "--no-open", "--dir", str(tmp_path / "new")])


# --- odd words -------------------------------------------------------------------------------------------------------

DEVICES = ["", " ", "cuda:99", "cuda:-1", "meta", "mps", "xla", "hpu", "vulkan", "privateuseone", "cpu:x", "\t", "🂡"]
MODELS = ["", ".", "/", "/dev/null", "~no-such-user/x", "~", "a\0b", "x" * 5000, "../..", "\udcff", "a/b/c", "-x"]
NUMBERS = ["-1", "1e9", "nan", "inf", "", "0x10", "9" * 5000, "١٢", "1_0", "-9" * 20, "1.5", "None"]
LINES: list[list[str]] = [
    *(["generate", "x", "--device", device] for device in DEVICES),
    *(["generate", "x", "--model", model] for model in MODELS),
    *(["generate", "x", f"--draft={model}"] for model in MODELS),
    *(["generate", "x", "--dtype", dtype] for dtype in ["", "float64", "int8", "auto ", "float8", "None", "__class__"]),
    *(["generate", "x", f"{option}={n}"] for option in ("--max-tokens", "--top-k", "--seed") for n in NUMBERS),
    *(["generate", "x", f"{option}={n}"] for option in ("--temperature", "--top-p") for n in ["-1", "nan", "-inf", ""]),
    *(["generate", "x", f"--num-speculative-tokens={n}"] for n in NUMBERS),
    *(["generate", "x", "--speculative-method", method] for method in ["", "ngram ", "eagle", "draft_model", "\udcff"]),
    *(["generate", prompt] for prompt in ["", "\udcff", "x " * 9000]),
    *(["generate"], ["generate", "x", "y"], ["generate", "--", "x", "y"], ["generate", "x", "--stop", ""]),
    *(["bench", "decode", f"--systems={names}"] for names in ["", ",", " , ", "no such", "minillm fp32,no", "\udcff"]),
    *(["bench", "kernels", f"--ops={names}"] for names in ["", ",", "no_such_op"]),
    *(["bench", "gpu", f"--stages={names}"] for names in ["", ",", "no_such_stage"]),
    *(["bench", "decode", f"{option}={n}"] for option in ("--rounds", "--prompts", "--drafts", "--new-tokens")
      for n in ["0", "-1", "", "x", "1.5", "nan"]),
    *(["bench", "decode", "--shape", shape] for shape in ["", "7b", "../x"]),
    *(["bench", name] for name in ["", "all", "../decode", "__init__"]),
    *(["demo", f"--pause={n}"] for n in ["-1", "nan", "inf", "61", "x", "", "1e9"]),
    *(["lab", name, "--no-open"] for name in ["99", "..", "\0", "x" * 5000, "\udcff"]),
    *(["quantize", model, "--scheme", "int8", "--out", "no/such"] for model in ["minicoder", "no-such"]),
    *(["quantize", "minicoder", "--scheme", scheme, "--out", "new"] for scheme in ["", "int3", "none", "INT8"]),
    *(["quantize", "minicoder", "--scheme", "int4", "--out", "new", f"{option}={n}"]
      for option in ("--bits", "--group-size") for n in ["0", "-8", "7", "9" * 30, "x", "", "1.5"]),
    *(["export", model, "--gguf", "no/such.gguf"] for model in ["minicoder", "", "no-such"]),
    *(["build", *words] for words in (["99"], ["--root", "/no/such"], ["--root", ""], ["--check", "\0"], ["../x"])),
    *(["train", "--stages", *words] for words in ([], ["none"], [""], ["corpus", "x"])),
    *(["train", f"--{stage}-minutes={n}"] for stage in ("target", "draft", "distill") for n in ["0", "-1", "nan", ""]),
    *(["grade", "here", "--out", "report", f"{option}={n}"]
      for option in ("--seconds", "--wall-seconds", "--memory", "--alike") for n in ["0", "-1", "nan", "inf", "1e300"]),
    *(["serve", "minicoder", f"--speculative-config={raw}"]
      for raw in ["", "{", "[]", "7", "[" * 50_000, '{"a":' * 20_000, '{"method": 7}', '{"method": "suffix", "a": 1}']),
    *(["train", "--stages", "export", f"--threads={n}"] for n in ["0", "-1", "99999999999", "x", ""]),
    *([], [""], ["-"], ["--"], ["--no"], ["doctor", "x"], ["doctor", "--json=1"], ["Doctor"], ["\udcff"]),
]  # fmt: skip


def test_there_are_lines_enough() -> None:
    assert len(LINES) >= 200


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", LINES, ids=[f"{i}-{ascii(line)[1:40]}" for i, line in enumerate(LINES)])
def test_an_odd_command_line_is_answered_by_one_line_or_usage(
    words: list[str],
    tiny: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is measured, trained, built or quantised for them; where they make sense after all, they run."""
    monkeypatch.chdir(tmp_path)
    if words[:1] == ["generate"] and not any(word.startswith("--model") for word in words):
        words = [*words[:1], "--model", str(tiny.target), *words[1:]]
    wrong: Callable[..., None] = lambda *_, **__: pytest.fail("it began to work")  # noqa: E731
    for work in ("minillm.training.run.train", "minillm.export.write_quantized.load_model"):
        monkeypatch.setattr(work, wrong)
    try:
        code = cli.main(words)
    except SystemExit as stopped:
        code = stopped.code
        assert code == 2 and "usage: minillm" in capsys.readouterr().err
    else:
        error = capsys.readouterr().err
        assert code in (0, 2)
        assert code == 0 or re.fullmatch(r"(Loading[^\n]*\n)?minillm: [^\n]{1,700}\n", error), error
