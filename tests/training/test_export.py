from __future__ import annotations

import json

import pytest
import torch

from minillm.training.export import EXPORTED, export
from minillm.training.pretrain import dense_logits, new_model

from .conftest import config


@pytest.fixture
def exported(corpus, tmp_path):
    model = new_model(config())
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.2 + (p.ndim == 1)
        p.data = p.data.to(EXPORTED).float()
    export(model, corpus / "tokenizer.json", tmp_path / "model", {"README.md": "# card\n"})
    return model, tmp_path / "model"


def test_transformers_computes_the_same_logits(exported):
    from transformers import AutoModelForCausalLM

    model, folder = exported
    other = AutoModelForCausalLM.from_pretrained(folder).float()
    ids = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(dense_logits(model, ids), other(ids).logits.flatten(0, 1), rtol=1e-4, atol=1e-4)
    assert other.config.eos_token_id == other.generation_config.eos_token_id == 0


def test_transformers_reads_the_tokenizer(exported):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported[1])
    text = "def f(x):\n    return  x + 'é'\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length == 512


def test_folder_is_complete_and_nothing_else_is_left(exported):
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {file.name for file in exported[1].iterdir()} == names | {"README.md"}
    assert [file.name for file in exported[1].parent.iterdir()] == ["model"]
    assert json.loads((exported[1] / "config.json").read_text())["eos_token_id"] == 0


def test_exporting_again_leaves_mapped_weights_alone(exported, corpus):
    """A reader that mapped the old file keeps the old bytes: the new file takes its name, not its place."""
    model, folder = exported
    with (folder / "model.safetensors").open("rb") as reader:
        old = (folder / "model.safetensors").read_bytes()
        model.norm.weight.data.fill_(3.0)
        export(model, corpus / "tokenizer.json", folder)
        assert reader.read() == old != (folder / "model.safetensors").read_bytes()
