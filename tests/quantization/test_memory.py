"""Loading a quantised model never holds the full-precision one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from minillm.models import staging
from minillm.models.decoder import Decoder
from minillm.models.loading import load_model, save_llama
from minillm.models.quantize import decoder_linears, quantize_model, quantize_unembedding
from minillm.models.quantized_checkpoint import save_quantized
from minillm.models.shards import Shards
from minillm.ops.linear import Linear
from minillm.quantization.base import Scheme
from minillm.quantization.schemes import make_scheme
from tests.quantization.models import random_decoder

Load = Callable[[], Decoder]


@pytest.fixture(params=["while loading", "from a checkpoint"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    save_llama(random_decoder(num_layers=4), tmp_path / "full", torch.float32)
    if request.param == "while loading":
        return lambda: load_model(tmp_path / "full", torch.float32, quantization="int8")
    small = quantize_model(load_model(tmp_path / "full", torch.float32), make_scheme("int8"))
    save_quantized(small, tmp_path / "full", tmp_path / "small")
    return lambda: load_model(tmp_path / "small", torch.float32)


def test_a_weight_is_quantised_a_piece_at_a_time(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and what is made of it in full precision, both no larger than a piece of 512 bytes."""
    read, quantize = Shards.read, Scheme.quantize
    places, sizes, rows = set[int](), list[int](), list[int]()

    def watched_read(self: Shards, name: str, into: Tensor, first_row: int = 0) -> None:
        places.add(into.data_ptr())
        sizes.append(into.nbytes)
        read(self, name, into, first_row)

    def watched_quantize(self: Scheme, weight: Tensor) -> dict[str, Tensor]:
        rows.append(weight.shape[0])
        assert weight.nbytes <= 512
        return quantize(self, weight)

    right = load()
    monkeypatch.setattr(staging, "PIECE_BYTES", 512)
    monkeypatch.setattr(Shards, "tensor", lambda *_: pytest.fail("a whole tensor was read"))
    monkeypatch.setattr(Shards, "read", watched_read)
    monkeypatch.setattr(Scheme, "quantize", watched_quantize)
    model = load()
    assert len(sizes) > 50 and max(sizes) <= 512 and len(places) <= 4
    assert sum(rows) in (0, sum(linear.out_features for _, linear in decoder_linears(model)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, right.state_dict()[name]), name


def test_no_two_layers_have_linears_in_full_precision_at_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four linears of the layer that is being built, and the unembedding."""
    built: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most, make = [0], Linear.__init__

    def watched(self: Linear, *args: object, **options: object) -> None:
        make(self, *args, **options)
        built.add(self)
        if len(built) > 4 + 1:  # unless some are in circles, and only wait for the garbage collector, which is slow
            gc.collect()
        most[0] = max(most[0], len(built))

    monkeypatch.setattr(Linear, "__init__", watched)
    model = load()
    gc.collect()
    assert len(list(decoder_linears(model))) == 16
    assert most[0] <= 4 + 1 and len(built) == 1


def test_the_unembedding_is_quantised_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, weight = make_scheme("int8"), random_decoder().lm_head.weight
    quantize, rows = Scheme.quantize, list[int]()

    def watched(self: Scheme, weight: Tensor) -> dict[str, Tensor]:
        rows.append(weight.shape[0])
        return quantize(self, weight)

    right = scheme.quantize(weight)
    monkeypatch.setattr("minillm.models.quantize.UNEMBEDDING_ROWS", 7)
    monkeypatch.setattr(Scheme, "quantize", watched)
    model = quantize_unembedding(random_decoder(), scheme)
    assert max(rows) == 7 and sum(rows) == weight.shape[0] and weight.shape[0] % 7
    for name, tensor in model.lm_head.tensors.items():
        assert torch.equal(tensor, right[name]), name
