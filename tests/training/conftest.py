"""A corpus of made-up source files and models of a few thousand numbers."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.training import compiling, data
from minillm.training.corpus import Source
from minillm.training.data import Windows
from minillm.training.pretrain import dense_logits

NAMES = ("cache", "block", "token", "page", "draft", "target", "batch", "layer", "query", "value", "head", "slot")


def source_file(seed: int) -> str:
    """About 3 KB that look like Python, so that there is something to learn."""
    rng = random.Random(seed)
    parts = []
    for _ in range(24):
        a, b, c = rng.choices(NAMES, k=3)
        parts.append(f"def {a}_{b}(self, {c}):\n    for {a} in self.{b}s:\n        {c}.append({a})\n    return {c}\n\n")
    return "".join(parts)


def config(layers: int = 2, hidden: int = 32) -> ModelConfig:
    """A decoder of two layers and a vocabulary of 300."""
    return ModelConfig(
        vocab_size=300,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
    )


@torch.no_grad()
def bits_per_byte(model: Decoder, windows: Windows, num_bytes: int, length: int = 1024) -> float:
    """Cross-entropy over a whole split in bits, divided by the bytes of its text."""
    total = count = 0.0
    for inputs, targets in windows.in_order(4, length):
        loss = F.cross_entropy(dense_logits(model, inputs).float(), targets.flatten(), reduction="sum")
        total += loss.item()
        count += targets.numel()
    bytes_per_token = num_bytes / windows.tokens.size
    return total / count / math.log(2) / bytes_per_token


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus folder: 200 files, of which a handful is held out."""
    root = tmp_path_factory.mktemp("sources")
    files = []
    for i in range(200):
        path = root / f"module{i}.py"
        path.write_text(source_file(i))
        files.append((f"module{i}.py", path))
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "sources", lambda: [Source("made-up", "1.2.3", "MIT", tuple(files))])
        data.prepare(folder, 300)
    return folder


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longer than all of these tests together."""
    monkeypatch.setattr(compiling, "has_compiler", lambda: False)
    torch.manual_seed(0)
