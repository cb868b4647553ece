"""The stages of training: corpus, target, its decay, unlearning of repetition, draft, distillation, export, drafters.

Finished stages are skipped. A stage whose inputs have changed since it was started is refused, but not the finished
decay: the stable run that it branched from may go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.models.decoder import Decoder
from minillm.models.fingerprint import digest_of_weights
from minillm.training.card import card, training_facts
from minillm.training.compiling import Compiled
from minillm.training.continuations import write_continuations
from minillm.training.data import Batches, Windows, prepare
from minillm.training.distill import LOSS_FORMULA, DistillationLoss, HalfAndHalf
from minillm.training.drafter_stages import train_drafters
from minillm.training.evaluate import Agreement, Evaluation, evaluate
from minillm.training.export import export
from minillm.training.fim_documents import LATER
from minillm.training.pair import SHARES_FILE, TARGET_NAME, TARGET_STAGES, Pair
from minillm.training.plot import Curve, loss_svg
from minillm.training.pretrain import Loss, Trainer, next_token_loss
from minillm.training.record import RunRecord
from minillm.training.stage_inputs import check_inputs
from minillm.training.stage_runs import as_shipped, finished_target, run_to_the_end
from minillm.training.state_files import STATE, read_json, write_json
from minillm.training.target_evaluation import evaluate_target
from minillm.training.trained_drafters import TRAINED
from minillm.training.unlikelihood import OwnText, UnlikelihoodLoss

DRAFT_NAME = "minicoder-draft"


def run_stages(pair: Pair, stages: Iterable[str]) -> None:
    """Run the named stages in the order of `STAGES`. Raises `TrainingError` for an unknown name."""
    chosen = set(stages)
    if unknown := chosen.difference(STAGES):
        raise TrainingError(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    for name, stage in PAIR_STAGES.items():
        if name in chosen:
            stage(pair)
    if drafters := [method for method in TRAINED if method in chosen]:
        train_drafters(pair, drafters)


def make_corpus(pair: Pair) -> None:
    """Stage `corpus`: collect source files, train the tokenizer, encode."""
    prepare(pair.corpus, pair.target.vocab_size)


def train_target(pair: Pair) -> None:
    """Stage `target`: pretrain the target at a stable learning rate."""
    _run(pair, "target", pair.training_text(), Compiled(next_token_loss))


def decay_target(pair: Pair) -> None:
    """Stage `decay`: a branch of the stable run in which the learning rate falls (`recipes.DECAY_TO`). The stable run
    may continue; a finished branch stays as it is then."""
    text, stable = pair.training_text(LATER), pair.state_file("target")
    folder, now = pair.folder / "decay", pair.as_input("target")
    if (folder / STATE).exists() and pair.is_finished("decay"):
        began, seen = pair.input_tokens("decay")["target"], now["target"]
        later = f"; the stable run has {seen:,} now: to branch again, remove {folder}" if seen != began else ""
        tqdm.write(f"decay: done, from the stable run at {began:,} tokens{later}")
        return
    check_inputs(folder, now)
    _run(pair, "decay", text, Compiled(next_token_loss), branch_of=stable)


def unlearn_repetition(pair: Pair) -> None:
    """Stage `unlikelihood`: the decayed target unlearns to repeat itself."""
    text = pair.training_text(LATER)
    model = pair.trained("decay")
    folder, lengths = pair.folder / "unlikelihood", pair.recipe("unlikelihood").lengths
    check_inputs(folder, pair.as_input("decay"))
    batches = OwnText(text, model, pair.corpus / "tokenizer.json", lengths, folder / "writings")
    _run(pair, "unlikelihood", batches, UnlikelihoodLoss(), model=model, branch_of=pair.state_file("decay"))


def train_draft(pair: Pair) -> None:
    """Stage `draft`: pretrain the draft."""
    _run(pair, "draft", pair.training_text(), Compiled(next_token_loss))


def distill(pair: Pair) -> None:
    """Stage `distill`: generate text with the target, then train the draft to predict it."""
    code, folder = pair.training_text(), pair.folder / "distill"
    target, draft = pair.trained_target(), pair.trained("draft")
    check_inputs(folder, pair.as_input("unlikelihood") | pair.as_input("draft"))
    write_continuations(
        finished_target(pair),
        code,
        folder / "continuations",
        pair.continuation_parts,
        pair.continuation_rows,
        pair.continuation_length,
        pair.device,
    )
    batches = HalfAndHalf(code, Windows(folder / "continuations", "continuations"))
    _run(pair, "distill", batches, DistillationLoss(target), model=draft)


def export_pair(pair: Pair) -> None:
    """Stage `export`: evaluate the pair with exported precision, then write both folders with their model cards."""
    target, draft = as_shipped(pair.trained_target()), as_shipped(pair.trained("distill"))
    pair.check_corpus()
    checkpoint = finished_target(pair)
    evaluations = _evaluate(pair, target, draft, checkpoint)
    alone = evaluate_target(target, checkpoint, pair.corpus, pair.alone)
    corpus = read_json(pair.corpus / "corpus.json")
    runs = {stage: RunRecord.load(pair.folder / stage) for stage in (*TARGET_STAGES, "draft", "distill")}
    made = (
        (
            TARGET_NAME,
            DRAFT_NAME,
            target,
            {
                "pretraining": (runs["target"], pair.recipe("target")),
                "decay": (runs["decay"], pair.recipe("decay")),
                "unlikelihood": (runs["unlikelihood"], pair.recipe("unlikelihood")),
            },
        ),
        (
            DRAFT_NAME,
            TARGET_NAME,
            draft,
            {
                "pretraining": (runs["draft"], pair.recipe("draft")),
                "distillation": (runs["distill"], pair.recipe("distill")),
            },
        ),
    )
    for name, other, model, history in made:
        facts = training_facts(name, other, model, corpus, history, evaluations, alone if model is target else None)
        curves = [
            Curve(stage.capitalize(), _UNITS[stage], run.log, len(recipe.lengths))
            for stage, (run, recipe) in history.items()
        ]
        files = {
            "README.md": card(facts, pair.load_name(name)),
            "training.json": json.dumps(facts, indent=1) + "\n",
            "loss.svg": loss_svg(f"Training loss of {name}", curves),
        }
        export(model, pair.corpus / "tokenizer.json", pair.export_to / name, files)
        tqdm.write(f"wrote {pair.export_to / name}")


PAIR_STAGES: dict[str, Callable[[Pair], None]] = {
    "corpus": make_corpus,
    "target": train_target,
    "decay": decay_target,
    "unlikelihood": unlearn_repetition,
    "draft": train_draft,
    "distill": distill,
    "export": export_pair,
}
STAGES = (*PAIR_STAGES, *TRAINED)
"""All stages in order. The last ones train drafters for the finished target."""
_UNITS = {
    "pretraining": "nats per token",
    "decay": "nats per token",
    "unlikelihood": "mixed loss",
    "distillation": LOSS_FORMULA,
}


def _run(
    pair: Pair,
    stage: str,
    batches: Batches,
    loss: Loss,
    model: Decoder | None = None,
    branch_of: Path | None = None,
) -> None:
    """Train `model` (default: a new one) by the recipe of `stage`, unless that is finished."""
    folder = pair.folder / stage
    if pair.shares_of is not None:
        write_json(pair.folder / SHARES_FILE, pair.shares_of)
    run_to_the_end(stage, Trainer(model or pair.new_model(stage), batches, pair.recipe(stage), folder, loss, branch_of))


def _evaluate(pair: Pair, target: Decoder, draft: Decoder, checkpoint: Path) -> dict[str, Evaluation]:
    """Evaluate the target with the draft before and after distillation. The result is cached in `evaluation.json`."""
    file = pair.folder / "evaluation.json"
    inputs = {"target": digest_of_weights(checkpoint), **pair.as_input("draft"), **pair.as_input("distill")}
    if file.exists():
        kept = read_json(file)
        if kept["inputs"] == inputs:
            return {name: _evaluation(values) for name, values in kept["evaluations"].items()}
    held_out = pair.held_out()
    summary = read_json(pair.corpus / "corpus.json")["held_out"]
    drafts = {"distilled": draft, "undistilled": as_shipped(pair.trained("draft"))}
    bytes_per_token = summary["bytes"] / summary["tokens"]
    found = evaluate(target, drafts, checkpoint, held_out, bytes_per_token, rows=pair.evaluation_rows)
    kept = {"inputs": inputs, "evaluations": {name: asdict(values) for name, values in found.items()}}
    write_json(file, kept)
    return found


def _evaluation(values: dict[str, object]) -> Evaluation:
    texts = {kind: Agreement(**values[kind]) for kind in ("code", "greedy", "sampled")}
    return Evaluation(**{**values, **texts})
