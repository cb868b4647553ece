"""The doctor tells the truth about machines that this one is not."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import minillm
from minillm.doctor import checks
from minillm.doctor.doctor import doctor
from minillm.doctor.import_probe import Answer, forget
from minillm.doctor.report import Report, Row
from minillm.hardware import Cpu, Gpu, Memory
from minillm.ops import dispatch

T4 = Gpu("Tesla T4", (7, 5), 15 * 2**30, 14 * 2**30)
H100 = Gpu("NVIDIA H100", (9, 0), 80 * 2**30, 79 * 2**30)
P100 = Gpu("Tesla P100", (6, 0), 16 * 2**30, 15 * 2**30)
V100 = Gpu("Tesla V100", (7, 0), 16 * 2**30, 15 * 2**30)
MI300X = Gpu("AMD Instinct MI300X", (9, 4), 192 * 2**30, 190 * 2**30)
"""PyTorch for ROCm gives AMD's architecture as a compute capability."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretend that PyTorch sees this GPU, or none."""

    def pretend(card: Gpu | None) -> None:
        monkeypatch.setattr(checks, "gpu", lambda: card)
        monkeypatch.setattr(checks, "unusable_reason", lambda device: None)
        if card is not None:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card.capability)

    return pretend


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Pretend that importing a package raises this error."""

    def pretend(package: str, problem: Exception) -> None:
        really = importlib.import_module

        def fake(name: str, *args: object) -> object:
            if name == package:
                raise problem
            return really(name, *args)

        monkeypatch.setattr(importlib, "import_module", fake)

    return pretend


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Put another package in the place of one: what its file says when it is imported."""

    def put(package: str, code: str) -> None:
        (tmp_path / f"{package}.py").write_text(code)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    return put


def test_every_finding_says_what_it_means_and_how_to_fix_what_is_missing():
    for finding in doctor().rows:
        assert finding.status in ("ok", "limited", "missing")
        assert finding.found
        assert finding.meaning.endswith(".")
        assert finding.fix or finding.status != "missing", finding


def test_without_gpu_everything_still_runs(on_gpu):
    on_gpu(None)
    assert checks.device().status == "limited"
    assert "CPU" in checks.device().found
    assert checks.dtype().found == "float32"
    assert "interpreter" in checks.triton().found
    assert all(row.status != "missing" for row in (checks.device(), checks.dtype(), checks.triton()))


def test_dtype_row_agrees_with_the_engine_on_a_cpu(on_gpu):
    from minillm.engine.placement import choose_dtype
    from minillm.models import bundled
    from minillm.models.loading import load_config

    on_gpu(None)
    chosen = choose_dtype("auto", torch.device("cpu"), load_config(bundled.path("minicoder")))
    assert checks.dtype().found == str(chosen).removeprefix("torch.")


def test_t4_is_told_that_it_has_no_bfloat16_and_that_triton_may_refuse(on_gpu):
    on_gpu(T4)
    assert "sm_75" in checks.device().found
    assert checks.dtype().status == "limited"
    assert "float16" in checks.dtype().found
    assert checks.triton().status == "limited"


def test_new_gpu_is_not_limited(on_gpu):
    on_gpu(H100)
    assert {checks.device().status, checks.dtype().status, checks.triton().status} == {"ok"}


@pytest.mark.parametrize(("card", "hip"), [(P100, None), (V100, None), (MI300X, "6.4")])
def test_a_gpu_without_kernels_is_told_so_in_every_row(on_gpu, monkeypatch, card, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    on_gpu(card)
    assert checks.machine().endswith(f" · {card.name}, {card.architecture} · PyTorch operations")
    row = checks.triton()
    assert row.status == "limited" and row.found.endswith(f"not for {card.name}") and "uses PyTorch" in row.meaning
    assert checks.kernels().found.startswith("0 of")


def test_a_gpu_without_free_memory_is_limited(on_gpu):
    on_gpu(replace(H100, free=0))
    row = checks.device()
    assert row.status == "limited" and "0.0 GiB of 80.0 GiB free" in row.found and "device='cpu'" in row.fix


def test_a_gpu_that_pytorch_has_no_code_for_is_limited(on_gpu, monkeypatch):
    on_gpu(P100)
    monkeypatch.setattr(checks, "unusable_reason", lambda device: "CUDA error: no kernel image is available")
    row = checks.device()
    assert row.status == "limited" and P100.name in row.found
    assert row.meaning.startswith("The engine runs on the CPU")
    assert row.meaning.endswith("cannot use this GPU: CUDA error: no kernel image is available.")
    assert " · CPU, " in checks.machine()


@pytest.mark.parametrize(("cuda", "hip", "build"), [("12.8", None, "CUDA 12.8"), (None, "6.4", "ROCm 6.4")])
def test_the_library_that_pytorch_was_built_for_is_named(monkeypatch, cuda, hip, build):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert checks.pytorch().found.endswith(f", {build}")


@pytest.mark.parametrize(
    ("packages", "version"), [({"triton": ["triton-windows"]}, "3.4.0.post1"), ({}, "unknown version")]
)
def test_triton_from_a_package_of_another_name_has_its_version(on_gpu, instead, monkeypatch, packages, version):
    def version_of(name: str) -> str:
        if name != "triton-windows":
            raise metadata.PackageNotFoundError(name)
        return "3.4.0.post1"

    on_gpu(H100)
    instead("triton", "")
    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: packages)
    assert checks.triton().found == f"{version}, on sm_90"


@pytest.mark.parametrize(
    ("card", "has_triton", "status", "words"),
    [
        (H100, True, "ok", ["sm_90", "Every operation"]),
        (T4, True, "limited", ["sm_75", "PyTorch runs the others, correct but slower: w8a8_linear."]),
        (H100, False, "limited", ["0 of", "PyTorch operations instead"]),
    ],
)
def test_kernels_are_those_that_the_dispatch_chooses(on_gpu, monkeypatch, card, has_triton, status, words):
    on_gpu(card)
    monkeypatch.setattr(dispatch, "has_triton", lambda: has_triton)
    row = checks.kernels()
    assert row.status == status
    assert all(word in f"{row.found} {row.meaning}" for word in words), row


def test_kernels_are_no_row_without_a_gpu(on_gpu):
    on_gpu(None)
    assert "GPU kernels" not in {row.name for row in checks.run_checks()}
    on_gpu(H100)
    assert "GPU kernels" in {row.name for row in checks.run_checks()}


def test_missing_triton_has_a_fix_only_where_it_can_be_installed(instead, monkeypatch):
    instead("triton", "raise ModuleNotFoundError")
    monkeypatch.setattr(sys, "platform", "linux")
    row = checks.triton()
    assert (row.status, row.found, row.fix) == ("missing", "not installed", "pip install triton")
    assert row.meaning.startswith("Lessons 8 and 9 do not run;")
    monkeypatch.setattr(sys, "platform", "darwin")
    row = checks.triton()
    assert (row.status, row.fix, row.trouble) == ("limited", "", False)
    assert row.meaning.startswith("Lessons 8 and 9 do not run;") and "WSL" in row.found


def test_missing_numba_says_which_lesson_does_not_run(instead):
    instead("numba", "raise ModuleNotFoundError")
    row = checks.numba()
    assert (row.status, row.fix) == ("missing", "pip install numba")
    assert row.meaning.startswith("Lesson 15 does not run;")


def openmp_layer(monkeypatch: pytest.MonkeyPatch, beside_torch: str) -> None:
    """Pretend that numba's OpenMP layer finds no library alone, and has this problem beside PyTorch."""

    def ask(*questions: str) -> dict[str, Answer]:
        others = Answer("", {"unsupported_reason": None, "byte_products": "sdot"})
        layer = Answer(beside_torch if "torch" in questions else "broken: Library not loaded: @rpath/libomp.dylib")
        return dict.fromkeys(questions, others) | {checks.OPENMP: layer}

    monkeypatch.setattr(checks, "ask", ask)


@pytest.mark.parametrize(("system", "fix"), [("linux", "install libgomp"), ("darwin", "")])
def test_a_missing_openmp_library_has_a_fix_only_where_it_can_be_installed(monkeypatch, system, fix):
    """On a Mac a second library would end the process that has PyTorch's."""
    openmp_layer(monkeypatch, beside_torch="broken: Library not loaded: @rpath/libomp.dylib")
    monkeypatch.setattr(sys, "platform", system)
    row = checks.numba()
    assert (row.status, row.fix, row.trouble) == ("limited", fix, bool(fix))
    assert "no OpenMP layer" in row.found


def test_the_openmp_library_of_pytorch_is_enough(monkeypatch):
    openmp_layer(monkeypatch, beside_torch="")
    assert checks.numba().status == "ok"


def test_missing_pytorch_is_reported_not_raised(without):
    without("torch", ModuleNotFoundError("No module named 'torch'"))
    report = doctor()
    assert not report.healthy
    assert [row.fix for row in report.rows if row.name == "PyTorch"] == ["pip install torch"]


def test_broken_install_is_told_from_a_missing_one(instead):
    instead("numba", "raise OSError('libsomething.so: cannot open\\nsecond line')")
    assert checks.numba().found == "numba is broken: libsomething.so: cannot open"
    assert checks.numba().fix == "pip install --force-reinstall numba"


@pytest.mark.parametrize(("system", "also"), [("linux", ""), ("win32", ", and the Visual C++ Redistributable")])
def test_a_broken_pytorch_is_installed_again(without, monkeypatch, system, also):
    without("torch", OSError("a library cannot be loaded"))
    monkeypatch.setattr(sys, "platform", system)
    assert checks.pytorch().fix.startswith(f"pip install --force-reinstall torch{also}")
    without("torch", ModuleNotFoundError("No module named 'torch'"))
    assert checks.pytorch().fix == "pip install torch"


def test_an_install_that_ends_the_process_is_told(instead):
    instead("numba", "import os; os._exit(7)")
    assert checks.triton().found.startswith(checks.metadata.version("triton"))
    assert checks.numba().found == "numba is broken: importing it ends the process (exit status 7)"


def test_old_ipywidgets_is_enough(monkeypatch):
    monkeypatch.setattr(checks.metadata, "version", lambda package: "7.7.1")
    assert checks.widgets().status == "ok"
    assert "7.7" in checks.widgets().meaning


def test_missing_jupyterlab_names_the_extra(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert checks.lab().status == "missing"
    assert "minillm-lessons[lab]" in checks.lab().fix


def test_colab_needs_no_jupyterlab(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "google.colab", object())
    assert checks.lab().status == "ok"


@pytest.mark.parametrize(
    ("used", "limits", "status", "fix"),
    [
        (1, ["OMP_NUM_THREADS"], "limited", "unset OMP_NUM_THREADS"),
        (1, ["MKL_NUM_THREADS"], "limited", "unset MKL_NUM_THREADS"),
        (2, [], "ok", ""),  # PyTorch's own choice, as on Apple's processors
        (4, [], "ok", ""),
        (8, ["OMP_NUM_THREADS"], "limited", "set OMP_NUM_THREADS=4"),
    ],
)
def test_threads_are_compared_with_the_cores(monkeypatch, used, limits, status, fix):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name in limits:
        monkeypatch.setenv(name, str(used))
    monkeypatch.setattr(checks, "cpu", lambda: Cpu("four cores", 4, 4, ()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: used)
    row = checks.threads()
    assert (row.status, row.fix) == (status, fix)
    assert all(f"{name}={used}" in row.found for name in limits)


def test_little_memory_is_told(monkeypatch):
    monkeypatch.setattr(checks, "memory", lambda: Memory(2 * 2**30, 2**29))
    assert checks.main_memory().status == "limited"


def test_missing_weights_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(checks.bundled, "WEIGHTS", tmp_path)
    assert checks.models().status == "missing"
    assert checks.models().found == "no minicoder and no minicoder-draft"


def test_report_shows_as_text_html_and_json():
    report = Report((Row("part", "missing", "<none>", "It does not run.", "pip install 'a & b'"),))
    assert "missing" in report.text
    assert "fix: pip install 'a & b'" in report.text
    assert report.text.endswith("0 ok, 0 limited, 1 missing.")
    table = ElementTree.fromstring(report._repr_html_().replace("<br>", "<br/>"))
    assert "<none>" in "".join(table.itertext())
    assert json.loads(report.to_json())["rows"][0]["fix"] == "pip install 'a & b'"
    assert json.loads(report.to_json())["limits"] == []


WELL = Row("PyTorch", "ok", "2.9", "It runs.")
NO_GPU = Row("device", "limited", "CPU", "Everything runs on the CPU.")
FEW_THREADS = Row("threads", "limited", "1", "Cores stay idle.", "unset OMP_NUM_THREADS")
NO_WIDGETS = Row("widgets", "missing", "not installed", "Knobs are absent.", "pip install ipywidgets")


def brief(*rows: Row) -> Report:
    return Report(rows, machine="minillm 0.1.0 · CPU, 2 cores", full=False)


def test_lesson_shows_one_line_when_nothing_needs_to_be_done():
    report = brief(WELL, NO_GPU)
    line = "minillm 0.1.0 · CPU, 2 cores · everything needed is here. doctor(full=True) shows the table."
    assert repr(report) == line
    assert report._repr_html_() == f"<div>{line}</div>"


def test_lesson_shows_only_the_rows_that_need_something_done_with_their_fixes():
    report = brief(WELL, NO_GPU, FEW_THREADS, NO_WIDGETS)
    assert report.troubles == (FEW_THREADS, NO_WIDGETS)
    for shown in (repr(report), report._repr_html_()):
        assert "2 things to fix" in shown
        assert "unset OMP_NUM_THREADS" in shown
        assert "pip install ipywidgets" in shown
        assert "PyTorch" not in shown
    assert "1 thing to fix" in brief(FEW_THREADS).line


def test_whole_table_on_request_is_aligned_left_cell_by_cell():
    """JupyterLab's style sheet aligns cells to the right, whatever the table says."""
    report = Report((WELL, NO_GPU))
    assert "device" in repr(report)
    table = ElementTree.fromstring(report._repr_html_().replace("<br>", "<br/>"))
    cells = [node for node in table.iter() if node.tag in ("td", "th", "caption")]
    assert len(cells) == 1 + 4 * 3
    assert all("text-align:left" in node.get("style", "") for node in cells)
    assert "margin-left:0" in table.get("style", "")


def test_doctor_is_brief_unless_asked():
    report = doctor()
    assert report.line in repr(report)
    assert len(repr(report).splitlines()) < len(report.text.splitlines())
    assert repr(doctor(full=True)).endswith("missing.")


def test_a_fix_made_after_the_doctor_was_called_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def compiled_step() -> str:
        return next(row.found for row in doctor().rows if row.name == "compiled step")

    broken = tmp_path / "numba.py"
    broken.write_text("raise ImportError('half installed')")
    try:
        assert compiled_step() == "numba is broken: half installed"
        broken.unlink()
        assert compiled_step().startswith(f"numba {metadata.version('numba')}")
    finally:
        forget()


@pytest.mark.parametrize(
    ("card", "simd", "words"),
    [
        (None, ("avx2", "avx512f", "avx512_vnni"), " · CPU, 2 cores, AVX-512 VNNI · compiled step"),
        (None, ("avx2",), " · CPU, 2 cores, AVX2 · compiled step"),
        (None, (), " · CPU, 2 cores · compiled step"),
        (T4, (), " · Tesla T4, sm_75 · Triton kernels"),
    ],
)
def test_the_line_says_what_lessons_run_on_and_nothing_that_changes(on_gpu, monkeypatch, card, simd, words):
    on_gpu(card)
    monkeypatch.setattr(checks, "cpu", lambda: Cpu("a processor", 2, 2, simd))
    assert checks.machine() == f"minillm {minillm.__version__}{words}"


def test_the_line_says_when_triton_is_broken(on_gpu, instead):
    on_gpu(H100)
    instead("triton", "raise OSError('libcuda.so: cannot open')")
    assert checks.machine().endswith("· NVIDIA H100, sm_90 · PyTorch operations")


def test_the_line_says_when_there_is_no_compiled_step(on_gpu, instead, monkeypatch):
    on_gpu(None)
    instead("numba", "raise ModuleNotFoundError")
    monkeypatch.setattr(checks, "cpu", lambda: Cpu("a processor", 1, 1, ()))
    assert checks.machine().endswith("· CPU, 1 core · plain PyTorch")


def test_line_and_table_agree_on_a_processor_that_cannot_run_the_compiled_step(on_gpu, monkeypatch):
    chip = {"unsupported_reason": "it multiplies and adds in two steps", "byte_products": None}
    tried = checks._tried
    monkeypatch.setattr(checks, "_tried", lambda asked: Answer("", chip) if asked == checks.PROCESSOR else tried(asked))
    on_gpu(None)
    assert checks.machine().endswith(" · plain PyTorch")
    assert checks.numba().meaning == "PyTorch replaces it: it multiplies and adds in two steps."


def test_notebook_that_runs_without_jupyterlab_does_not_miss_it(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    assert checks.lab().status == "ok"


def test_the_doctor_looks_at_compilers_without_loading_them():
    """They would stay in the memory of the lesson whose first cell called it. It can be called again, although its
    package has its name."""
    look = "print({'numba', 'llvmlite', 'triton'} & set(sys.modules))"
    code = "import sys, minillm; minillm.doctor(); from minillm.doctor.report import Report; minillm.doctor(); " + look
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(minillm.__file__).parents[1], capture_output=True, text=True
    )
    assert done.stdout.strip() == "set()"
    found = {row.name: row.found for row in doctor().rows}
    assert checks.metadata.version("numba") in found["compiled step"]  # and yet it was tried
    assert checks.metadata.version("triton") in found["Triton"]


def test_importing_the_doctor_loads_nothing_heavy():
    code = "import sys, minillm.doctor.doctor; sys.exit(bool({'torch', 'numpy', 'psutil', 'numba'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(minillm.__file__).parents[1])
