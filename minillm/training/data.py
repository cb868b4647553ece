"""The corpus on disk, and batches of its tokens: training files in passes (epochs), held-out files in order."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.extras import need
from minillm.fill_in_the_middle import FIM_PREFIX
from minillm.training.corpus import Document, documents, sources
from minillm.training.fim_documents import PRETRAINING, GapShares, training_document
from minillm.training.state_files import copy_whole, read_json, replacing, write_array, write_json
from minillm.training.train_tokenizer import END_OF_TEXT, END_OF_TEXT_ID, train_tokenizer

MAX_VOCABULARY = 2**16
"""Tokens are stored in 16 bits."""


def prepare(folder: Path, vocab_size: int) -> None:
    """Collect the corpus, train the tokenizer, encode the held-out files into `folder`. Does nothing if that is done.

    An existing tokenizer in `folder` is kept, because a run from another machine brings its own.

    Training files are stored as text (`train.jsonl.gz`), because each pass is encoded separately, with new gaps to fill
    in. Raises `UnsupportedError` if the library that finds near-duplicates is not installed.
    """
    if (folder / "corpus.json").exists():
        return
    need("train", "datasketch")
    from minillm.training.near_duplicates import without_near_duplicates

    folder.mkdir(parents=True, exist_ok=True)
    found = sources()
    every = list(tqdm(documents(found), desc="reading source files", unit=" files"))
    kept = without_near_duplicates([d.text for d in every], [d.held_out for d in every])
    docs = [every[i] for i in kept]
    train, held_out = [d for d in docs if not d.held_out], [d for d in docs if d.held_out]
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.exists():
        with replacing(tokenizer_file) as fresh:
            train_tokenizer((d.text for d in train), vocab_size).save(str(fresh))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokens = {"train": _num_tokens(tokenizer, train)}
    ids = encode_all(tokenizer, [d.text + END_OF_TEXT for d in held_out], "held_out")
    tokens["held_out"] = int(ids.size)
    write_array(folder / "held_out.npy", ids)
    summary: dict[str, object] = {"near_duplicates": len(every) - len(docs)}
    for split, chosen in (("train", train), ("held_out", held_out)):
        write_documents(folder / f"{split}.jsonl.gz", chosen)
        num_bytes = sum(len(d.text.encode()) for d in chosen)
        summary[split] = {"files": len(chosen), "bytes": num_bytes, "tokens": tokens[split]}
    summary["held_out_files"] = [d.name for d in held_out]
    names = {d.name.split("/")[0] for d in docs}
    summary["sources"] = [[s.name, s.version, s.licence] for s in found if s.name in names]
    write_json(folder / "corpus.json", summary)


def retokenise(corpus: Path, tokenizer_file: Path, folder: Path) -> None:
    """Make `folder` a corpus of the same files in the tokens of another tokenizer. Does nothing if that is done.

    Raises `TrainingError` for a tokenizer without the end-of-text token of this corpus, or with too large a vocabulary.
    """
    if (folder / "corpus.json").exists():
        return
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    if tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise TrainingError(f"{tokenizer_file} has no token {END_OF_TEXT} with id {END_OF_TEXT_ID}; use another target")
    if (size := tokenizer.get_vocab_size()) > MAX_VOCABULARY:
        raise TrainingError(f"{tokenizer_file} has {size:,} tokens, at most {MAX_VOCABULARY:,} are supported")
    folder.mkdir(parents=True, exist_ok=True)
    copy_whole(tokenizer_file, folder / "tokenizer.json")
    for split in ("train", "held_out"):
        copy_whole(corpus / f"{split}.jsonl.gz", folder / f"{split}.jsonl.gz")
    train, held_out = (read_documents(folder / f"{split}.jsonl.gz") for split in ("train", "held_out"))
    ids = encode_all(tokenizer, [d.text + END_OF_TEXT for d in held_out], "held_out")
    write_array(folder / "held_out.npy", ids)
    summary = read_json(corpus / "corpus.json")
    summary["train"]["tokens"] = _num_tokens(tokenizer, train)
    summary["held_out"]["tokens"] = int(ids.size)
    write_json(folder / "corpus.json", summary)


def write_documents(file: Path, docs: list[Document]) -> None:
    """Write name and text of each document as a line of JSON, compressed."""
    with replacing(file) as fresh, gzip.open(fresh, "wt", encoding="utf-8") as lines:
        for document in docs:
            lines.write(json.dumps({"name": document.name, "text": document.text}) + "\n")


def read_documents(file: Path) -> list[Document]:
    """Read the documents that `write_documents` wrote."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def encode_all(tokenizer: Tokenizer, texts: list[str], label: str) -> np.ndarray:
    """The token ids of all `texts`, concatenated, as one uint16 array."""
    return np.concatenate(list(_encoded(tokenizer, texts, label)))


def _num_tokens(tokenizer: Tokenizer, train: list[Document]) -> int:
    """The tokens of the training files, without gaps."""
    return sum(part.size for part in _encoded(tokenizer, [d.text for d in train], "train"))


def _encoded(tokenizer: Tokenizer, texts: list[str], label: str) -> Iterator[np.ndarray]:
    for start in tqdm(range(0, len(texts), 256), desc=f"encoding {label}", unit="×256 texts"):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 256]):
            yield np.array(encoding.ids, dtype=np.uint16)


class Batches(Protocol):
    """The data of a `Trainer`."""

    def batch(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, each `[rows, length]`, int64; the same for the same arguments."""


class Passes:
    """The training files in passes (epochs). A pass is cut into windows of one length, in a random order of its own.

    If all rows have the same length, a pass contains every window once. Each length has its own windows and its own
    order, but all count the same steps. So where the length changes from step to step, some text of a pass comes twice
    and as much not at all (with three steps of 256 to one of 1,024: about a fifth each).

    Each pass has a new order of files and new gaps (`fim_documents`), if the tokenizer has tokens for gaps. It is
    encoded when it is first needed and stored in `passes/`, or with other `shares` of gaps than those of pretraining in
    a folder of its own. When a third of a pass is used, another process encodes the next one: a GPU trains on a pass in
    the time that this takes. The same arguments always give the same batch.
    """

    def __init__(self, folder: Path, shares: GapShares = PRETRAINING) -> None:
        self.folder, self.shares = folder, shares
        own = "" if shares == PRETRAINING else f"-files{shares.files:g}-lines{shares.lines:g}"
        self.encoded = folder / f"passes{own}"
        """Where the encoded passes are stored."""
        self._tokens: dict[int, np.ndarray] = {}
        self._order: dict[tuple[int, int], np.ndarray] = {}
        self._ahead: dict[int, subprocess.Popen[bytes]] = {}
        """Processes that encode a pass, by its number."""

    def batch(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, each `[rows, length]`, int64. Raises `TrainingError` if there is too little text."""
        block = np.stack([self._window(step * rows + row, length) for row in range(rows)]).astype(np.int64)
        both = torch.from_numpy(block)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _window(self, number: int, length: int) -> np.ndarray:
        """The `length + 1` tokens of window `number`, numbered across all passes."""
        number_of_pass = 0
        while number >= (count := (self._pass(number_of_pass).size - 1) // length):
            if count == 0:
                raise TrainingError(
                    f"rows of {length} tokens need a text of {length + 1}, and this one has "
                    f"{self._pass(number_of_pass).size}; make a corpus of more files"
                )
            number -= count
            number_of_pass += 1
        key = (number_of_pass, length)
        if key not in self._order:
            self._order[key] = np.random.default_rng(key).permutation(count)
        if number > count // 3:
            self._encode_ahead(number_of_pass + 1)
        start = int(self._order[key][number]) * length
        return self._pass(number_of_pass)[start : start + length + 1]

    def _pass(self, number: int) -> np.ndarray:
        if number not in self._tokens:
            if number in self._ahead:
                self._ahead.pop(number).wait()
            file = self._file(number)
            if not file.exists():
                self.write_pass(number)
            self._tokens[number] = np.load(file, mmap_mode="r")
        return self._tokens[number]

    def _file(self, number: int) -> Path:
        return self.encoded / f"{number}.npy"

    def _encode_ahead(self, number: int) -> None:
        if number in self._tokens or number in self._ahead or self._file(number).exists():
            return
        code = "import sys; from minillm.training.data import write_pass; write_pass(*sys.argv[1:])"
        shares = (str(self.shares.files), str(self.shares.lines))
        self._ahead[number] = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder), *shares, str(number)], stderr=subprocess.DEVNULL
        )
        weakref.finalize(self, self._ahead[number].terminate)  # at the latest when this process ends

    def write_pass(self, number: int) -> None:
        """Encode the training files for pass `number` and store the tokens."""
        file = self._file(number)
        file.parent.mkdir(exist_ok=True)
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        docs = read_documents(self.folder / "train.jsonl.gz")
        rng = np.random.default_rng(number)
        has_gaps = tokenizer.token_to_id(FIM_PREFIX) is not None
        order = rng.permutation(len(docs))
        texts = [
            part
            for i in order
            for part in (
                training_document(docs[i].text, rng, self.shares) if has_gaps else [docs[i].text + END_OF_TEXT]
            )
        ]
        write_array(file, encode_all(tokenizer, texts, f"pass {number + 1}"))


def write_pass(folder: str, share_of_files: str, share_of_lines: str, number: str) -> None:
    """`Passes.write_pass` with the arguments of a command line. SIGTERM leaves no part of a file."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Passes(Path(folder), GapShares(float(share_of_files), float(share_of_lines))).write_pass(int(number))


class Windows:
    """Random windows of one array of tokens; the same seed and step always give the same batch."""

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

    def in_order(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Consecutive, non-overlapping windows over the whole split, for evaluation."""
        per_batch = rows * length
        batches = []
        for start in range(0, self.tokens.size - per_batch, per_batch):
            block = torch.from_numpy(self.tokens[start : start + per_batch + 1].astype(np.int64))
            batches.append((block[:-1].view(rows, length), block[1:].view(rows, length)))
        return batches
