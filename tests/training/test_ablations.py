"""The table of ablations: every variant lacks what its name says, is trained alike, and is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from minillm.errors import TrainingError
from minillm.models.fingerprint import fingerprint_of_folder
from minillm.models.loading import load_model
from minillm.training import ablations
from minillm.training.ablations import CODE, LATE, VARIANTS, run_ablations, table
from minillm.training.export import export
from minillm.training.pair import Pair
from minillm.training.pretrain import Recipe, new_model
from minillm.training.rollouts import LongLoss
from minillm.training.trained_drafters import TRAINED

from .conftest import config

TOKENS = 4096


@pytest.fixture
def pair(corpus: Path, tmp_path: Path) -> Pair:
    """A pair whose drafters are trained for a finished model of two blocks."""
    target = tmp_path / "target"
    export(new_model(config()), corpus / "tokenizer.json", target)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "corpus").symlink_to(corpus)
    budget = Recipe(tokens=1)
    export_to = tmp_path / "models"
    return Pair(budget, budget, budget, folder=tmp_path / "runs", drafters_for=str(target), export_to=export_to)


@pytest.mark.parametrize("method", ["spire", "long", "prompt_tokens"])
def test_every_variant_is_trained_on_the_same_tokens_and_measured(pair: Pair, method: str) -> None:
    rows = run_ablations(pair, method, tokens=TOKENS, rows=4)
    texts = [CODE, LATE] if method == "long" else [CODE]
    assert [(row.variant, row.text) for row in rows] == [(name, text) for name in VARIANTS[method] for text in texts]
    assert {row.tokens for row in rows} == {TOKENS}
    trained_drafts = 3 if method == "prompt_tokens" else 4
    assert all(len(row.acceptance.greedy) == trained_drafts and row.acceptance.roots > 100 for row in rows)
    stored = json.loads((pair.folder / f"ablations-{method}-target.json").read_text())
    assert [row["variant"] for row in stored["rows"]] == [row.variant for row in rows]
    assert stored["fingerprint"] == fingerprint_of_folder(Path(pair.drafters_for))
    assert (stored["method"], stored["sure_drafts"]) == (method, TRAINED[method].sure_drafts)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table(method, rows))
    assert all(name in shown.get() for name in VARIANTS[method])


def test_a_variant_that_is_finished_is_only_measured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "long", {"no offsets": VARIANTS["long"]["no offsets"]})
    first = run_ablations(pair, "long", tokens=TOKENS, rows=4)
    [log] = pair.folder.glob("ablations-long-target/*/log.jsonl")
    before = log.read_bytes()
    again = run_ablations(pair, "long", tokens=TOKENS, rows=4)
    assert log.read_bytes() == before and repr(again) == repr(first)


def test_a_variant_is_not_trained_further_for_a_target_with_the_same_norms(pair: Pair) -> None:
    run_ablations(pair, "long", tokens=TOKENS, rows=4)
    model = load_model(pair.drafters_for, torch.float32)
    model.layers[1].qkv_proj.weight += 0.1
    export(model, pair.corpus / "tokenizer.json", Path(pair.drafters_for))
    (pair.folder / "text-target" / "inputs.json").unlink()
    with pytest.raises(TrainingError, match=r"ablations-long-target/long was started with .*remove it to start again"):
        run_ablations(pair, "long", tokens=TOKENS, rows=4)


def test_a_pause_of_the_run_is_one_of_its_ablations(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    monkeypatch.setattr(ablations, "run_to_the_end", lambda name, trainer: files.append(trainer.pause_file))
    run_ablations(pair, "long", tokens=TOKENS, rows=4)
    assert set(files) == {pair.folder / "pause"}


def test_each_variant_lacks_what_its_name_says(pair: Pair) -> None:
    target = load_model(pair.drafters_for, torch.float32)
    spire = {name: variant.new_module(target) for name, variant in VARIANTS["spire"].items()}
    shapes = {name: (model.shape.feedback, model.shape.window) for name, model in spire.items()}
    assert shapes == {
        "spire": (True, 64),
        "no feedback memory": (False, 64),
        "no sparse mask": (True, None),
        "not from the target": (True, 64),
    }
    copied = {
        name: torch.equal(m.layers[-1].qkv_proj.weight, target.layers[-1].qkv_proj.weight) for name, m in spire.items()
    }
    assert copied == {name: name != "not from the target" for name in spire}
    long = VARIANTS["long"]
    assert [long[name].new_module(target).cross is None for name in long] == [False, True, False]
    losses = {name: variant.loss(target) for name, variant in long.items()}
    assert all(isinstance(loss, LongLoss) for loss in losses.values())
    assert {name: loss.offsets for name, loss in losses.items()} == {name: name != "no offsets" for name in long}
    prompts = {name: variant.loss(target) for name, variant in VARIANTS["prompt_tokens"].items()}
    assert {name: (loss.distilled, loss.alone) for name, loss in prompts.items()} == {
        "prompt_tokens": (True, False),
        "no distillation": (False, False),
        "prompt tokens alone": (True, True),
    }


def test_a_method_without_ablations_is_refused(pair: Pair) -> None:
    with pytest.raises(TrainingError, match="no ablations of 'heads'; there are those of spire, long, prompt_tokens"):
        run_ablations(pair, "heads")
