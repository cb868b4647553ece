"""The corpus as two flat arrays of token ids (training, held out), made once and kept on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.training.corpus import documents, sources
from minillm.training.tokenizer import END_OF_TEXT_ID, train_tokenizer


def prepare(folder: Path, vocab_size: int) -> None:
    """Collect the corpus, train the tokenizer, encode everything into `folder`. Does nothing if that is done."""
    if (folder / "corpus.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    found = sources()
    docs = list(tqdm(documents(found), desc="reading source files", unit=" files"))
    tokenizer = train_tokenizer((d.text for d in docs if not d.held_out), vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    summary: dict[str, object] = {}
    for split, chosen in (
        ("train", [d for d in docs if not d.held_out]),
        ("held_out", [d for d in docs if d.held_out]),
    ):
        ids = encode_all(tokenizer, [d.text for d in chosen], split)
        np.save(folder / f"{split}.npy", ids)
        summary[split] = {
            "files": len(chosen),
            "bytes": sum(len(d.text.encode()) for d in chosen),
            "tokens": int(ids.size),
        }
    summary["held_out_files"] = [d.name for d in docs if d.held_out]
    kept = {d.name.split("/")[0] for d in docs}
    summary["sources"] = [[s.name, s.version, s.licence] for s in found if s.name in kept]
    (folder / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")


def encode_all(tokenizer: Tokenizer, texts: list[str], label: str) -> np.ndarray:
    """All `texts` as one uint16 array, an end-of-text token after each."""
    parts: list[np.ndarray] = []
    for start in tqdm(range(0, len(texts), 256), desc=f"encoding {label}", unit="×256 files"):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 256]):
            parts.append(np.array([*encoding.ids, END_OF_TEXT_ID], dtype=np.uint16))
    return np.concatenate(parts)


class Batches(Protocol):
    """Where a `Trainer` gets its text."""

    def batch(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, each `[rows, length]`, int64; the same for the same arguments."""


class Windows:
    """Random windows of the training tokens; the same seed and step always give the same batch."""

    def __init__(self, folder: Path, split: str, seed: int = 0) -> None:
        self.tokens = np.load(folder / f"{split}.npy", mmap_mode="r")
        self.seed = seed

    def batch(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, each `[rows, length]`, int64. Raises `TrainingError` if there is too little text."""
        if self.tokens.size < length + 2:
            raise TrainingError(f"rows of {length} tokens need a text of {length + 2}; this one has {self.tokens.size}")
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(0, self.tokens.size - length - 1, size=rows)
        block = np.stack([self.tokens[s : s + length + 1] for s in starts]).astype(np.int64)
        both = torch.from_numpy(block)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def in_order(self, rows: int, length: int, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Consecutive, non-overlapping windows over the whole split (or its first `limit` tokens), for evaluation."""
        usable = min(self.tokens.size - 1, limit or self.tokens.size)
        per_batch = rows * length
        batches = []
        for start in range(0, usable - per_batch + 1, per_batch):
            block = torch.from_numpy(self.tokens[start : start + per_batch + 1].astype(np.int64))
            batches.append((block[:-1].view(rows, length), block[1:].view(rows, length)))
        return batches
