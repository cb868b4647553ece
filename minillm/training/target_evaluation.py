"""The finished target on held-out files: how it uses a long context, fills gaps, repeats itself, and what it writes.

Prompts are not chosen by hand: each written text continues the first function of a held-out file, in the files' order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from minillm.errors import TrainingError
from minillm.llm import LLM
from minillm.models.decoder import Decoder
from minillm.sampling.params import SamplingParams
from minillm.training.continuations import PROMPT_LENGTH, continue_rows
from minillm.training.corpus import Document
from minillm.training.data import read_documents
from minillm.training.evaluate import repetition
from minillm.training.gaps import AFTER, BEFORE, Filled, fill, line_gaps
from minillm.training.position_loss import EDGES, Band, loss_by_position

FIRST_FUNCTION = re.compile(r"^ *def \w+\([^\0]{0,300}?\).{0,60}:\n", re.MULTILINE)


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    edges: tuple[int, ...] = EDGES
    """Boundaries of the bands of `loss_by_position`."""
    gaps: int = 400
    gap_characters: tuple[int, int] = (BEFORE, AFTER)
    """Maximum characters of a gap's prefix and suffix."""
    rows: int = 512
    """Texts in which repetition is measured. For one model, 64 gave 37.9%, another 64 gave 47.7%, 512 gave 41.6%."""
    repetition_tokens: int = 128
    """Tokens of each of them."""
    texts: int = 20
    """Functions that the target continues, greedily and sampled."""
    text_tokens: int = 64
    prompt_characters: int = 1500
    """Maximum of a function's prompt: what its file has before its body."""


@dataclass(frozen=True)
class Repetition:
    """The share of 8-token spans that repeat an earlier one, in continuations of the same prompts."""

    tokens: int
    """Of each continuation."""
    greedy: float
    """Of the target's greedy text."""
    code: float
    """Of the files themselves."""


@dataclass(frozen=True)
class Written:
    """What the target wrote after the first lines of a function."""

    source: str
    signature: str
    greedy: str
    sampled: str
    """At temperature 1."""


@dataclass(frozen=True)
class TargetEvaluation:
    """All measurements of a target alone."""

    positions: list[Band]
    gaps: Filled
    repetition: Repetition
    texts: list[Written] = field(default_factory=list)


def evaluate_target(target: Decoder, checkpoint: Path, corpus: Path, amount: Amount) -> TargetEvaluation:
    """Measure `target`, whose weights are already rounded as they are exported, on the held-out files of `corpus`, in
    fp32 and on its device. `checkpoint`: the folder that it is exported to."""
    files = read_documents(corpus / "held_out.jsonl.gz")
    llm = LLM(str(checkpoint), seed=0, dtype="float32", device=str(target.embed_tokens.weight.device))
    tokens = [np.array(llm.engine.tokenizer.encode(file.text), dtype=np.int64) for file in files]
    return TargetEvaluation(
        loss_by_position(target, tokens, amount.edges),
        fill(llm, line_gaps([file.text for file in files], amount.gaps, *amount.gap_characters)),
        measure_repetition(llm, tokens, amount.rows, amount.repetition_tokens),
        list(write_functions(llm, files, amount)),
    )


def measure_repetition(llm: LLM, files: Sequence[np.ndarray], rows: int, length: int) -> Repetition:
    """Continue `rows` prompts, each from a random place of one of `files` (token ids) in turn, by `length` tokens.

    Raises `TrainingError` if no file has more tokens than a prompt and its continuation.
    """
    whole = PROMPT_LENGTH + length
    usable = [file for file in files if len(file) > whole]
    if not usable:
        raise TrainingError(f"no held-out file has more than {whole} tokens; collect longer files")
    rng = np.random.default_rng(0)
    chosen = [usable[row % len(usable)] for row in range(rows)]
    starts = [int(rng.integers(len(file) - whole)) for file in chosen]
    cut = [file[start : start + whole] for file, start in zip(chosen, starts, strict=True)]
    code = torch.from_numpy(np.stack(cut))
    text = continue_rows(llm, code[:, :PROMPT_LENGTH], whole, torch.zeros(rows), seed=0)
    greedy, real = (sum(repetition(row[PROMPT_LENGTH:]) for row in found) / rows for found in (text, code))
    return Repetition(length, greedy, real)


def write_functions(llm: LLM, files: Sequence[Document], amount: Amount) -> Iterator[Written]:
    """Continue the first function of each file that has one, greedily and at temperature 1, until there are enough."""
    found = [(file, match) for file in files if (match := FIRST_FUNCTION.search(file.text))][: amount.texts]
    prompts = [file.text[: match.end()][-amount.prompt_characters :] for file, match in found]
    texts = [
        [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        for params in (
            SamplingParams(temperature=0, max_tokens=amount.text_tokens),
            SamplingParams(temperature=1, seed=0, max_tokens=amount.text_tokens),
        )
    ]
    for (file, match), greedy, sampled in zip(found, *texts, strict=True):
        yield Written(file.name, match[0], greedy, sampled)
