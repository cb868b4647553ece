"""Which implementation a device gets, and that nobody imports Triton who does not use it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

from minillm.errors import UnknownOptionError, UnsupportedError
from minillm.ops import dispatch
from minillm.ops.dispatch import OPS, implementations, op
from minillm.ops.rms_norm import rms_norm


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("plain")
def test_a_cpu_gets_the_reference() -> None:
    assert implementations("rms_norm", "cpu") == ["reference"]
    assert op("rms_norm", torch.device("cpu")) is op("rms_norm", "cpu", "reference") is rms_norm


@pytest.mark.parametrize(
    ("capability", "installed", "attention", "w8a8"),
    [
        ((9, 0), True, "triton", "triton"),
        ((7, 5), True, "triton", "reference"),
        ((7, 0), True, "reference", "reference"),
        ((9, 0), False, "reference", "reference"),
    ],
)
def test_a_gpu_gets_kernels_if_it_is_new_enough_and_triton_is_there(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: bool, attention: str, w8a8: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(dispatch, "has_triton", lambda: installed)
    assert implementations("paged_attention", "cuda")[0] == attention
    assert implementations("w8a8_linear", "cuda")[0] == w8a8
    assert implementations("paged_attention", "cuda:0")[-1] == "reference"


def test_an_amd_gpu_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for ROCm calls it `cuda`, and an MI300X has the capability (9, 4)."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    assert implementations("paged_attention", "cuda") == ["reference"]


def test_the_gpu_that_is_asked_about_decides_not_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device="cuda:0": ((9, 0), (7, 0))[torch.device(device).index],
    )
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    assert implementations("paged_attention", "cuda:0")[0] == "triton"
    assert implementations("paged_attention", "cuda:1")[0] == "reference"


def test_the_interpreter_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    for value, expected in (("0", "reference"), ("", "reference"), ("1", "triton")):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert implementations("rope", "cpu")[0] == expected


@pytest.mark.usefixtures("plain")
def test_what_does_not_exist_is_refused_with_what_does() -> None:
    with pytest.raises(UnknownOptionError, match="no op 'attention'; there are paged_attention"):
        op("attention", "cpu")
    with pytest.raises(
        UnsupportedError, match="'rope' has no implementation 'triton' that runs on cpu; it has reference"
    ):
        op("rope", "cpu", "triton")


@pytest.mark.parametrize("name", OPS)
def test_references_exist(name: str) -> None:
    assert callable(op(name, "cpu", "reference"))


def run(code: str, **env: str) -> str:
    """Standard output of a fresh Python."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_minillm_and_asking_for_an_op_imports_no_triton() -> None:
    code = """
        import sys, minillm, minillm.llm, minillm.cache.layouts, minillm.ops.triton
        from minillm.ops.dispatch import OPS, op
        [op(name, "cpu") for name in OPS]
        print("triton" in sys.modules)
    """
    assert run(inspect.cleandoc(code)) == "False\n"


def test_in_the_interpreter_every_op_is_a_kernel_with_the_arguments_of_its_reference() -> None:
    code = """
        import inspect
        from minillm.ops.dispatch import OPS, op
        for name in OPS:
            kernel, plain = op(name, "cpu"), op(name, "cpu", "reference")
            assert kernel.__module__.startswith("minillm.ops.triton."), name
            a, b = (list(inspect.signature(f).parameters) for f in (kernel, plain))
            assert a[: len(b)] == b, (name, a, b)
        import torch
        x = torch.randn(3, 40)
        print(torch.allclose(op("rms_norm", "cpu")(x, x[0], 1e-5), op("rms_norm", "cpu", "reference")(x, x[0], 1e-5)))
    """
    assert run(inspect.cleandoc(code), TRITON_INTERPRET="1") == "True\n"
