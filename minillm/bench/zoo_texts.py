"""The texts of `bench zoo`: long held-out files to predict, and definitions to recall from far back.

Files from which quantisers and codebooks take their calibration text are kept apart (`models.held_out`): thresholds
are calibrated on those, everything is measured on the others.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from minillm.bench.quality import Texts
from minillm.errors import ConfigError
from minillm.models.held_out import calibration_prompts
from minillm.tokenizer import Tokenizer

NUM_SCORED = 64
"""Tokens of each row behind its prompt."""
CUE, ANSWER = 16, 9
"""Tokens of a definition that are repeated at the end of a prompt, and of those behind them that must follow."""


@dataclass(frozen=True)
class LongFile:
    """The beginning of a long held-out source file, as token ids."""

    source: str
    token_ids: list[int]


@dataclass(frozen=True)
class RecallTask:
    """A prompt that ends in the first tokens of a definition that it contains, and what follows them there.

    prompt   [ other code … ][ definition: cue, answer ][ other code: `distance` tokens ][ cue ]     answer
    """

    prompt: list[int]
    answer: list[int]


def long_files(tokenizer: Tokenizer) -> tuple[list[LongFile], list[LongFile]]:
    """The long files for calibration and for measuring."""
    fitted = {prompt.source for prompt in calibration_prompts()}
    halves: tuple[list[LongFile], list[LongFile]] = ([], [])
    for line in Path(__file__).with_name("slice_prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["slice"] == "long files":
            file = LongFile(row["source"], tokenizer.encode(row["prompt"]))
            halves[row["source"] not in fitted].append(file)
    return halves


def rows_of(files: Sequence[LongFile], length: int, count: int) -> list[list[int]]:
    """`count` rows of `length` tokens: the first of each file, then the second of each, and so on.

    Raises `ConfigError` if the files have too few.
    """
    starts = range(0, max(len(file.token_ids) for file in files) - length + 1, length)
    found = [file.token_ids[at : at + length] for at in starts for file in files if at + length <= len(file.token_ids)]
    if len(found) < count:
        raise ConfigError(f"the held-out files have {len(found)} rows of {length} tokens; {count} were asked for")
    return found[:count]


def scored_texts(rows: list[list[int]], prompt_len: int, tokenizer: Tokenizer) -> Texts:
    """The rows, scored from the second token behind their prompts on: the first is predicted from within the prompt,
    before anything of it is compressed."""
    scored = [list(range(prompt_len + 1, len(row))) for row in rows]
    num_bytes = sum(len(tokenizer.token_bytes(row[i])) for row, own in zip(rows, scored, strict=True) for i in own)
    return Texts(rows, scored, num_bytes)


def recall_tasks(
    files: Sequence[LongFile], tokenizer: Tokenizer, prompt_len: int, distance: int, count: int, seed: int = 0
) -> list[RecallTask]:
    """`count` tasks whose prompts all have `prompt_len` tokens; the answer stands `distance` tokens before the cue.

    Raises `ConfigError` if a prompt has no room for that distance.
    """
    needed = distance + 2 * CUE + ANSWER
    if distance < 1 or needed > prompt_len:
        raise ConfigError(
            f"distance={distance} must be from 1 to {prompt_len - needed + distance}, what a prompt of {prompt_len} "
            "tokens has room for"
        )
    rng = random.Random(seed)
    tasks = []
    for i in range(count):
        own, other = files[i % len(files)].token_ids, files[(i + 1) % len(files)].token_ids
        starts = _definitions(own, tokenizer)
        at = starts[rng.randrange(len(starts))]
        definition = own[at : at + CUE + ANSWER]
        first = rng.randrange(len(other) - prompt_len)
        filler = other[first : first + prompt_len - len(definition) - CUE]
        split = len(filler) - distance
        tasks.append(RecallTask([*filler[:split], *definition, *filler[split:], *definition[:CUE]], definition[CUE:]))
    return tasks


def without_definition(task: RecallTask, files: Sequence[LongFile], distance: int) -> RecallTask:
    """The same task with other code in place of the definition: what the model guesses without having read it."""
    first = len(task.prompt) - CUE - distance - CUE - ANSWER
    other = files[-1].token_ids[: CUE + ANSWER]
    return RecallTask([*task.prompt[:first], *other, *task.prompt[first + len(other) :]], task.answer)


def _definitions(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens at which `def` or `class` begins at the start of a line, with enough tokens behind them; all tokens if
    there are none."""
    parts = [tokenizer.token_bytes(token) for token in token_ids]
    ends = list(accumulate(map(len, parts)))
    places = (match.start(1) for match in re.finditer(rb"^ *((?:def|class) )", b"".join(parts), re.MULTILINE))
    found = [bisect_right(ends, place) for place in places]
    last = len(parts) - CUE - ANSWER
    return [i for i in found if i <= last] or list(range(last + 1))
