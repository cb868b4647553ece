"""Random checkpoints of a shape: made once, complete, loadable, and of ordinary size inside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.bench import shapes
from minillm.errors import ConfigError
from minillm.models.causal import CausalAttention
from minillm.models.loading import load_config, load_model
from minillm.models.tensor_names import stored_parts
from minillm.tokenizer import Tokenizer

SMALL = replace(
    shapes.SHAPES["0.4b"],
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=500,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)
    return shapes.shape_folder("small", tmp_path)


def test_the_named_shape_has_its_size() -> None:
    parts = stored_parts(shapes.SHAPES["0.4b"])
    assert sum(torch.Size(part.shape).numel() for part in parts.values()) == 386_542_464


def test_a_checkpoint_is_made_once_and_runs(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "random_decoder", lambda config: pytest.fail("made again"))
    assert shapes.shape_folder("small", tmp_path) == small
    assert [path.name for path in tmp_path.iterdir()] == [small.name]
    assert load_config(small) == SMALL
    tokenizer = Tokenizer.from_folder(small)
    text = "def f(ü):\n\treturn 1"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == SMALL.vocab_size
    [output] = LLM(str(small)).generate([text], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_logits_are_of_ordinary_size_and_weights_do_not_change(small: Path, tmp_path: Path) -> None:
    model = load_model(small, torch.float32)
    ids = torch.arange(40) % SMALL.vocab_size
    spread = model.logits(model(ids, torch.arange(40), CausalAttention(40))).std()
    assert 0.3 < spread < 3
    torch.rand(3)
    before = torch.random.get_rng_state()
    assert torch.equal(shapes.random_decoder(SMALL).norm.weight, torch.ones(64))
    assert torch.equal(torch.random.get_rng_state(), before)
    again = shapes.random_decoder(SMALL).layers[1].mlp.down_proj.weight
    assert torch.equal(again.bfloat16().float(), model.layers[1].mlp.down_proj.weight)


def test_a_checkpoint_that_was_not_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)
    monkeypatch.setattr(shapes, "byte_tokenizer", lambda size: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        shapes.shape_folder("small", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape '7b' is not available; there are: 0\.4b"):
        shapes.shape_folder("7b")
