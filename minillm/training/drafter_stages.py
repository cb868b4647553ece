"""The stages that train drafters for a finished target: text that it writes, training, evaluation, export."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.models.decoder import Decoder
from minillm.models.fingerprint import digest_of_weights, fingerprint_of_folder
from minillm.models.hub import resolve
from minillm.models.loading import load_model
from minillm.speculative.trained_drafter import drafter_config, save_drafter
from minillm.training.continuations import write_continuations
from minillm.training.data import Batches, Passes, Windows, retokenise
from minillm.training.distill import HalfAndHalf
from minillm.training.drafter_card import drafter_card
from minillm.training.drafter_evaluation import evaluate_drafter
from minillm.training.pair import TARGET_NAME, Pair
from minillm.training.plot import Curve, loss_svg
from minillm.training.pretrain import Trainer
from minillm.training.record import RunRecord
from minillm.training.stage_inputs import check_inputs
from minillm.training.stage_runs import as_shipped, finished_target, run_to_the_end
from minillm.training.state_files import read_json, replacing_files, write_json
from minillm.training.trained_drafters import TRAINED


@dataclass(frozen=True)
class DrafterTarget:
    """The frozen model that drafters are trained for, and its text."""

    name: str
    model: Decoder
    checkpoint: Path
    """The folder that `model` was read from."""
    weights: str
    """See `digest_of_weights`."""
    corpus: Path
    """A corpus in the tokens of this model."""
    continuations: Path
    suffix: str
    """Of the folders of its drafters."""


def drafter_target(pair: Pair) -> DrafterTarget:
    """The model of `pair.drafters_for`, or the pair's own target with exported precision.

    Raises `TrainingError` without a corpus or a finished target, and what `target_folder` raises.
    """
    pair.check_corpus()
    if pair.drafters_for is None:
        checkpoint = finished_target(pair)
        continuations = pair.folder / "distill" / "continuations"
        return _drafter_target(pair, TARGET_NAME, checkpoint, pair.corpus, continuations, "")
    folder = target_folder(pair.drafters_for)
    name, weights = folder.name, digest_of_weights(folder)
    text, tokenizer = pair.folder / f"text-{name}", folder / "tokenizer.json"
    check_inputs(text, {"target": weights, "tokenizer": sha256(tokenizer.read_bytes()).hexdigest()})
    retokenise(pair.corpus, tokenizer, text)
    return _drafter_target(pair, name, folder, text, text / "continuations", f"-{name}")


def target_folder(name: str) -> Path:
    """The folder of a target that drafters can be trained for. Raises `CheckpointError` if there is no such model,
    `TrainingError` if it has no tokenizer."""
    folder = resolve(name)
    if not (folder / "tokenizer.json").is_file():
        raise TrainingError(
            f"--target {name} needs a `tokenizer.json` in {folder}; export the model with its tokenizer"
        )
    return folder


def _drafter_target(
    pair: Pair, name: str, checkpoint: Path, corpus: Path, continuations: Path, suffix: str
) -> DrafterTarget:
    model = load_model(checkpoint, torch.float32, pair.device)
    return DrafterTarget(name, model, checkpoint, digest_of_weights(checkpoint), corpus, continuations, suffix)


def train_drafters(pair: Pair, methods: Iterable[str]) -> None:
    """The stages of trained drafters, one after the other, for the same frozen target: half on code and half on what
    the target writes.

    If one fails, the others are still trained, and then `TrainingError` says what failed. An error in what all need
    (corpus, target, its text) is raised at once.
    """
    target = drafter_target(pair)
    code = Passes(target.corpus)
    write_continuations(
        target.checkpoint,
        code,
        target.continuations,
        pair.continuation_parts,
        pair.continuation_rows,
        pair.continuation_length,
        pair.device,
    )
    batches = HalfAndHalf(code, Windows(target.continuations, "continuations"))
    failures: list[str] = []
    for method in methods:
        try:
            train_drafter(pair, method, target, batches)
        except TrainingError as problem:
            failures.append(f"{method}: {problem}")
            tqdm.write(failures[-1])
    if failures:
        raise TrainingError("; ".join(failures))


def train_drafter(pair: Pair, method: str, target: DrafterTarget, batches: Batches) -> None:
    """Train one drafter, evaluate it as it is exported, and write its folder."""
    drafter, folder = TRAINED[method], pair.folder / f"{method}{target.suffix}"
    check_inputs(folder, {"target": target.weights})
    module = drafter.new_module(target.model).to(pair.device)
    trainer = Trainer(module, batches, pair.recipe(method), folder, drafter.loss(target.model))
    run_to_the_end(folder.name, trainer)
    export_drafter(pair, method, target, trainer)


def export_drafter(pair: Pair, method: str, target: DrafterTarget, trainer: Trainer) -> None:
    """Evaluate a trained drafter and write its folder, with a card."""
    drafter, module, record = TRAINED[method], as_shipped(trainer.model), RunRecord.load(trainer.folder)
    facts = {
        "method": method,
        "target": target.name,
        "parameters": sum(p.numel() for p in module.parameters()),
        "shape": asdict(module.shape),
        "loss": drafter.loss_formula,
        "run": record.summary(),
        "sure_drafts": drafter.sure_drafts,
        "acceptance": _acceptance(pair, method, target, trainer.folder, record.tokens, module),
    }
    to, name = pair.export_to / f"{target.name}-{method}", f"{target.name}-{method}"
    fingerprint, vocab_size = fingerprint_of_folder(target.checkpoint), target.model.config.vocab_size
    config = drafter_config(method, target.name, fingerprint, vocab_size, module.shape)
    curve = Curve("Training", drafter.loss_formula, record.log)
    with replacing_files(to) as fresh:
        save_drafter(fresh, config, module)
        (fresh / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (fresh / "README.md").write_text(drafter_card(name, facts, _loading(pair, target, method)), encoding="utf-8")
        (fresh / "loss.svg").write_text(loss_svg(f"Training loss of {name}", [curve]), encoding="utf-8")
    tqdm.write(f"wrote {to}")


def _loading(pair: Pair, target: DrafterTarget, method: str) -> str:
    """The code that loads the target with its drafter."""
    if pair.exports_bundled and pair.drafters_for in (None, target.name):
        return f'llm = LLM("{target.name}", speculative_config={{"method": "{method}"}})'
    model, drafter = pair.drafters_for or pair.load_name(target.name), pair.load_name(f"{target.name}-{method}")
    return f'''drafter = {{"method": "{method}", "model": "{drafter}"}}
llm = LLM("{model}", speculative_config=drafter)'''


def _acceptance(
    pair: Pair, method: str, target: DrafterTarget, folder: Path, tokens: int, module: nn.Module
) -> dict[str, Any]:
    """`evaluate_drafter` of a module that has seen so many tokens. The result is cached in `acceptance.json`."""
    file, inputs = folder / "acceptance.json", {"target": target.weights, "tokens": tokens}
    if file.exists() and (kept := read_json(file)).get("inputs") == inputs:
        return kept["acceptance"]
    held_out = Windows(target.corpus, "held_out")
    found = evaluate_drafter(
        TRAINED[method].guesses, module, target.model, target.checkpoint, held_out, pair.evaluation_rows
    )
    write_json(file, {"inputs": inputs, "acceptance": found})
    return found
