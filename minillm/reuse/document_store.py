"""Keys and values of documents on disk, loaded instead of computed (MatKV: Shin et al. 2025).

    once            document → the model → keys and values → folder/KEY.safetensors
    at a query      [ document 7 │ document 2 │ … │ question ]       documents: loaded; the question: computed

A document is stored as the model computes it alone, from position 0 on. In a prompt it stands elsewhere, so its keys
are re-rotated to where it stands (`rerotate=False` leaves them, to see what that costs). What is missing in any case:
documents have not attended to each other. The first one is exact, the others are approximate.

A file is named by a hash of what determines its contents: the format, a sample of the model's weights, its
configuration, dtype and quantisation, and the tokens. So another model, another precision or another text is another
file, and two processes that write the same file write the same numbers, up to rounding; each writes under a name of its
own and renames. Files are mapped into memory, and checked against their checksum when a process first reads them.

Wins: reading is faster than computing where the disk is fast and the model large. Loses: a small model on a fast
processor; disks: every token takes as many bytes as in the cache.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minillm.config import at_least
from minillm.errors import CheckpointError, ConfigError, PromptError
from minillm.input_processor import check_token_ids
from minillm.llm import LLM
from minillm.models.config import ModelConfig
from minillm.models.fingerprint import digest_of_weights
from minillm.models.hub import resolve
from minillm.ops.rerotation import rerotate
from minillm.reuse.kv_span import KVSpan, Rotation
from minillm.reuse.scratch import Scratch, check_prefix_caching
from minillm.whole_file import replacing

_ROTATIONS = count(1)
"""Numbers for other ways to move keys."""
PART = "minillm-kv-"
"""The beginning of a file's name while it is written. Only such files are cleaned up; the folder may hold others."""
WRITING_S = 3600
"""No process writes one file for longer, in seconds."""
FORMAT = 2
"""The version of the files. A file of another version is not found, because its name is different."""


class DocumentStore:
    """The stored documents of one model in `folder`, of at most `max_bytes` in all; the least recently used go first.

    Several processes may use one folder. Raises `ConfigError` for a limit below one byte or a file in place of the
    folder, and what `Scratch` raises for an engine whose cache cannot be read. `rotate`: how keys are moved to where a
    document stands in a prompt.
    """

    def __init__(self, llm: LLM, folder: str | Path, max_bytes: int | None = None, rotate: Rotation = rerotate) -> None:
        if max_bytes is not None:
            at_least("max_bytes", max_bytes, 1)
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ConfigError(f"{folder} is a file; give a folder for the documents")
        Scratch(llm, 1)  # can its cache be read?
        check_prefix_caching(llm)
        self.llm, self.folder, self.max_bytes, self.rotate = llm, Path(folder), max_bytes, rotate
        self.folder.mkdir(parents=True, exist_ok=True)
        args = llm.engine.scheduler.config
        dtype = str(llm.engine.runner.cache.stored_rows().keys[0].dtype).removeprefix("torch.")
        model = f"{digest_of_weights(resolve(llm.model))} {_computing(llm.engine.runner.model.config)}"
        self.identity = f"{FORMAT} {model} {dtype} {args.quantization}"
        """What determines the stored numbers, apart from the tokens."""
        self._rotation = "" if rotate is rerotate else f" by {next(_ROTATIONS)}"
        """Stores that move keys in different ways must not find each other's in the prefix cache."""
        self._checked: set[Path] = set()

    def path(self, token_ids: Sequence[int]) -> Path:
        """The file of a document, whether it exists or not."""
        digest = sha256(self.identity.encode() + np.asarray(token_ids, np.int64).tobytes()).hexdigest()
        return self.folder / f"{digest[:32]}.safetensors"

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def add(self, document: str | Sequence[int]) -> Path:
        """Compute a document's keys and values and store them, unless they are there. Returns the file."""
        token_ids = self._tokens(document)
        path = self.path(token_ids)
        if not path.exists():
            with Scratch(self.llm, len(token_ids)) as scratch:
                scratch.forward(token_ids, 0)
                span = scratch.read(0, len(token_ids), token_ids)
            self._write(path, span)
            self._make_room(path)
        with suppress(OSError):
            os.utime(path)  # used now
        return path

    def load(self, document: str | Sequence[int]) -> KVSpan:
        """A stored document, at position 0. Raises `CheckpointError` if it is not there or damaged."""
        token_ids = self._tokens(document)
        path = self.path(token_ids)
        try:
            with safe_open(path, framework="pt") as file:
                keys, values, stated = file.get_tensor("keys"), file.get_tensor("values"), file.metadata()
        except FileNotFoundError:
            raise CheckpointError(
                f"the store in {self.folder} does not have this document of {len(token_ids)} tokens for this model; "
                "add it first"
            ) from None
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(f"{path} cannot be read ({problem}); delete it and add the document again") from None
        if path not in self._checked:
            if stated != self._metadata(keys, values):
                raise CheckpointError(f"{path} is damaged: its checksum is wrong; delete it and add the document again")
            self._checked.add(path)
        with suppress(OSError):
            os.utime(path)  # used now
        return KVSpan(token_ids, 0, keys, values)

    def prompt(
        self, documents: Sequence[str | Sequence[int]], question: str | Sequence[int], *, rerotate: bool = True
    ) -> dict[str, Any]:
        """The prompt for `llm.generate` of all documents, one after the other, and the question; the documents' keys
        and values are loaded. Raises `PromptError` for a text or token ids in place of the list, and what `load` and
        `Scratch` raise."""
        if isinstance(documents, str | bytes) or not isinstance(documents, Iterable):
            raise PromptError(f"documents must be a list, even of only one, not {type(documents).__name__}")
        spans = [self.load(document) for document in documents]
        token_ids = [token for span in spans for token in span.token_ids]
        token_ids += self._tokens(question, add_special_tokens=not spans)
        starts = [0, *accumulate(len(span.token_ids) for span in spans)][:-1]
        config = self.llm.engine.runner.model.config
        moved = f"rotated{self._rotation}" if rerotate else "as stored"
        salt = f"documents {moved} {[len(span.token_ids) for span in spans]}"
        with Scratch(self.llm, len(token_ids)) as scratch:
            for span, start in zip(spans, starts, strict=True):
                scratch.write(span.moved_to(start, config, self.rotate) if rerotate else span.placed_at(start))
            known = starts[-1] + len(spans[-1].token_ids) if spans else 0
            scratch.publish(token_ids[:known], salt)
        return {"prompt_token_ids": token_ids, "cache_salt": salt}

    def _tokens(self, text: str | Sequence[int], add_special_tokens: bool = True) -> list[int]:
        """A document begins with the tokenizer's special tokens, as a prompt does, because it is computed alone."""
        if isinstance(text, bytes | bytearray | memoryview) or not isinstance(text, Iterable):
            raise PromptError(
                f"a document or question must be text or token ids, not {type(text).__name__}; decode bytes, and give "
                "documents as a list, even if there is only one"
            )
        found = list(text)
        if found and isinstance(text, str):
            found = self.llm.engine.tokenizer.encode(text, add_special_tokens)
        if not found:
            raise PromptError("a document or question without tokens cannot be stored or asked; give it text")
        check_token_ids(found, self.llm.engine.runner.model.config.vocab_size)
        return found

    def _write(self, path: Path, span: KVSpan) -> None:
        keys, values = span.keys.cpu().contiguous(), span.values.cpu().contiguous()
        with replacing(path, self.folder / f"{PART}{uuid4().hex}.part") as part:
            save_file({"keys": keys, "values": values}, part, metadata=self._metadata(keys, values))
            part.chmod(0o644)  # other users of the folder may read it

    def _metadata(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, str]:
        """One entry: safetensors writes several in any order, and equal documents are equal files."""
        return {"minillm": f"{self.identity} {_checksum(keys, values)}"}

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of last use, bytes and path of every file. Another process may delete one meanwhile."""
        found = []
        for path in self.folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):
                facts = path.stat()
                found.append((facts.st_mtime, facts.st_size, path))
        return sorted(found)

    def _make_room(self, newest: Path) -> None:
        """Delete what a killed process left of a write, then the least recently used files until the limit holds. The
        newest stays, even if it alone is larger; so does what may not be deleted, such as another user's file."""
        for part in self.folder.glob(f"{PART}*.part"):
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > WRITING_S:
                    part.unlink()
        if self.max_bytes is None:
            return
        files = self._files()
        excess = sum(size for _, size, _ in files) - self.max_bytes
        for _, size, path in files:
            if excess <= 0:
                break
            if path != newest:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    excess -= size


def _computing(config: ModelConfig) -> ModelConfig:
    """`config` without what keys and values do not depend on."""
    return replace(config, eos_token_ids=(), bos_token_id=None, sampling_defaults={}, max_position_embeddings=0)


def _checksum(*tensors: torch.Tensor) -> str:
    """CRC-32 over the bytes of all tensors: it finds damage, not malice."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"
