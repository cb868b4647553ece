"""Lesson 14: texts that are edited, a multi-head model, and what reused keys and values cost and save."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.models.hub import resolve
from minillm.models.loading import load_model, save_llama
from minillm.ops.rerotation import rerotate
from minillm.reuse.document_store import DocumentStore
from minillm.reuse.edit import edited_prompt
from minillm.reuse.kv_span import KVSpan, Rotation
from minillm.reuse.offload import Interval, Link
from minillm.reuse.scratch import Scratch
from minillm.teaching.latency import CLOCK, seconds_of
from minillm.teaching.roofline_parts import repeat_heads, with_kv_heads
from minillm.teaching.workshop.l12_levels import mean_kl
from minillm.viz.timeline.transfer_timeline import TimedPart

Prompt = dict[str, Any]
SCORED = 32
"""Tokens at the end of a text whose predictions are compared."""
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

# ----------------------------------------------------------------------------------------------------- multi-head form


def save_multi_head(name: str, folder: Path) -> None:
    """Write the model `name` to `folder` with a key and a value head of its own for each query head: copies of those
    that the query head uses. The same function, and a cache that is larger by the number of queries per KV head."""
    model = load_model(name, torch.float32)
    save_llama(with_kv_heads(model, model.config.num_heads, repeat_heads), folder, torch.float32)
    for file in resolve(name).glob("tokenizer*"):
        shutil.copy(file, folder)


@contextmanager
def multi_head(name: str, **options: Any) -> Iterator[LLM]:
    """The model `name` in its multi-head form, in plain PyTorch."""
    with TemporaryDirectory() as folder:
        save_multi_head(name, Path(folder))
        yield LLM(folder, enforce_eager=True, **options)


# ---------------------------------------------------------------------------------------- what a request would predict


def served(llm: LLM, prompt: Prompt, count: int = SCORED) -> Tensor:
    """The log-probabilities after the last `count` tokens, as a request with this prompt computes them: on top of what
    the prefix cache has under its salt. `[count, vocab]`."""
    ids = prompt["prompt_token_ids"]
    with Scratch(llm, len(ids)) as scratch:
        known = min(scratch.copy_cached(ids, prompt.get("cache_salt", "")), len(ids) - count)
        return _scored(llm, scratch, ids, known, count)


def computed(llm: LLM, ids: Sequence[int], count: int = SCORED) -> Tensor:
    """The same with nothing from any cache."""
    with Scratch(llm, len(ids)) as scratch:
        return _scored(llm, scratch, ids, 0, count)


def _scored(llm: LLM, scratch: Scratch, ids: Sequence[int], known: int, count: int) -> Tensor:
    first = len(ids) - count
    if known < first:
        scratch.forward(ids[known:first], known)
    segment = Segment(list(ids[first:]), first, scratch.blocks, num_logits=count)
    return llm.engine.runner.run([segment]).float().log_softmax(-1)


@dataclass(frozen=True)
class Difference:
    """How far predictions are from those of a plain request."""

    kl: float
    """KL(plain ‖ these), the mean over the scored tokens."""
    agree: float
    """Share of the scored tokens with the same argmax."""

    @classmethod
    def between(cls, plain: Sequence[Tensor], found: Sequence[Tensor]) -> Difference:
        """Over all pairs of `[count, vocab]`."""
        same = torch.cat([(a.argmax(-1) == b.argmax(-1)).float() for a, b in zip(plain, found, strict=True)])
        kl = sum(map(mean_kl, plain, found)) / len(plain)
        return cls(max(0.0, kl), float(same.mean()))  # rounding may bring it below 0


# --------------------------------------------------------------------------------------------------------------- edits


@dataclass(frozen=True)
class Edit:
    """`ids[start:stop]` is replaced by `new`."""

    kind: str
    ids: list[int]
    start: int
    stop: int
    new: list[int]

    @property
    def after(self) -> list[int]:
        """The edited text."""
        return [*self.ids[: self.start], *self.new, *self.ids[self.stop :]]

    @property
    def suffix(self) -> int:
        """Tokens that move."""
        return len(self.ids) - self.stop

    def prompt(self, llm: LLM, salt: str, rotate: Rotation = rerotate) -> Prompt:
        """The edited text, its keys and values ready (PIE)."""
        return edited_prompt(llm, self.ids, self.start, self.stop, self.new, salt=salt, rotate=rotate)


INSERTED = "    # the caller has checked the arguments, so nothing is checked here again\n"


def edits(llm: LLM, texts: Sequence[list[int]], place: float = 0.25) -> list[Edit]:
    """Two edits of each text, at the first line boundary behind `place` of it, or else the last: a comment is inserted,
    a line is deleted."""
    tokenizer, found = llm.engine.tokenizer, []
    new = tokenizer.encode(INSERTED, add_special_tokens=False)
    for ids in texts:
        ends = [i + 1 for i, token in enumerate(ids[:-1]) if "\n" in tokenizer.decode([token])]
        start = next((end for end in ends if end >= place * len(ids)), ends[-1])
        following = next((end for end in ends if end > start + 4), len(ids))
        found.append(Edit("insert a comment", ids, start, start, new))
        found.append(Edit("delete a line", ids, start, following, []))
    return found


def unmoved(keys: Tensor, frequencies: Tensor, delta: int) -> Tensor:
    """The rotation that is none: keys keep their old positions."""
    return keys


def update_seconds(llm: LLM, edit: Edit, make: Callable[[str], Prompt], rounds: int = 5) -> float:
    """Processor time from an edit to its next token: the median of `rounds`. Before each, the old text is in the prefix
    cache, and the new one is not. `make`: salt → prompt."""
    taken = []
    for number in range(rounds + 1):
        llm.reset_prefix_cache()
        llm.generate({"prompt_token_ids": edit.ids}, ONE, use_tqdm=False)
        began = CLOCK()
        llm.generate(make(f"round {number}"), ONE, use_tqdm=False)
        taken.append(CLOCK() - began)
    llm.reset_prefix_cache()
    return statistics.median(taken[1:])


# ------------------------------------------------------------------------------------------------------------- loading


def prefill_seconds(llm: LLM, ids: Sequence[int], rounds: int = 5) -> float:
    """Processor time to compute keys and values of a text: the median of `rounds`."""
    with Scratch(llm, len(ids)) as scratch:
        return seconds_of(lambda: scratch.forward(ids, 0), repeats=1, rounds=rounds)


def load_seconds(store: DocumentStore, ids: Sequence[int], rounds: int = 5) -> float:
    """Processor time to map a stored document, which is in the page cache, and copy it into blocks; the median."""
    with Scratch(store.llm, len(ids)) as scratch:
        return seconds_of(lambda: scratch.write(store.load(ids)), repeats=1, rounds=rounds)


@dataclass
class Reader:
    """Brings a document's keys and values into the cache: over `link`, after `latency` seconds, or by computing them.

    Documents of at least `break_even` tokens are loaded. Seconds are those that the link states, and the processor time
    of everything else: other programs do not count.
    """

    store: DocumentStore
    link: Link
    latency: float
    break_even: float

    def seconds(self, ids: Sequence[int], load: bool) -> float:
        """Seconds of one of both ways; the best of three."""
        return min(self._once(ids, load) for _ in range(3))

    def prepare(self, ids: Sequence[int]) -> str:
        """Bring a document that stands at the beginning of a prompt into the prefix cache; returns how."""
        load = len(ids) >= self.break_even
        self._once(ids, load)
        return "loaded" if load else "computed"

    def _once(self, ids: Sequence[int], load: bool) -> float:
        with Scratch(self.store.llm, len(ids)) as scratch:
            began = CLOCK()
            if load:
                span = self.store.load(ids)
                taken = CLOCK() - began + self.latency + span.num_bytes / self.link.bandwidth
                self.link.wait(self.latency)
                keys, values = self.link.send(span.keys, span.values)
                began = CLOCK()
                scratch.write(KVSpan(span.token_ids, 0, keys, values))
            else:
                taken = 0.0
                scratch.forward(ids, 0)
            taken += CLOCK() - began
            scratch.publish(ids, "")
        return taken


def load_timeline(store: DocumentStore, pieces: Sequence[list[int]], question: Sequence[int]) -> list[TimedPart]:
    """Load `pieces` one after the other, rotate each to its place, then compute the question: what ran when, in seconds
    of processor time. Here the processor does the link's work, too: nothing overlaps."""
    llm, parts, position = store.llm, [], 0
    config = llm.engine.runner.model.config
    total = sum(map(len, pieces)) + len(question)
    with Scratch(llm, total) as scratch:
        began = CLOCK()

        def timed(lane: str, name: str, run: Callable[[], Any]) -> Any:
            start = CLOCK() - began
            result = run()
            parts.append(TimedPart(lane, name, start, CLOCK() - began))
            return result

        for piece in pieces:
            span = timed("link", "keys and values", lambda ids=piece: store.load(ids))
            at = position
            moved = timed("compute", "rotate", lambda s=span, at=at: s.moved_to(at, config, store.rotate))
            timed("link", "keys and values", lambda m=moved: scratch.write(m))
            position += len(piece)
        timed("compute", "prefill", lambda: scratch.forward(question, position))
    return parts


def as_parts(intervals: Sequence[Interval]) -> list[TimedPart]:
    """A transfer's intervals, to be drawn."""
    return [TimedPart(part.lane, part.name, part.start, part.end) for part in intervals]
