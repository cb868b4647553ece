"""Write prompts that the bundled models have never seen: pieces of held-out files, for tests and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from minillm.training.train_tokenizer import END_OF_TEXT_ID


def write_held_out_prompts(corpus: Path, path: Path, count: int = 128, longest: int = 256) -> None:
    """Write `count` prompts as JSON lines: the file each comes from and its text.

    Each starts at the beginning of a line; the held-out files take turns. Lengths are spaced evenly on a log scale from
    4 to `longest` tokens and shuffled, so that short and long prompts share a batch.
    """
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    names = json.loads((corpus / "corpus.json").read_text())["held_out_files"]
    tokens = np.load(corpus / "held_out.npy").astype(np.int64)
    documents = np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT_ID) + 1)
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.geomspace(4, longest, count).round().astype(int))
    rows = []
    for i, length in enumerate(lengths):
        name, text = _document(tokenizer, names, documents, i, length)
        starts = [0, *[j + 1 for j, ch in enumerate(text[: len(text) // 2]) if ch == "\n" and text[j + 1] not in "\n "]]
        ids = tokenizer.encode(text[starts[rng.integers(len(starts))] :]).ids[:length]
        rows.append(json.dumps({"source": name, "prompt": tokenizer.decode(ids, skip_special_tokens=False)}))
    path.write_text("\n".join(rows) + "\n")


def _document(
    tokenizer: Tokenizer, names: list[str], documents: list[np.ndarray], start: int, length: int
) -> tuple[str, str]:
    """The name and text of the next document from `start` on with more than `3 * length + 64` tokens."""
    for offset in range(len(names)):
        i = (start + offset) % len(names)
        if documents[i].size > 3 * length + 64:
            return names[i], tokenizer.decode(documents[i].tolist(), skip_special_tokens=True)
    raise ValueError(f"no held-out file has more than {3 * length + 64} tokens; collect a larger corpus")
