"""Lesson 14: a store of keys and values in memory, which asks a function what of it may be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any

from minillm import LLM
from minillm.ops.rerotation import rerotate
from minillm.reuse.kv_span import KVSpan, Rotation
from minillm.reuse.scratch import Scratch

NOTHING = ""
"""The hash of no tokens: nothing stands before the text."""


@dataclass(frozen=True)
class Key:
    """What determines the keys and values of a text, and what a prompt wants."""

    text: str
    """Hash of the text's tokens."""
    before: str
    """Hash of all tokens before it; `NOTHING` if it stands at the beginning."""
    start: int
    """The position of its first token: how many tokens are before it."""
    model: str
    """Fingerprint of the model's weights."""
    dtype: str
    """Of the stored numbers."""
    format: int
    """Version of how they are stored."""


Find = Callable[[Sequence[Key], Key], "tuple[int, int, bool] | None"]
"""`(entries, wanted)` → (index of the entry, shift, exact), or None: the exercise `find_entry`."""


def digest(token_ids: Sequence[int]) -> str:
    """Hash of a text."""
    return sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16] if token_ids else NOTHING


class SpanStore:
    """Texts, computed alone or within a prompt, kept for later prompts.

    `find` decides what may be used; `hash_text` makes the hashes of texts; `rotate` moves keys.
    """

    def __init__(
        self,
        find: Find,
        hash_text: Callable[[Sequence[int]], str] = digest,
        rotate: Rotation = rerotate,
    ) -> None:
        self.find, self.hash_text, self.rotate = find, hash_text, rotate
        self.keys: list[Key] = []
        self.spans: list[KVSpan] = []

    def add(self, llm: LLM, before: Sequence[int], token_ids: Sequence[int], model: str) -> None:
        """Compute a text behind the tokens `before`, and keep its keys and values as those of `model`."""
        start, end = len(before), len(before) + len(token_ids)
        with Scratch(llm, end) as scratch:
            scratch.forward([*before, *token_ids], 0)
            self.spans.append(scratch.read(start, end, token_ids))
        self.keys.append(self.wanted(before, token_ids, model))

    def wanted(self, before: Sequence[int], token_ids: Sequence[int], model: str) -> Key:
        """The key of a text behind the tokens `before`."""
        return Key(self.hash_text(token_ids), self.hash_text(before), len(before), model, "float32", 1)

    def prompt(self, llm: LLM, texts: Sequence[Sequence[int]], question: Sequence[int], model: str) -> Assembled:
        """The prompt of `texts` and a question: what the store has is written, everything else computed.

        Keys and values that are not said to be exact are published under a salt. What stands behind them has attended
        to them, so it is under the salt, too."""
        starts = [0, *accumulate(map(len, texts))]
        ids = [token for text in texts for token in text]
        used: list[int | None] = []
        all_exact = True
        with Scratch(llm, len(ids) + len(question)) as scratch:
            for text, start in zip(texts, starts, strict=False):
                found = self.find(self.keys, self.wanted(ids[:start], text, model))
                used.append(None if found is None else found[0])
                if found is None:
                    scratch.forward(text, start)
                    continue
                index, shift, exact = found
                all_exact &= exact
                scratch.write(self._moved(llm, index, start, shift))
            salt = "" if all_exact else f"reused {used}"
            scratch.publish(ids, salt)
        prompt: dict[str, Any] = {"prompt_token_ids": [*ids, *question]}
        return Assembled(prompt if not salt else {**prompt, "cache_salt": salt}, used, all_exact)

    def _moved(self, llm: LLM, index: int, start: int, shift: int) -> KVSpan:
        span, config = self.spans[index], llm.engine.runner.model.config
        return span.moved_to(span.start + shift, config, self.rotate).placed_at(start)


@dataclass(frozen=True)
class Assembled:
    """A prompt, the entries that it uses (None: computed), and whether all of them are said to be exact."""

    prompt: dict[str, Any]
    used: list[int | None]
    exact: bool
