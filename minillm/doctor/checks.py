"""The checks behind the doctor: each looks at one part of the machine and returns one row.

A lesson's first cell calls the doctor, and every module imported here stays in its memory. Every lesson needs PyTorch,
but only some need numba and Triton, so their imports are tried in another process (see `import_probe`).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from minillm.doctor import LOW_MEMORY_BYTES
from minillm.doctor.import_probe import Answer, ask, problem
from minillm.doctor.report import Row
from minillm.hardware import cpu, gpu, memory, unusable_reason
from minillm.models import bundled

TRITON, NUMBA, OPENMP = "triton", "numba", "numba.np.ufunc.omppool"
PROCESSOR = "minillm.ops.cpu.processor:doctor_report"
HEAVY = (TRITON, NUMBA, OPENMP, PROCESSOR)
"""Imported only in another process."""
NAMES = {
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "asimddp": "NEON with dot products",
    "asimd": "NEON",
}
"""The instruction sets that the compiled step can use, best first, with their usual names."""


def run_checks() -> Iterator[Row]:
    """Run every check in the order of the report. Without PyTorch, the checks that need it are left out."""
    yield python()
    yield pytorch()
    if not problem("torch"):
        yield from (device(), dtype(), triton())
        if gpu() is not None:
            yield kernels()
        yield threads()
    yield from (numba(), processor(), main_memory(), models(), widgets(), charts(), lab())


def machine() -> str:
    """A short description of the machine and of how the engine runs on it. It does not vary between calls."""
    from minillm.version import __version__

    card = None if problem("torch") else gpu()
    if card is not None and not unusable_reason("cuda"):
        kernels_run = "Triton kernels" if _runs_triton() else "PyTorch operations"
        return f"minillm {__version__} · {card.name}, {card.architecture} · {kernels_run}"
    chip = cpu()
    cores = f"{chip.usable_cores} core{'s' if chip.usable_cores > 1 else ''}"
    best = next((NAMES[name] for name in NAMES if name in chip.simd), "")
    runs = "plain PyTorch" if _tried(NUMBA).problem or _chip()["unsupported_reason"] else "compiled step"
    return f"minillm {__version__} · {', '.join(filter(None, ['CPU', cores, best]))} · {runs}"


def python() -> Row:
    """The interpreter."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Row("Python", "ok", found, "New enough for everything.")


def pytorch() -> Row:
    """The tensor library."""
    reason = problem("torch")
    if reason:
        fix = _install("torch", reason)
        if "broken" in reason and sys.platform == "win32":
            fix += ", and the Visual C++ Redistributable from Microsoft"
        return Row("PyTorch", "missing", reason, "The engine cannot run at all.", fix)
    import torch

    gpu_library = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next((f"{name} {version}" for name, version in gpu_library.items() if version), "CPU build")
    return Row("PyTorch", "ok", f"{torch.__version__}, {build}", "The reference path of every lesson runs.")


def device() -> Row:
    """The device that the engine uses by default."""
    card = gpu()
    if card is None:
        meaning = "Lessons run on the CPU; GPU speeds cannot be measured here."
        return Row("device", "limited", "CPU (PyTorch sees no CUDA GPU)", meaning)
    found = f"{card.name}, {card.architecture}, {_gib(card.free)} of {_gib(card.total)} free"
    if reason := unusable_reason("cuda"):
        meaning = f"The engine runs on the CPU, because PyTorch cannot use this GPU: {reason.removesuffix('.')}."
        return Row("device", "limited", found, meaning)
    if card.free < LOW_MEMORY_BYTES:
        meaning = "The engine chooses this GPU, but may not fit into what other processes leave of it."
        return Row("device", "limited", found, meaning, "end them (nvidia-smi lists them), or say device='cpu'")
    return Row("device", "ok", found, "The engine uses this GPU unless you say device='cpu'.")


def dtype() -> Row:
    """What `dtype="auto"` means here, as `minillm.engine.placement.choose_dtype` decides it."""
    card = gpu()
    if card is None:
        meaning = "In float32, every way of running the engine on a CPU gives the same tokens."
        return Row("dtype 'auto'", "ok", "float32", meaning)
    if card.capability < (8, 0):
        meaning = f"{card.architecture} has no bfloat16 arithmetic (that starts at sm_80), so float16 replaces it."
        return Row("dtype 'auto'", "limited", "float16, or float32 if the checkpoint is", meaning)
    return Row("dtype 'auto'", "ok", "the checkpoint's own", "This GPU computes in bfloat16 and float16 at full speed.")


def triton() -> Row:
    """The kernel language."""
    reason = _tried(TRITON).problem
    if reason:
        meaning = "Lessons 8 and 9 do not run; in the others the engine uses PyTorch."
        if sys.platform == "linux":
            return Row("Triton", "missing", reason, meaning, _install("triton", reason))
        return Row("Triton", "limited", f"{reason}: it is for Linux, WSL and hosted notebooks", meaning)
    version, card = _version("triton"), gpu()
    if card is None:
        meaning = "Without a GPU, Triton kernels run in its interpreter: correct, but slow."
        return Row("Triton", "limited", f"{version}, interpreter only", meaning)
    if not _runs_triton():
        meaning = "The kernels need an NVIDIA GPU of sm_75 or newer; the engine uses PyTorch."
        return Row("Triton", "limited", f"{version}, not for {card.name}", meaning)
    if card.capability < (8, 0):
        meaning = f"Triton may refuse {card.architecture}; the engine then uses PyTorch."
        return Row("Triton", "limited", f"{version}, on {card.architecture}", meaning)
    return Row("Triton", "ok", f"{version}, on {card.architecture}", "Kernels compile and run on the GPU.")


def kernels() -> Row:
    """Which operations have a kernel on the GPU, which is there, according to the dispatch."""
    from minillm.ops.dispatch import OPS, implementations

    others = [name for name in OPS if implementations(name, "cuda")[0] != "triton"]
    found = f"{len(OPS) - len(others)} of {len(OPS)} operations on {gpu().architecture}"
    if len(others) == len(OPS):
        return Row("GPU kernels", "limited", found, "The GPU runs PyTorch operations instead: correct, but slower.")
    if others:
        meaning = f"PyTorch runs the others, correct but slower: {', '.join(others)}."
        return Row("GPU kernels", "limited", found, meaning)
    return Row("GPU kernels", "ok", found, "Every operation of the engine that has a kernel runs as one.")


def numba() -> Row:
    """The compiler of the decoder step for the CPU."""
    reason = _tried(NUMBA).problem
    if reason:
        meaning = "Lesson 15 does not run; in the others PyTorch replaces the step, two to eight times slower."
        if sys.platform == "win32" and platform.machine().lower() == "arm64" and sys.version_info < (3, 12):
            found = "there is no numba for Windows on ARM64 and a Python before 3.12"
            return Row("compiled step", "limited", found, meaning)
        return Row("compiled step", "missing", f"numba is {reason}", meaning, _install("numba", reason))
    found = f"numba {metadata.version('numba')}"
    chip = _chip()
    if chip["unsupported_reason"]:
        meaning = f"PyTorch replaces it: {chip['unsupported_reason']}."
        return Row("compiled step", "limited", f"{found}, not for this processor", meaning)
    # The engine's process imports PyTorch first, and numba may use its OpenMP library. That import takes seconds, so
    # it is made only where numba finds no library alone.
    if _tried(OPENMP).problem and ask("torch", OPENMP)[OPENMP].problem:
        meaning = "It works, but without the OpenMP layer threads start more slowly in each step."
        # On macOS there is none to install: with a second one beside PyTorch's, OpenMP ends the process.
        fix = "install libgomp" if sys.platform == "linux" else ""
        return Row("compiled step", "limited", f"{found}, no OpenMP layer", meaning, fix)
    if not chip["byte_products"]:
        meaning = "All weight types run; int8, int4 and w8a8 would be faster with byte dot-product instructions."
        return Row("compiled step", "limited", f"{found}, OpenMP layer, no VNNI or dot products", meaning)
    meaning = "On the CPU a whole decoder step is one function, compiled on first use and cached on disk."
    return Row("compiled step", "ok", f"{found}, OpenMP layer, {chip['byte_products']}", meaning)


def processor() -> Row:
    """The CPU and what its vector units can do."""
    chip = cpu()
    simd = " ".join(chip.simd) or "SIMD unknown"
    found = f"{chip.name}, {chip.usable_cores} of {os.cpu_count()} logical cores, {simd}"
    if platform.machine().lower() in ("x86_64", "amd64") and chip.simd and "avx2" not in chip.simd:
        return Row("processor", "limited", found, "Without AVX2, INT8 products are slower than full precision.")
    return Row("processor", "ok", found, "INT8 speed-ups depend on these instruction sets.")


def threads() -> Row:
    """How many threads one operation may use."""
    import torch

    used, chip = torch.get_num_threads(), cpu()
    limits = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)]
    found = f"{used} per operation" + "".join(f", {name}={os.environ[name]}" for name in limits)
    if used < min(chip.physical_cores, chip.usable_cores):
        if not limits:  # PyTorch leaves out the slower cores of Apple's processors
            return Row("threads", "ok", found, "PyTorch uses no more cores than pay.")
        meaning = f"Some of the {chip.physical_cores} cores stay idle."
        return Row("threads", "limited", found, meaning, f"unset {' and '.join(limits)}")
    if used > chip.usable_cores:
        meaning = f"More threads than the {chip.usable_cores} usable cores slow each other down."
        return Row("threads", "limited", found, meaning, f"set OMP_NUM_THREADS={chip.usable_cores}")
    return Row("threads", "ok", found, "Every usable core is used.")


def main_memory() -> Row:
    """RAM, or the container's limit."""
    ram = memory()
    found = f"{_gib(ram.free)} of {_gib(ram.total)} free"
    if ram.free < LOW_MEMORY_BYTES:
        return Row("memory", "limited", found, "A lesson may need up to 1 GB.", "close other notebooks' kernels")
    return Row("memory", "ok", found, "Enough for every lesson on the bundled models.")


def models() -> Row:
    """The checkpoints that come with the package."""
    names = ("minicoder", "minicoder-draft")
    absent = [name for name in names if not (bundled.WEIGHTS / name / "model.safetensors").exists()]
    if absent:
        meaning = "Lessons have no model to run, unless MINILLM_MODEL names another one."
        fix = "install minillm-lessons again"
        return Row("bundled models", "missing", f"no {' and no '.join(absent)}", meaning, fix)
    num_bytes = sum(file.stat().st_size for name in names for file in (bundled.WEIGHTS / name).iterdir())
    return Row("bundled models", "ok", f"{', '.join(names)} ({num_bytes / 1e6:.0f} MB)", "No download is ever needed.")


def widgets() -> Row:
    """The package behind the interactive controls (knobs) of lessons."""
    reason = problem("ipywidgets")
    if reason:
        meaning = "Knobs are absent; pictures and replays still work."
        return Row("widgets", "missing", reason, meaning, _install("ipywidgets", reason))
    version = metadata.version("ipywidgets")
    found = f"ipywidgets {version}"
    if int(version.split(".")[0]) < 8:
        return Row("widgets", "ok", found, "Knobs work: lessons use only features that versions 7.7 and 8 share.")
    return Row("widgets", "ok", found, "Knobs work.")


def charts() -> Row:
    """The package behind interactive charts."""
    reason = problem("plotly")
    if reason:
        return Row("charts", "limited", reason, "Charts are static pictures.", _install("plotly", reason))
    return Row("charts", "ok", f"plotly {metadata.version('plotly')}", "Charts can be hovered and zoomed.")


def lab() -> Row:
    """Where notebooks open."""
    if "google.colab" in sys.modules:
        return Row("JupyterLab", "ok", "not needed on Colab", "Colab is the notebook.")
    if importlib.util.find_spec("jupyterlab") is None:
        if "ipykernel" in sys.modules:
            return Row("JupyterLab", "ok", "not installed, and not needed", "This runs in a notebook already.")
        meaning = "`minillm lab` cannot open; other notebook programs can open the lessons."
        return Row("JupyterLab", "missing", "not installed", meaning, 'pip install "minillm-lessons[lab]"')
    return Row("JupyterLab", "ok", metadata.version("jupyterlab"), "`minillm lab` opens the first lesson.")


def _install(package: str, reason: str) -> str:
    """The command that installs a package. pip leaves one that is there, though broken, as it is."""
    return f"pip install {'' if reason == 'not installed' else '--force-reinstall '}{package}"


def _tried(question: str) -> Answer:
    """The answer of the import probe to one question of `HEAVY`; all are asked together."""
    return ask(*HEAVY)[question]


def _chip() -> dict[str, Any]:
    """What the compiled step finds in this processor: `unsupported_reason` and `byte_products`, as text or None."""
    found = _tried(PROCESSOR)
    return found.value or {"unsupported_reason": found.problem, "byte_products": None}


def _runs_triton() -> bool:
    """Whether Triton kernels run on the GPU, which is there."""
    import torch

    from minillm.ops.dispatch import triton_runs

    return not _tried(TRITON).problem and triton_runs(torch.device("cuda"))


def _version(module: str) -> str:
    """The version of the package that `module` comes from, which may have another name (triton-windows)."""
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        packages = metadata.packages_distributions().get(module)
        return metadata.version(packages[0]) if packages else "unknown version"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
