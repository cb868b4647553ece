"""A target and its draft in training: their shapes, their recipes and the state files of the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minillm.errors import TrainingError, first_line
from minillm.models import bundled
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.training.data import Passes, Windows
from minillm.training.fim_documents import PRETRAINING, GapShares
from minillm.training.pretrain import Recipe, new_model
from minillm.training.recipes import DECAY_LENGTHS, DRAFT, EXTRAPOLATION, TARGET, decay_recipe, unlikelihood_recipe
from minillm.training.stage_inputs import FILE, check_inputs, read_inputs
from minillm.training.state_files import STATE, digest_of_file, digest_of_state, read_state
from minillm.training.target_evaluation import Amount

SHARES_FILE = "shares.json"
"""In the folder of a run with a total of minutes: the type of device whose shares it has."""
TARGET_NAME = "minicoder"
TARGET_STAGES = ("target", "decay", "unlikelihood")
"""The stages that train the target. The finished target is extrapolated from the last two."""


@dataclass(frozen=True)
class Pair:
    """The models, recipes and folders of a training run."""

    target_recipe: Recipe
    """Recipe of the stable run; the decay branch uses `recipes.decay_recipe`."""
    draft_recipe: Recipe
    distill_recipe: Recipe
    decay_lengths: tuple[int, ...] = DECAY_LENGTHS
    unlikelihood_recipe: Recipe = field(default_factory=unlikelihood_recipe)
    device: str = "cpu"
    folder: Path = Path("runs")
    target: ModelConfig = TARGET
    draft: ModelConfig = DRAFT
    continuation_parts: int = 20
    continuation_rows: int = 128
    continuation_length: int = 512
    evaluation_rows: int = 64
    alone: Amount = field(default_factory=Amount)
    """How much is measured of the target alone."""
    drafters: Mapping[str, Recipe] = field(default_factory=dict)
    """The recipe of each trained drafter."""
    drafters_for: str | None = None
    """The target of trained drafters: a bundled name or a folder; None: this pair's."""
    shares_of: str | None = None
    """The type of device whose shares of a total of minutes the budgets are; None: there is no total."""
    export_to: Path = field(kw_only=True)
    """The folder of the exported models."""

    @property
    def corpus(self) -> Path:
        """The folder with tokens, tokenizer and the list of sources."""
        return self.folder / "corpus"

    @property
    def exports_bundled(self) -> bool:
        """Whether the exported models replace the bundled ones, which are loaded by name."""
        return self.export_to.resolve() == bundled.WEIGHTS.resolve()

    def load_name(self, name: str) -> str:
        """What loads the exported model `name`: its name if it is bundled, else its path."""
        return name if self.exports_bundled else (self.export_to / name).as_posix()

    def training_text(self, shares: GapShares = PRETRAINING) -> Passes:
        """The training files, in passes, with gaps in `shares`. Raises what `check_corpus` raises."""
        self.check_corpus()
        return Passes(self.corpus, shares)

    def held_out(self) -> Windows:
        """The held-out files. Raises what `check_corpus` raises."""
        self.check_corpus()
        return Windows(self.corpus, "held_out")

    def recipe(self, stage: str) -> Recipe:
        """The recipe of a stage. That of `decay` depends on the tokens of the stable run that it branched from."""
        if stage == "decay":
            return decay_recipe(self.input_tokens("decay")["target"], self.decay_lengths)
        own = {"target": self.target_recipe, "unlikelihood": self.unlikelihood_recipe}
        own |= {"draft": self.draft_recipe, "distill": self.distill_recipe}
        return {**own, **self.drafters}[stage]

    def input_tokens(self, stage: str) -> dict[str, int]:
        """For each input model of a stage, the tokens that it had seen when the stage started."""
        found = read_inputs(self.folder / stage)
        tokens = {name: value for name, value in found.items() if isinstance(value, int)}
        if not tokens:
            raise TrainingError(f"{self.folder / stage / FILE} is missing; run the stage `{stage}` first")
        return tokens

    def as_input(self, stage: str) -> dict[str, int | str]:
        """What a stage that starts from the model of `stage` records of it: its tokens, and a hash of its weights."""
        state = read_state(self.state_file(stage), "cpu", mmap=True)
        return {stage: int(state["tokens_seen"]), f"{stage}_weights": digest_of_state(state)}

    def state_file(self, stage: str) -> Path:
        """The state file of a stage. Raises `TrainingError` if there is none."""
        file = self.folder / stage / STATE
        if not file.exists():
            raise TrainingError(f"there is no trained model in {file.parent}; run the stage `{stage}` first")
        return file

    def new_model(self, stage: str) -> Decoder:
        """A newly initialised model of the shape that a stage trains."""
        return new_model(self.target if stage in TARGET_STAGES else self.draft).to(self.device)

    def trained_target(self) -> Decoder:
        """The finished target: the weights of its last stage, extrapolated from those before it (`EXTRAPOLATION`).
        Raises `TrainingError` if one of the two stages is not finished, or the last was not started from the other."""
        first, last = TARGET_STAGES[-2:]
        model, before = self.trained(last), self.trained(first)
        check_inputs(self.folder / last, self.as_input(first))
        with torch.no_grad():
            for weight, earlier in zip(model.parameters(), before.parameters(), strict=True):
                # on the CPU: the same to the bit wherever the run goes on, since stages record a hash of these weights
                weight.copy_(torch.lerp(earlier.cpu(), weight.cpu(), EXTRAPOLATION))
        return model

    def trained(self, stage: str) -> Decoder:
        """The finished model of a stage. Raises `TrainingError` if the stage is not finished."""
        state, recipe = read_state(self.state_file(stage), self.device, mmap=True), self.recipe(stage)
        if not _has_used(state, recipe):
            minutes, tokens = _used(state)
            raise TrainingError(
                f"the stage `{stage}` has run {minutes:.1f} of {recipe.minutes:g} minutes and {tokens:,} of "
                f"{recipe.tokens:,.0f} tokens; finish it first"
            )
        model = self.new_model(stage)
        try:
            model.load_state_dict(state["model"])
        except (RuntimeError, KeyError) as problem:
            raise TrainingError(
                f"{self.state_file(stage)} is the state of another model ({first_line(problem)})"
            ) from None
        return model

    def is_finished(self, stage: str) -> bool:
        """Whether a stage has used up its budget. Raises `TrainingError` if it has no state."""
        return _has_used(read_state(self.state_file(stage), self.device, mmap=True), self.recipe(stage))

    def check_corpus(self) -> None:
        """Record the corpus, the same for all stages of a run. Raises `TrainingError` if there is none, or another one
        than the run was started with: its tokens would have another meaning."""
        if not (self.corpus / "corpus.json").exists():
            raise TrainingError(f"there is no corpus in {self.corpus}; run the stage `corpus` first")
        found = {file: digest_of_file(self.corpus / file) for file in ("corpus.json", "tokenizer.json")}
        check_inputs(self.folder, found, f"restore {self.corpus}, or train with the new one in another --folder")


def _used(state: Mapping[str, Any]) -> tuple[float, int]:
    """Minutes and tokens of a run, those before its branch left out."""
    return state["seconds"] / 60, state["tokens_seen"] - state["tokens_before"]


def _has_used(state: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether one of the budgets is used up."""
    minutes, tokens = _used(state)
    return minutes >= recipe.minutes or tokens >= recipe.tokens
