"""Products with quantised weights against the schemes that made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.ops import quantized_linear as reference
from minillm.ops.triton import int8_linear as int8_module
from minillm.ops.triton import tiles as table
from minillm.ops.triton.int4_linear import int4_linear
from minillm.ops.triton.int8_linear import int8_linear
from minillm.ops.triton.tiles import Tiles
from minillm.ops.triton.w8a8_linear import quantize_tokens, w8a8_linear
from minillm.quantization.base import QuantizedLinear, Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.w8a8 import W8A8
from tests.ops.triton.close import HALF, assert_close, examples
from tests.ops.triton.steps import WHERE

FEW = examples(10)
SHAPES = {
    "rows": st.sampled_from((0, 1, 3, 17)),
    "outputs": st.sampled_from((1, 24, 33)),
    "columns": st.sampled_from((8, 40, 64, 97)),
    "bias": st.booleans(),
    "splits": st.sampled_from((1, 2, 4)),
    "seed": st.integers(0, 999),
}


def layer(scheme: Scheme, outputs: int, columns: int, bias: bool) -> QuantizedLinear:
    made = QuantizedLinear(scheme, columns, outputs, torch.randn(outputs) if bias else None)
    made.fill(scheme.quantize(torch.randn(outputs, columns)))
    return made.to(WHERE)


def run(made: QuantizedLinear, x: Tensor, tiles: Tiles | None) -> Tensor:
    """Return the output of the kernel for the layer's scheme."""
    t = made.tensors
    if isinstance(made.scheme, Int4):
        group_size = made.scheme.group_size
        return int4_linear(x, t["qweight"], t["scales"], t["qzeros"], group_size, made.bias, tiles)
    kernel = w8a8_linear if isinstance(made.scheme, W8A8) else int8_linear
    return kernel(x, t["qweight"], t["scales"], made.bias, tiles)


@FEW
@given(**SHAPES)
def test_int8(rows: int, outputs: int, columns: int, bias: bool, splits: int, seed: int) -> None:
    torch.manual_seed(seed)
    made, x = layer(Int8(), outputs, columns, bias), torch.randn(rows, columns + 3).to(WHERE)[:, 1 : columns + 1]
    out = run(made, x, Tiles(16, 16, 32, splits))
    assert_close(out, reference.int8_linear(x, **made.tensors, bias=made.bias))
    assert_close(out, made.scheme.apply(made, x))


@pytest.mark.parametrize("tiles", [Tiles(1, 4, 32), Tiles(1, 8, 512), None], ids=str)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 40), (33, 512), (24, 1100)])
@pytest.mark.parametrize("bias", [False, True])
def test_one_row_of_int8_gives_what_it_gives_in_a_batch(
    tiles: Tiles | None, outputs: int, columns: int, bias: bool
) -> None:
    """Another kernel runs one row, and adds in another order."""
    torch.manual_seed(0)
    made, x = layer(Int8(), outputs, columns, bias), torch.randn(3, 2 * columns).to(WHERE)[:, 1 : columns + 1]
    alone = run(made, x[1:2], tiles)
    assert_close(alone, run(made, x, Tiles(16, 16, 32))[1:2])
    assert_close(alone, reference.int8_linear(x[1:2], **made.tensors, bias=made.bias))


def test_nan_and_infinity_stay_in_the_single_row_of_int8() -> None:
    made, x = layer(Int8(), 33, 40, False), torch.randn(1, 40).to(WHERE)
    x[0, 7] = torch.nan
    assert not run(made, x, None).isfinite().any()
    x[0, 7] = torch.inf
    assert torch.equal(run(made, x, None).isfinite(), reference.int8_linear(x, **made.tensors).isfinite())


@pytest.mark.parametrize(("rows", "kernel"), [(1, "_int8_linear_row"), (2, "_int8_linear"), (5, "_int8_linear")])
def test_the_number_of_rows_alone_chooses_the_int8_kernel(
    rows: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph is recorded for a number of rows, so this fixes its kernels."""

    class Launched(Exception):
        pass

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            raise Launched(self.name)

    for name in ("_int8_linear", "_int8_linear_row"):
        monkeypatch.setattr(int8_module, name, Kernel(name))
    for outputs, columns, dtype in ((1, 8, torch.float32), (300, 64, torch.float16)):
        made, x = layer(Int8(), outputs, columns, False), torch.randn(rows, columns).to(WHERE, dtype)
        with pytest.raises(Launched, match=f"^{kernel}$"):
            run(made, x, None)


@FEW
@given(**SHAPES)
def test_w8a8_is_exact(rows: int, outputs: int, columns: int, bias: bool, splits: int, seed: int) -> None:
    """Integer sums are the same in any order, so in the interpreter even the last bit equals the reference's."""
    torch.manual_seed(seed)
    made, x = layer(W8A8(), outputs, columns, bias), torch.randn(rows, columns).to(WHERE)
    out = run(made, x, Tiles(16, 16, 32, splits))
    expected = reference.w8a8_linear(x, **made.tensors, bias=made.bias)
    assert_close(out, expected)
    if WHERE.type == "cpu":
        assert torch.equal(out, expected)
        assert torch.equal(out, made.scheme.apply(made, x))


@FEW
@given(group_size=st.sampled_from((8, 24, 32, 64)), depth=st.sampled_from((16, 32)), **SHAPES)
def test_int4(
    group_size: int, depth: int, rows: int, outputs: int, columns: int, bias: bool, splits: int, seed: int
) -> None:
    torch.manual_seed(seed)
    made, x = layer(Int4(group_size=group_size), outputs, columns, bias), torch.randn(rows, columns).to(WHERE)
    out = run(made, x, Tiles(16, 16, depth, splits))
    assert_close(out, reference.int4_linear(x, **made.tensors, group_size=group_size, bias=made.bias))
    assert_close(out, made.scheme.apply(made, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [Int8(), W8A8(), Int4(group_size=32), Int4(group_size=8)], ids=lambda s: s.method)
@pytest.mark.parametrize(("rows", "splits"), [(3, 1), (3, 2), (1, 1)])
def test_16_bits(scheme: Scheme, dtype: torch.dtype, rows: int, splits: int) -> None:
    torch.manual_seed(0)
    made = layer(scheme, 20, 64, True)
    x = torch.randn(rows, 64).to(WHERE, dtype)
    out = run(made, x, Tiles(16, 16, 32, splits))
    assert out.dtype == dtype
    assert_close(out, made.scheme.apply(made, x.float()), HALF)


@pytest.mark.parametrize("scheme", [Int8(), W8A8(), Int4(group_size=32)], ids=lambda s: s.method)
def test_nan_and_infinity_stay_in_their_rows_and_outputs_are_all_written(scheme: Scheme) -> None:
    torch.manual_seed(1)
    made = layer(scheme, 33, 40, False)
    x = torch.randn(4, 40).to(WHERE)
    clean = run(made, x, None)
    x[1, 7], x[3, 2] = torch.nan, torch.inf
    out = run(made, x, None)
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert not out[1].isfinite().any()
    assert not out[3].isfinite().all()


@FEW
@given(rows=st.integers(0, 4), columns=st.integers(1, 70), seed=st.integers(0, 999))
def test_tokens_are_rounded_as_the_scheme_rounds_them(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, columns) * 10.0 ** float(torch.randint(-30, 30, ()))
    if rows:
        x[0] = 0
    codes, scales = quantize_tokens(x.to(WHERE))
    expected_codes, expected_scales = reference.quantize_rows(x)  # on a CPU, where division is exactly rounded
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(scales.cpu(), expected_scales)


def test_ties_between_codes_go_to_the_even_one() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    codes, _ = quantize_tokens(x.to(WHERE))
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_the_table_is_asked_first_and_few_rows_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(table.machine, "gpu_name", lambda: "some GPU")
    monkeypatch.setattr(table.machine, "num_sms", lambda: 100)
    monkeypatch.setattr(table.machine, "capability", lambda: (8, 0))
    half = torch.float16
    own = Tiles(16, 64, 64)
    monkeypatch.setitem(table.MEASURED, ("some GPU", "int8", "few"), own)
    assert table.choose("int8", 3, 100_000, 4096, half) == own
    assert table.choose("int8", 3, 4096, 4096, half) == replace(own, splits=2)
    assert table.choose("int8", 3, 4096, 4096, torch.float32) == replace(table.NO_TENSOR_CORE_DEFAULTS["few"], splits=1)
    narrow = Tiles(16, 16, 256)
    monkeypatch.setitem(table.MEASURED, ("some GPU", "int8", "few, narrow"), narrow)
    assert table.choose("int8", 3, 100_000, 4096, half) == own
    assert table.choose("int8", 3, 4096, 4096, half) == narrow  # 256 tiles for 100 SMs
    monkeypatch.setitem(table.MEASURED, ("some GPU", "int8", "few, narrow"), replace(narrow, splits=4))
    assert table.choose("int8", 3, 64, 4096, half).splits == 16  # more than listed, for one tile
    assert table.choose("int8", 3, 2048, 4096, half).splits == 4
    assert table.choose("int8", 3, 2048, 512, half).splits == 2  # fewer than listed: 256 columns each
    assert table.choose("int4", 3, 4096, 4096, half).splits == 2  # 64 tiles for 100 SMs
    assert table.choose("int4", 3, 100_000, 4096, half).splits == 1
    assert table.choose("int4", 3, 512, 512, half).splits == 2  # no more splits: 256 columns each
    assert table.choose("int4", 1000, 4096, 4096, half).splits == 1
    assert [table.shape_class(n) for n in (1, 16, 17, 64, 65)] == ["few", "few", "some", "some", "many"]
    assert table.choose("int8", 40, 64, 64, torch.float32) == table.NO_TENSOR_CORE_DEFAULTS["some"]
    assert table.choose("w8a8", 40, 64, 64, torch.float32) == table.DEFAULTS["some"]
    assert table.choose("int8", 1, 64, 4096, half) == table.choose("int8", 1, 64, 64, torch.float32) == table.ONE_ROW
    assert table.choose("w8a8", 1, 100_000, 64, half) == table.DEFAULTS["few"]
    monkeypatch.setattr(table.machine, "capability", lambda: (7, 5))
    assert table.choose("int8", 40, 64, 64, half) == table.NO_TENSOR_CORE_DEFAULTS["some"]
    one = Tiles(1, 4, 256)
    monkeypatch.setitem(table.MEASURED, ("some GPU", "int8", "one"), one)
    assert table.choose("int8", 1, 64, 64, half) == one
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert table.choose("int8", 3, 4096, 4096, half) is table.INTERPRETED


def test_a_gpu_without_measured_tiles_takes_those_of_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(table.machine, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(table.machine, "num_sms", lambda: 132)
    monkeypatch.setattr(table.machine, "capability", lambda: (9, 0))
    shape = 1000, 28_672, 4096, torch.bfloat16
    h100 = table.MEASURED["NVIDIA H100 80GB HBM3", "w8a8", "many"]
    assert table.choose("w8a8", *shape) == h100 != table.DEFAULTS["many"]
    own = Tiles(128, 64, 64)
    monkeypatch.setitem(table.MEASURED, ("NVIDIA H200", "w8a8", "many"), own)
    assert table.choose("w8a8", *shape) == own
    monkeypatch.setattr(table.machine, "gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(table.machine, "capability", lambda: (8, 0))
    assert table.choose("w8a8", *shape) == table.DEFAULTS["many"]
    assert all(any(gpu == name for gpu, *_ in table.MEASURED) for name in table.STAND_INS.values())


def test_every_measured_class_is_one_that_is_asked_for() -> None:
    sizes = {*table.CLASSES, *(f"{size}, narrow" for size in table.CLASSES)}
    for (_, kind, size), tiles in table.MEASURED.items():
        assert size in sizes or (kind, size) == ("int8", "one")
        assert (tiles.m, tiles.splits) == (1, 1) if size == "one" else tiles.m >= 16
