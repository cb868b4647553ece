"""The command line: help, mistakes, exit codes, and what each command hands over."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.sign import NotebookNotary

import minillm
from minillm import cli, complete
from minillm.bench.benchmarks import BENCHMARKS, find
from minillm.commands import bench, generate, grade, lab
from minillm.commands.parser import COMMANDS, parser
from minillm.errors import ConfigError, UnsupportedError
from minillm.teaching.build import Stale
from minillm.teaching.grading.one_submission import Rules
from minillm.teaching.grading.student_process import MODES
from minillm.teaching.guard import Limits
from minillm.teaching.notebook import to_text
from minillm.trace import Trace
from minillm.trace.request_metrics import RequestMetrics
from minillm.viz.terminal.two_engines import watch

ROOT = Path(minillm.__file__).parents[1]
NAMES = [command.name for command in COMMANDS]


def started(*args: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "minillm.cli", *args], cwd=ROOT, text=True, **options)


# --- help and mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_command_helps_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"examples:\n  minillm {name}" in capsys.readouterr().out


def test_help_lists_every_command_without_loading_anything_heavy():
    heavy = "{'torch', 'transformers', 'numpy', 'numba', 'rich', 'nbformat'} & set(sys.modules)"
    code = "import sys, minillm.cli\nfrom minillm.commands.parser import parser\nprint(parser().format_help())\n"
    code += f"sys.exit(str({heavy} or 0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.stderr.strip() == "0"
    assert all(f"    {name} " in done.stdout for name in NAMES)


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"minillm {minillm.__version__}\n"


def test_python_runs_the_package_as_the_command():
    command = [sys.executable, "-m", "minillm", "--version"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"minillm {minillm.__version__}\n")


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["doctor", "--no-such-option"], ["bench", "nothing"]])
def test_unknown_words_are_refused_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: minillm" in capsys.readouterr().err


def test_half_an_option_is_not_guessed(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--meas"])
    assert "--meas" in capsys.readouterr().err


def test_mistake_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["generate", "x", "--num-speculative-tokens", "3"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "minillm: --num-speculative-tokens 3 needs --draft MODEL or --speculative-method METHOD\n"
    assert printed.out == ""


def test_mistake_found_by_the_engine_is_one_line_too(capsys):
    assert cli.main(["generate", "x", "--model", "no-such-model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minillm: ")
    assert error.count("\n") == 1
    assert "no-such-model" in error


def test_bug_of_our_own_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(lab, "lessons_folder", lambda copies, lesson: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["lab"])


def test_interrupt_exits_with_130_and_no_traceback(monkeypatch, capsys):
    def stop(copies: Path, lesson: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "lessons_folder", stop)
    assert cli.main(["lab"]) == 130
    assert capsys.readouterr().err == "minillm: interrupted\n"


PRINTS_JSON = """
import sys
from minillm import cli
from minillm.doctor import doctor, report
doctor.doctor = lambda measure: report.Report(())
sys.exit(cli.main(["doctor", "--json"]))
"""


def test_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-c", PRINTS_JSON]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


PRINTS_A_TABLE = """
import sys
from minillm import cli
from minillm.commands import bench
bench.find, bench.find_table = lambda name: lambda: {}, lambda name: str
sys.exit(cli.main(["bench", "decode"]))
"""


def test_reader_that_has_seen_enough_of_a_table_is_no_error():
    command = [sys.executable, "-c", PRINTS_A_TABLE]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_a_mistake_is_reported_although_nobody_reads_the_output(tmp_path):
    words = ["lab", "99", "--no-open", "--dir", str(tmp_path / "new")]
    process = started(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read().startswith("minillm: no lesson '99'")
    assert process.wait() == 2


def test_a_broken_pipe_that_is_not_the_output_is_an_error(monkeypatch, capfd):
    def lose(copies: Path, lesson: str) -> Path:
        print("so far")
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(lab, "lessons_folder", lose)
    assert cli.main(["lab"]) == 2
    assert capfd.readouterr() == ("so far\n", "minillm: Broken pipe\n")


# --- generate --------------------------------------------------------------------------------------------------------


def test_generate_prints_text_to_stdout_and_its_cost_to_stderr(capsys):
    assert cli.main(["generate", "def fib(n):", "--max-tokens", "5"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("def fib(n):")
    assert len(printed.out) > len("def fib(n):\n")
    assert printed.err.splitlines()[-1].startswith("5 tokens, first after ")  # a first start compiles, and says so


def test_streamed_text_is_the_same_text(capsys):
    cli.main(["generate", "def fib(n):", "--max-tokens", "8"])
    whole = capsys.readouterr().out
    cli.main(["generate", "def fib(n):", "--max-tokens", "8", "--stream"])
    assert capsys.readouterr().out == whole


def test_draft_changes_the_cost_and_not_the_text(capsys):
    cli.main(["generate", "def fib(n):", "--max-tokens", "8"])
    plain = capsys.readouterr()
    cli.main(["generate", "def fib(n):", "--max-tokens", "8", "--draft", "minicoder-draft"])
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert "drafts accepted" in drafted.err
    assert "drafts accepted" not in plain.err


def test_sampling_options_reach_the_engine(monkeypatch):
    seen = {}

    def fake_llm(model: str, **options: object) -> SimpleNamespace:
        def answer(prompts: list[str], params: object, use_tqdm: bool) -> list[SimpleNamespace]:
            seen.update(model=model, options=options, prompts=prompts, params=params)
            return [SimpleNamespace(outputs=[SimpleNamespace(text="")], metrics=RequestMetrics())]

        return SimpleNamespace(generate=answer)

    monkeypatch.setattr("minillm.llm.LLM", fake_llm)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    words = "generate - --model m --dtype float32 --device cpu --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3"
    cli.main([*words.split(), "--seed", "4", "--stop", "a", "--stop", "b", "--draft", "d"])
    params = seen["params"]
    assert (seen["model"], seen["prompts"]) == ("m", ["from stdin"])
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 3)
    assert (params.seed, params.stop) == (4, ("a", "b"))
    assert seen["options"] == {
        "dtype": "float32",
        "device": "cpu",
        "speculative_config": {"method": "draft_model", "model": "d"},
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["--draft", "d"], {"method": "draft_model", "model": "d"}),
        (
            ["--speculative-method", "ngram", "--num-speculative-tokens", "2"],
            {"method": "ngram", "num_speculative_tokens": 2},
        ),
    ],
)
def test_generate_says_how_to_draft(words, expected, monkeypatch):
    seen = {}

    def fake_llm(model, **options):
        seen.update(options)
        raise ConfigError("enough")

    monkeypatch.setattr("minillm.llm.LLM", fake_llm)
    assert cli.main(["generate", "x", *words]) == 2
    assert seen["speculative_config"] == expected


@pytest.mark.parametrize("words", [["--speculative-method", ""], ["--draft", ""]], ids=str)
def test_an_empty_name_is_not_plain_decoding(words, monkeypatch):
    def fake_llm(model, speculative_config, **_):
        assert speculative_config
        raise ConfigError("enough")

    monkeypatch.setattr("minillm.llm.LLM", fake_llm)
    assert cli.main(["generate", "x", *words]) == 2


def test_a_bad_sampling_option_is_found_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("minillm.llm.LLM", lambda *_, **__: pytest.fail("it loaded the model"))
    assert cli.main(["generate", "x", "--temperature", "-1"]) == 2
    assert "temperature=-1.0" in capsys.readouterr().err


def test_cost_says_only_what_is_known():
    assert generate.cost(RequestMetrics()) == "0 tokens"
    known = RequestMetrics(first_token_time=0.5, decoding_time=1.0, num_output_tokens=11, num_first_tokens=1)
    known.num_decode_forwards, known.num_decode_tokens, known.num_drafts, known.num_accepted = 4, 10, 16, 8
    speed = "11 tokens, first after 500 ms, then 10 per second"
    expected = f"{speed}, 50% of 16 drafts accepted, 2.50 tokens per target forward"
    assert generate.cost(known) == expected


# --- lab -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package as pip installs it: lessons inside, no clone around."""
    package = tmp_path / "site-packages" / "minillm"
    (package / "_lessons").mkdir(parents=True)
    (package / "_lessons" / "00_tour.ipynb").write_text("shipped tour")
    (package / "_lessons" / "02_kv_cache.ipynb").write_text("shipped cache")
    (package / "_lessons" / "glossary.md").write_text("words")
    return package


def test_lab_copies_lessons_out_of_an_installed_package(installed, tmp_path):
    folder = lab.lessons_folder(tmp_path / "mine", installed)
    assert (folder / "00_tour.ipynb").read_text() == "shipped tour"
    assert (folder / "glossary.md").exists()


def test_lab_never_overwrites_a_learners_work(installed, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "02_kv_cache.ipynb").write_text("my answers")
    (mine / "notes.txt").write_text("my notes")
    for _ in range(2):
        lab.lessons_folder(mine, installed)
    assert (mine / "02_kv_cache.ipynb").read_text() == "my answers"
    assert (mine / "notes.txt").read_text() == "my notes"
    assert (mine / "00_tour.ipynb").read_text() == "shipped tour"
    assert capsys.readouterr().out.splitlines()[-1].startswith("Left 3 files as they were")


def test_lab_does_not_write_through_a_link(installed, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    elsewhere = tmp_path / "elsewhere.ipynb"
    (mine / "00_tour.ipynb").symlink_to(elsewhere)
    lab.lessons_folder(mine, installed)
    assert not elsewhere.exists()


@pytest.mark.parametrize("problem", [OSError(28, os.strerror(28)), KeyboardInterrupt()])
def test_lab_copies_a_lesson_again_that_it_could_not_write_to_the_end(problem, installed, tmp_path, monkeypatch):
    class CutOff(io.FileIO):
        def write(self, data):
            super().write(data[:3])
            raise problem

    lessons, mine = installed / "_lessons", tmp_path / "mine"
    with monkeypatch.context() as patch, pytest.raises(type(problem)):
        patch.setattr(Path, "open", lambda path, mode="r", *_, **__: CutOff(path, mode))
        lab.copy_new(lessons, mine)
    assert lab.copy_new(lessons, mine) == (3, 0)
    assert (mine / "00_tour.ipynb").read_text() == "shipped tour"


def test_lab_copies_no_solutions_unless_they_are_asked_for(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "trust_copies", lambda source, target: None)
    (installed / "_solutions").mkdir()
    (installed / "_solutions" / "02_kv_cache.ipynb").write_text("solved, see ../lessons/glossary.md")
    folder = lab.lessons_folder(tmp_path / "mine", installed)
    assert not [path for path in folder.rglob("*") if "solve" in path.name or "solved" in path.name]
    solved = lab.solutions_folder(folder, installed)
    assert solved == folder / "solutions"
    assert (solved / "02_kv_cache.ipynb").read_text() == "solved, see ../glossary.md"


def test_lab_says_when_a_package_carries_no_solved_lessons(installed, tmp_path):
    with pytest.raises(UnsupportedError, match="no solved lessons"):
        lab.solutions_folder(tmp_path, installed)


def test_lab_copies_in_a_clone_too(tmp_path, monkeypatch):
    for folder in ("lessons", "solutions", "lessons/.ipynb_checkpoints", "lessons/minillm-lessons"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "00_tour.ipynb").write_text(folder)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(lab, "trust_copies", lambda source, target: None)
    monkeypatch.chdir(tmp_path)
    folder = lab.lessons_folder(None, tmp_path / "minillm")
    assert folder == tmp_path / "minillm-lessons"
    assert [file.name for file in folder.iterdir()] == ["00_tour.ipynb"]
    assert (folder / "00_tour.ipynb").read_text() == "lessons"
    assert (lab.solutions_folder(folder, tmp_path / "minillm") / "00_tour.ipynb").read_text() == "solutions"


def test_jupyterlab_trusts_solved_lessons_as_they_were_copied(tmp_path, monkeypatch):
    """What it does not trust it shows without pictures."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    folder = lab.lessons_folder(tmp_path / "mine")
    changed, kept = (folder / "solutions" / name for name in ("00_tour.ipynb", "02_kv_cache.ipynb"))
    changed.parent.mkdir()
    changed.write_text(to_text(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])))
    lab.solutions_folder(folder)
    notary = NotebookNotary()
    with closing(notary.store):
        trusted = [notary.check_signature(nbformat.read(file, as_version=4)) for file in (changed, kept)]
    assert trusted == [False, True]


def test_solved_lessons_are_copied_where_jupyter_cannot_keep_what_it_trusts(tmp_path, monkeypatch, capsys):
    (tmp_path / "jupyter").touch()
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    folder = lab.lessons_folder(tmp_path / "mine")
    assert (lab.solutions_folder(folder) / "00_tour.ipynb").exists()
    assert "only after File, Trust Notebook" in capsys.readouterr().out


def test_lab_copies_into_its_own_folder_if_none_is_named(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lab.lessons_folder(None, installed) == tmp_path / "minillm-lessons"


def test_lab_says_when_a_package_carries_no_lessons(tmp_path):
    with pytest.raises(UnsupportedError, match="carries no lessons"):
        lab.lessons_folder(tmp_path / "mine", tmp_path / "minillm")


def test_lab_opens_the_first_lesson_or_the_one_asked_for(installed):
    lessons = installed / "_lessons"
    assert lab.find_lesson(lessons, "").name == "00_tour.ipynb"
    for name in ("2", "02", "02_kv"):
        assert lab.find_lesson(lessons, name).name == "02_kv_cache.ipynb"
    (lessons / "10_later.ipynb").touch()
    with pytest.raises(ConfigError, match="no lesson '1'"):
        lab.find_lesson(lessons, "1")
    (lessons / "10_later.ipynb").unlink()
    with pytest.raises(ConfigError, match=r"no lesson '99' .* 00_tour, 02_kv_cache"):
        lab.find_lesson(lessons, "99")


def test_lab_copies_nothing_for_a_lesson_that_is_not_there(installed, tmp_path):
    mine = tmp_path / "mine"
    with pytest.raises(ConfigError, match=r"no lesson '99' .* 00_tour, 02_kv_cache"):
        lab.lessons_folder(mine, installed, "99")
    assert not mine.exists()
    mine.mkdir()
    (mine / "99_my_own.ipynb").touch()
    assert lab.find_lesson(lab.lessons_folder(mine, installed, "99"), "99").name == "99_my_own.ipynb"


@pytest.mark.parametrize("option", ["--jupyter=--no-browser", "--complete"])
def test_lab_ignores_no_option(option, tmp_path, capsys):
    assert cli.main(["lab", "--no-open", option, "--dir", str(tmp_path / "new")]) == 2
    assert f"{option.partition('=')[0]} is for JupyterLab, which --no-open" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_lab_hands_the_notebook_and_options_to_jupyterlab(installed, monkeypatch):
    from jupyterlab.labapp import LabApp

    calls = []
    lessons = installed / "_lessons"
    monkeypatch.setattr(lab, "lessons_folder", lambda copies, lesson: lessons)
    monkeypatch.setattr(LabApp, "launch_instance", calls.append)
    assert cli.main(["lab", "02", "--jupyter=--no-browser", "--jupyter=--port=9000"]) == 0
    notebook, root = str(lessons / "02_kv_cache.ipynb"), f"--ServerApp.root_dir={lessons}"
    assert calls == [[notebook, root, "--no-browser", "--port=9000"]]


def test_lab_completes_code_only_if_it_is_asked_to(installed, monkeypatch):
    from jupyterlab.labapp import LabApp

    calls = []
    monkeypatch.setattr(lab, "lessons_folder", lambda copies, lesson: installed / "_lessons")
    monkeypatch.setattr(LabApp, "launch_instance", calls.append)
    monkeypatch.setenv("MINILLM_COMPLETE", "")
    assert cli.main(["lab"]) == 0 and not os.environ["MINILLM_COMPLETE"]
    assert cli.main(["lab", "--complete", "--jupyter=--port=9000"]) == 0 and os.environ["MINILLM_COMPLETE"]
    extension, front_end = "--ServerApp.jpserver_extensions=minillm.complete=True", str(complete.FRONT_END)
    assert calls[1] == [*calls[0], extension, f"--LabApp.extra_labextensions_path={front_end}", "--port=9000"]


def test_lab_without_jupyterlab_names_the_install_line(installed, monkeypatch, capsys):
    monkeypatch.setattr(lab, "lessons_folder", lambda copies, lesson: installed / "_lessons")
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["lab"]) == 2
    assert 'pip install "minillm-lessons[lab]"' in capsys.readouterr().err


# --- demo, build, train, bench ---------------------------------------------------------------------------------------


def test_demo_plays_at_the_pace_asked_for(monkeypatch):
    seen = {}
    monkeypatch.setattr("minillm.commands.side_by_side.run_demo", lambda **options: seen.update(options))
    assert cli.main(["demo", "--pause", "0.5"]) == 0
    assert seen == {"pause": 0.5}


def test_the_longest_pause_of_the_demo_is_one_that_its_screen_takes(monkeypatch):
    played = []
    monkeypatch.setattr(
        "minillm.commands.side_by_side.run_demo",
        lambda pause: watch({"plain": Trace()}, lambda: played.append(pause), pause=pause),
    )
    assert cli.main(["demo", "--pause", "60"]) == 0
    assert played == [60]


@pytest.mark.parametrize("pause", ["-1", "nan", "1e9", "60.1"])
def test_demo_refuses_a_pace_that_makes_no_sense(pause, capsys):
    assert cli.main(["demo", "--pause", pause]) == 2
    assert "--pause" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--secret-file", "x"], "--secret-file needs"),
        (["--secret-file", "x", "--classroom", "y"], "--secret-file needs"),
        (["--report", "x"], "--report needs"),
        (["--jobs", "2"], "--jobs needs"),
        (["--check", "--nbgrader", "x"], "--check cannot be combined"),
        (["--remeasure", "--check"], "--remeasure cannot be combined"),
        (["--mutants", "--otter", "x"], "--mutants cannot be combined"),
        (["--run", "--mutants"], "--run cannot be combined"),
        (["--mutants"], "--root cannot be combined with --mutants"),
    ],
    ids=str,
)
def test_build_ignores_no_option(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", *words, "--root", str(ROOT)]) == 2
    assert says in capsys.readouterr().err


def test_build_outside_a_clone_says_where_to_run_it(tmp_path, capsys):
    assert cli.main(["build", "--root", str(tmp_path)]) == 2
    assert "no folder 'solutions'" in capsys.readouterr().err


def test_build_check_fails_naming_what_is_stale(tmp_path, monkeypatch, capsys):
    (tmp_path / "solutions").mkdir()
    stale = [Stale(Path("lessons/02_kv_cache.ipynb"), "it is old", "minillm build 02")]
    calls = []

    def fake(root: Path, names: list[str] | None, check: bool, remeasure: bool) -> list[Stale]:
        calls.append((root, names, check, remeasure))
        return stale if check else []

    monkeypatch.setattr("minillm.teaching.build.build", fake)
    assert cli.main(["build", "--check", "--root", str(tmp_path)]) == 1
    assert "lessons/02_kv_cache.ipynb: it is old" in capsys.readouterr().err
    assert cli.main(["build", "02", "--root", str(tmp_path)]) == 0
    assert calls == [(tmp_path, None, True, False), (tmp_path, ["02"], False, False)]


def test_train_hands_its_options_over(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr("minillm.training.run.train", lambda **options: seen.update(options))
    words = ["train", "--stages", "corpus", "--target-minutes", "0.5", "--folder", str(tmp_path)]
    assert cli.main(words) == 0
    assert (seen["stages"], seen["target_minutes"], seen["folder"]) == (["corpus"], 0.5, tmp_path)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_in_the_list_exists(name):
    assert callable(find(name))


def test_bench_prints_a_table_and_keeps_the_json(monkeypatch, tmp_path, capsys):
    row = {"system": "plain", "baseline": None, "ratio": None, "ratio_min": None, "ratio_max": None}
    row |= {"tokens_per_s": 10.0, "p50_ms": 100.0, "peak_memory_bytes": None, "outputs_equal": None}
    fast = row | {"system": "fast", "baseline": "plain", "ratio": 2.5, "ratio_min": 2.25, "ratio_max": 2.75}
    fast |= {"outputs_equal": False, "peak_memory_bytes": 3_000_000}
    result = {"name": "decode", "hardware": {"cpu": {"name": "some chip"}}, "rows": [row, fast]}
    monkeypatch.setattr(bench, "find", lambda name: lambda: result)
    monkeypatch.setenv("COLUMNS", "140")
    file = tmp_path / "out.json"
    assert cli.main(["bench", "decode", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "2.50×" in printed
    assert "2.25 to 2.75" in printed
    assert "no" in printed
    assert '"fast"' in file.read_text()


def test_bench_keeps_the_json_if_its_table_cannot_be_printed(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "find", lambda name: lambda: {"name": "decode"})
    monkeypatch.setattr(bench, "find_table", lambda name: str)
    monkeypatch.setattr("rich.console.Console.print", full)
    file = tmp_path / "out.json"
    assert cli.main(["bench", "decode", "--json", str(file)]) == 2
    assert '"decode"' in file.read_text()


def test_bench_checks_where_to_write_before_it_measures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "find", lambda name: pytest.fail("measured first"))
    assert cli.main(["bench", "decode", "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_every_option_of_grade_is_a_rule(tmp_path):
    def rules(*words: str) -> Rules:
        return grade.rules_of(parser().parse_args(["grade", "submissions", "--out", "report", *words]))

    assert rules() == Rules(Limits(seconds=10.0, memory=2 << 30), 60.0, (), b"")
    secret = tmp_path / "secret"
    secret.write_text("a secret of a whole course\n")
    given = ["--seconds", "3", "--memory", "0.5", "--wall-seconds", "7", "--lessons", "10", "2"]
    assert rules(*given, "--secret-file", str(secret)) == Rules(
        Limits(seconds=3.0, memory=1 << 29), 7.0, ("l10", "l02"), b"a secret of a whole course"
    )
    assert grade.ISOLATION == MODES


def test_a_lesson_is_graded_once_however_often_and_however_it_is_named():
    def lessons(*names: str) -> tuple[str, ...]:
        return grade.rules_of(
            parser().parse_args(["grade", "submissions", "--out", "report", "--lessons", *names])
        ).lessons

    assert lessons("2", "02", "l02", "02_kv_cache", "10") == ("l02", "l10")
    for unknown in ("100", "99", "x"):
        with pytest.raises(ConfigError, match=f"--lessons {unknown}: there is no such lesson"):
            lessons(unknown)
