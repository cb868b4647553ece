"""Loading a quantised model never holds the full-precision one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from minillm.models.loading import load_model, save_llama
from minillm.models.shards import Shards
from minillm.ops.linear import Linear
from minillm.quantization.checkpoint import save_quantized
from minillm.quantization.model import decoder_linears, quantize_model
from minillm.quantization.schemes import make_scheme
from tests.quantization.models import random_decoder


@pytest.fixture(params=["while loading", "from a checkpoint"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    save_llama(random_decoder(num_layers=4), tmp_path / "full", torch.float32)
    if request.param == "while loading":
        return lambda: load_model(tmp_path / "full", torch.float32, quantization="int8")
    small = quantize_model(load_model(tmp_path / "full", torch.float32), make_scheme("int8"))
    save_quantized(small, tmp_path / "full", tmp_path / "small")
    return lambda: load_model(tmp_path / "small", torch.float32)


def test_no_two_stored_tensors_are_in_memory_at_once(load: object, monkeypatch: pytest.MonkeyPatch) -> None:
    read, alive = Shards.tensor, []

    def watched(self: Shards, name: str) -> Tensor:
        assert not any(reference() is not None for reference in alive), f"another tensor lives on while {name} is read"
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Shards, "tensor", watched)
    load()
    assert len(alive) > 20


def test_no_two_layers_have_linears_in_full_precision_at_once(load: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four linears of the layer that is being built, and the unembedding."""
    built: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most, make = [0], Linear.__init__

    def watched(self: Linear, *args: object, **options: object) -> None:
        make(self, *args, **options)
        built.add(self)
        gc.collect()
        most[0] = max(most[0], len(built))

    monkeypatch.setattr(Linear, "__init__", watched)
    model = load()
    gc.collect()
    assert len(list(decoder_linears(model))) == 16
    assert most[0] <= 4 + 1 and len(built) == 1
