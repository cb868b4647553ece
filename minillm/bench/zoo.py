"""Every lossy cache technique at equal bytes: perplexity, distance from the plain cache, recall, speed.

A prompt of nearly the whole context, at most 2,048 tokens, is read, then what follows it, the true token at every
position. Only the tokens behind the prompt are scored: there every technique has done to the prompt what it does.
Budgets are shares of the bytes that the prompt takes in float16; the arithmetic is float32.

Recall: a definition of a held-out file stands `distance` tokens before the end of the prompt, where its first tokens
are repeated. Counted are the tokens that follow: right ones (argmax), answers with all tokens right, and their mean
negative log-probability in nats. The same is measured without the definition, with the plain cache: what a model
guesses anyway. A small model recalls little even with the plain cache; read a technique's figure between these two.

Tokens per second (of processor time) are of one request in plain PyTorch, which restores what it compressed in every
step. They say what a technique costs here, not what a kernel for it would gain. `speed` is relative to the plain cache,
which decodes the same tokens just after, row by row.

`squeezed` stores everything and reads less; its budget is what a decode step reads. All others store and read the same.
What `anchors` holds depends on the text; its share is the mean over the rows, at their ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.bench.harness import result, save
from minillm.bench.quality import Quality, judge
from minillm.bench.quality import Texts as ScoredTexts
from minillm.bench.zoo_cache import (
    build,
    calibrated,
    continuation,
    float16_bytes,
    plain_bytes,
    read_prompt,
    share_read,
    stored_bytes,
)
from minillm.bench.zoo_recall import Recall, recall
from minillm.bench.zoo_systems import BUDGETS, TOLERANCE, Setting, ZooSystem, list_systems
from minillm.bench.zoo_table import table
from minillm.bench.zoo_texts import (
    ANSWER,
    CUE,
    NUM_SCORED,
    LongFile,
    RecallTask,
    long_files,
    recall_tasks,
    rows_of,
    scored_texts,
    without_definition,
)
from minillm.cache.anchors import AnchorsKVCache
from minillm.cache.squeezed import SqueezedKVCache
from minillm.errors import ConfigError, MinillmError
from minillm.models.calibration import CalibrationTexts
from minillm.models.decoder import Decoder
from minillm.models.hub import resolve
from minillm.models.loading import load_config, load_model
from minillm.runtime.runner import ModelRunner
from minillm.tokenizer import Tokenizer

__all__ = ["Material", "Measured", "ZooRow", "best", "measure", "measure_system", "plain_row", "run", "table"]

PLAIN = "plain"
MIN_CONTEXT = 4 * NUM_SCORED
LONGEST = 2048
"""Largest context: the held-out files that ship with minillm have few longer stretches."""
DISTANCES = (0.1, 0.4, 0.85)
"""Default distances of recall, as shares of the prompt."""


@dataclass(frozen=True)
class ZooRow:
    """One system. If it cannot be measured, `error` says why."""

    system: str
    technique: str
    budget: float | None
    """None: a technique at its own size, or the plain cache."""
    share: float | None = None
    """Bytes of a complete prompt, as a share of those in float16; for `squeezed` the bytes that a decode step reads."""
    share_stored: float | None = None
    model_bytes: int = 0
    """Bytes that the cache stores once for all requests."""
    quality: Quality | None = None
    recall: list[Recall] = field(default_factory=list)
    tokens_per_s: float | None = None
    speed: float | None = None
    """The speed over the plain cache, both measured in turn: the median over the rows."""
    speed_min: float | None = None
    speed_max: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Material:
    """What all systems are measured on."""

    model: Decoder
    texts: ScoredTexts
    prompt_len: int
    tasks: dict[int, list[RecallTask]]
    """By distance."""
    calibration: list[list[int]]
    """Rows like those of `texts`, from other files."""
    fitted: CalibrationTexts
    """What codebooks are trained on."""


@dataclass(frozen=True)
class Measured:
    """What came out of one system."""

    logprobs: Tensor
    recall: list[Recall]
    tokens_per_s: float
    speeds: list[float]
    """The speed over the plain cache in each row; empty if it was not measured."""
    share: float | None
    """The share of a prompt's bytes, where it depends on the text: read with `squeezed`, held with `anchors`."""


def run(
    model: str = "minicoder",
    systems: list[str] | None = None,
    distances: list[int] | None = None,
    quick: bool = False,
    save_to: Path | None = None,
) -> dict[str, Any]:
    """Measure every technique, or those in `systems`. Returns the result as JSON values.

    `distances`: of recall, in tokens. `quick`: fewer rows, distances and tasks. `save_to`: the result is written there
    after each system, in case the run is killed; its `unfinished` names the systems that are still to come.

    Raises `ConfigError` for an unknown technique, a distance that has no room, or a context that is too short.
    """
    folder = resolve(model)
    shape, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
    context = min(LONGEST, shape.max_position_embeddings)
    prompt_len = context - NUM_SCORED

    def setting(budget: float) -> Setting:
        return Setting(budget, prompt_len, shape.head_dim, shape.kv_size, shape.num_layers)

    todo = list_systems(setting, BUDGETS, systems)
    material = _material(folder, tokenizer, prompt_len, distances, quick)
    _, measured_files = long_files(tokenizer)
    reference = measure({}, material)
    config = {
        "model": model,
        "context": context,
        "prompt_tokens": prompt_len,
        "rows": len(material.texts.rows),
        "scored_tokens": len(material.texts.targets),
        "files": [file.source for file in measured_files],
        "recall_cue_and_answer": [CUE, ANSWER - 1],
        "recall_without_definition": [vars(one) for one in _guesses(material, measured_files)],
        "bytes": "of a complete prompt, as a share of float16; squeezed: bytes that a decode step reads",
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "quick": quick,
    }
    rows = [plain_row(reference, material)]
    for count, system in enumerate(tqdm(todo, desc="measuring", unit=" systems"), 1):
        rows.append(measure_system(system, material, reference))
        unfinished = [one.name for one in todo[count:]]
        outcome = result("zoo", {**config, "unfinished": unfinished, "best": best(rows)}, rows)
        if save_to is not None:
            save(outcome, save_to)
    return outcome


def measure(options: dict[str, Any], material: Material, plain: ModelRunner | None = None) -> Measured:
    """Run all rows and recall tasks over a cache with these options of `LLM`. `plain`: a runner with the plain cache,
    which decodes every row in turn with this one, to compare their speeds."""
    texts, prompt_len = material.texts, material.prompt_len
    runner = build(options, material.model, max(map(len, texts.rows)), texts=material.fitted)
    found, seconds, speeds, held = [], [], [], []
    for row in texts.rows:
        read_prompt(runner, row, prompt_len)
        behind = continuation(runner, row, prompt_len)
        found.append(behind.logprobs)
        seconds += behind.seconds
        if plain is not None:
            read_prompt(plain, row, prompt_len)
            beside = continuation(plain, row, prompt_len)
            speeds.append(statistics.median(beside.seconds) / statistics.median(behind.seconds))
        if isinstance(runner.cache, AnchorsKVCache):
            held.append(float16_bytes(runner.cache))
    share = None
    if isinstance(runner.cache, SqueezedKVCache):
        share = share_read(runner, prompt_len)
    elif isinstance(runner.cache, AnchorsKVCache):
        share = statistics.mean(held) / plain_bytes(material.model, prompt_len + NUM_SCORED)
    recalled = [recall(runner, distance, tasks) for distance, tasks in material.tasks.items()]
    return Measured(torch.cat(found), recalled, 1 / statistics.median(seconds), speeds, share)


def best(rows: Sequence[ZooRow]) -> dict[str, dict[str, str]]:
    """For each budget the techniques with the lowest mean KL and the most tokens recalled, over all distances."""
    found: dict[str, dict[str, str]] = {}
    for budget in sorted({row.budget for row in rows if row.budget is not None}):
        here = [row for row in rows if row.budget == budget and row.quality is not None]
        if here:
            closest = min(here, key=lambda row: row.quality.mean_kl)
            recalled = max(here, key=lambda row: sum(one.tokens for one in row.recall))
            found[f"{budget:.1%}"] = {"mean_kl": closest.technique, "recall": recalled.technique}
    return found


def _material(folder: Any, tokenizer: Tokenizer, prompt_len: int, distances: list[int] | None, quick: bool) -> Material:
    length = prompt_len + NUM_SCORED
    if length < MIN_CONTEXT:
        raise ConfigError(f"a context of {length} tokens is too short; bench zoo needs at least {MIN_CONTEXT}")
    fitted, measured = long_files(tokenizer)
    chosen = distances or [round(share * prompt_len) for share in (DISTANCES[1:2] if quick else DISTANCES)]
    tasks = {
        distance: recall_tasks(measured, tokenizer, prompt_len, distance, 4 if quick else 8) for distance in chosen
    }
    per_file = min(len(file.token_ids) for file in measured) // length
    count = len(measured) * (1 if quick else min(3, per_file))
    model = load_model(folder, torch.float32, torch.device("cpu"))
    short = CalibrationTexts(tokenizer)
    texts = scored_texts(rows_of(measured, length, count), prompt_len, tokenizer)
    return Material(model, texts, prompt_len, tasks, rows_of(fitted, length, len(fitted)), short)


def _guesses(material: Material, files: Sequence[LongFile]) -> list[Recall]:
    """The recall tasks without their definitions, with the plain cache."""
    runner = build({}, material.model, material.prompt_len + NUM_SCORED)
    return [
        recall(runner, distance, [without_definition(task, files, distance) for task in tasks])
        for distance, tasks in material.tasks.items()
    ]


def plain_row(reference: Measured, material: Material) -> ZooRow:
    """The row of the plain cache, to which all others are compared."""
    quality = judge(reference.logprobs, reference.logprobs, material.texts)
    return ZooRow(PLAIN, PLAIN, None, 1.0, 1.0, 0, quality, reference.recall, reference.tokens_per_s, 1.0)


def measure_system(system: ZooSystem, material: Material, reference: Measured, compare_speed: bool = True) -> ZooRow:
    """The row of one system. `reference`: what `measure` found for the plain cache. `compare_speed`: whether the plain
    cache decodes every row again beside this one."""
    row = ZooRow(system.name, system.technique, system.budget)
    if system.options is None:
        return _failed(row, f"has no size of at most {system.budget:.1%}")
    model, prompt_len = material.model, material.prompt_len
    try:
        options = system.options
        if system.reads_less and system.budget is not None:
            options = calibrated(options, system.budget, model, material.calibration, prompt_len)
        stored, model_bytes = stored_bytes(options, model, prompt_len)
        share_stored = stored / plain_bytes(model, prompt_len)
        by_text = system.reads_less or system.technique == "anchors"
        if system.budget is not None and not by_text and share_stored > system.budget * TOLERANCE:
            return _failed(row, f"takes {share_stored:.1%} at the smallest")
        plain = build({}, model, max(map(len, material.texts.rows))) if compare_speed else None
        got = measure(options, material, plain)
    except MinillmError as problem:
        return _failed(row, str(problem))
    return ZooRow(
        system.name,
        system.technique,
        system.budget,
        share_stored if got.share is None else got.share,
        share_stored if system.reads_less or got.share is None else got.share,
        model_bytes,
        judge(reference.logprobs, got.logprobs, material.texts),
        got.recall,
        got.tokens_per_s,
        statistics.median(got.speeds) if got.speeds else None,
        min(got.speeds, default=None),
        max(got.speeds, default=None),
        options,
    )


def _failed(row: ZooRow, error: str) -> ZooRow:
    return ZooRow(row.system, row.technique, row.budget, error=error)
