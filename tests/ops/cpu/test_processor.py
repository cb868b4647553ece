"""What `inspect_processor` finds for processors other than this one, which LLVM can compile for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llvmlite import binding

from minillm.batch import Segment
from minillm.cache.paged import PagedKVCache
from minillm.doctor import checks, import_probe
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.ops.cpu import processor as processor_module
from minillm.ops.cpu.processor import Processor, inspect_processor, processor
from minillm.runtime import cpu_executor, packed_decoder
from minillm.runtime.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("every_target")
X86, MAC, LINUX_ARM = "x86_64-unknown-linux-gnu", "arm64-apple-macosx14.0.0", "aarch64-unknown-linux-gnu"
LACKING_BOTH = "no FMA and no F16C"


@pytest.mark.parametrize(
    ("name", "registers", "byte_products", "byte_lanes"),
    [
        ("haswell", 8, "vpmaddwd", 8),
        ("skylake-avx512", 32, "vpmaddwd", 16),
        ("cascadelake", 32, "vpdpbusd", 16),
        ("alderlake", 8, "vpdpbusd", 8),
        ("znver3", 8, "vpmaddwd", 8),
    ],
)
def test_x86_processors_are_known_by_their_assembly(
    name: str, registers: int, byte_products: str, byte_lanes: int
) -> None:
    found = inspect_processor(X86, name)
    assert found == Processor("x86", True, True, registers, byte_products, byte_lanes)
    assert found.unsupported_reason is None


@pytest.mark.parametrize(
    ("name", "reason"), [("x86-64", LACKING_BOTH), ("nehalem", LACKING_BOTH), ("ivybridge", "has no FMA")]
)
def test_x86_without_fma_or_half_floats_is_refused_with_what_it_lacks(name: str, reason: str) -> None:
    found = inspect_processor(X86, name).unsupported_reason
    assert found is not None and found.endswith(reason)


def test_an_x86_processor_may_lack_f16c_alone() -> None:
    found = inspect_processor(X86, "haswell", "-f16c")
    assert found.has_fma and not found.converts_float16
    assert found.unsupported_reason is not None and found.unsupported_reason.endswith("has no F16C")


@pytest.mark.parametrize(
    ("triple", "name", "byte_products"),
    [
        (MAC, "apple-m1", "sdot"),
        (LINUX_ARM, "neoverse-n1", "sdot"),
        (LINUX_ARM, "cortex-a72", None),
        (LINUX_ARM, "generic", None),
    ],
)
def test_arm_is_never_refused_although_it_may_name_no_feature(
    triple: str, name: str, byte_products: str | None
) -> None:
    found = inspect_processor(triple, name)
    assert found.unsupported_reason is None
    assert (found.registers, found.byte_products) == (8, byte_products)


def test_this_processor_is_the_one_that_numba_compiles_for() -> None:
    from numba.core.registry import cpu_target

    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    assert processor() == inspect_processor(triple, name, features)
    assert packed_decoder.processor is processor


def test_amx_is_used_where_the_processor_has_it_and_the_system_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    features = "+amx-tile,+amx-bf16,+avx512bw"
    assert inspect_processor(X86, "sapphirerapids", features).amx
    assert not inspect_processor(X86, "sapphirerapids", "+avx512bw").amx
    with_it, without = (replace(processor(), amx=amx) for amx in (True, False))
    for found, system, answer, expected in (
        (with_it, "Linux", 0, True),
        (with_it, "Linux", -1, False),
        (with_it, "Windows", 0, False),
        (without, "Linux", 0, False),
    ):
        monkeypatch.setattr(processor_module, "processor", lambda found=found: found)
        monkeypatch.setattr(processor_module.platform, "system", lambda system=system: system)
        libc = SimpleNamespace(syscall=lambda *numbers, answer=answer: answer)
        monkeypatch.setattr(processor_module.ctypes, "CDLL", lambda name, libc=libc: libc)
        assert processor_module.has_amx.__wrapped__() is expected


def test_the_executor_refuses_what_the_processor_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would end the process: without F16C it calls a conversion function that does not exist."""
    old = replace(processor(), architecture="x86", converts_float16=False)
    monkeypatch.setattr(packed_decoder, "processor", lambda: old)
    reason = cpu_executor.unsupported_reason(None, None)  # type: ignore[arg-type]  (it uses neither)
    assert reason is not None and "no F16C" in reason


@pytest.mark.parametrize(("name", "status"), [("generic", "limited"), ("haswell", "limited")])
def test_the_doctor_reports_an_unsupported_processor(name: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", name)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    import_probe._ask.cache_clear()
    try:
        row = checks.numba()
    finally:
        import_probe._ask.cache_clear()
    assert row.status == status
    if name == "generic":
        assert "not for this processor" in row.found and "no FMA" in row.meaning
    else:
        assert "not for this" not in row.found


def test_without_numba_the_engine_runs_in_pytorch_and_the_doctor_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.startswith(("minillm.ops.cpu", "minillm.runtime.cpu_executor"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("minillm.runtime.cpu_executor")
    config = ModelConfig(97, 64, 96, 1, 4, 2, 32, 64, rope=RopeConfig())
    cache = PagedKVCache(config, 4, 16, torch.float32, torch.device("cpu"))
    runner = ModelRunner(Decoder(config).eval(), cache, 16)
    reason = runner.use_executor()
    assert reason is not None and "numba cannot be imported" in reason
    assert runner.run([Segment([1, 2, 3], 0, [0])]).shape == (1, 97)

    monkeypatch.setattr(checks, "_tried", lambda question: import_probe.Answer("not installed"))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    assert checks.numba().fix == "pip install numba"
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    assert checks.numba().found.startswith("there is no numba for") and not checks.numba().fix


def also_here() -> list[str]:
    """Other processors whose code this one can run."""
    features = binding.get_host_cpu_features() if processor().is_x86 else {}
    needed = {"haswell": ("avx2", "fma", "f16c"), "alderlake": ("avx2", "fma", "f16c", "avxvnni")}
    return [name for name, those in needed.items() if all(features.get(feature) for feature in those)]


@pytest.mark.parametrize("name", also_here())
def test_products_that_are_compiled_for_another_processor_are_right(name: str) -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}
    file, which = {  # whole products with the fewest registers; an instruction of its own
        "haswell": ("test_panels.py", "bytes_are_multiplied_exactly"),
        "alderlake": ("test_register_tiles.py", "sums_of_bytes"),
    }[name]
    command = [sys.executable, "-m", "pytest", "-q", f"tests/ops/cpu/{file}", "-k", which]
    root = Path(checks.__file__).parents[2]
    done = subprocess.run(command, check=False, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout


def test_numba_that_refuses_its_number_of_threads_is_no_reason_to_fail() -> None:
    """numba raises `ValueError` at its import, so a process of its own asks."""
    source = """
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.cache.paged import PagedKVCache
from minillm.runtime.runner import ModelRunner
import torch
config = ModelConfig(97, 64, 96, 1, 4, 2, 32, 64)
cache = PagedKVCache(config, 4, 16, torch.float32, torch.device("cpu"))
print(ModelRunner(Decoder(config).eval(), cache, 16).use_executor())
"""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "0"}
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment)
    assert "numba cannot be imported (Number of threads" in ran.stdout, ran.stderr
