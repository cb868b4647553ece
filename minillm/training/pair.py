"""A target and its draft in the making: their shapes, their recipes and where each stage keeps its state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from minillm.errors import TrainingError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.training.data import Passes, Windows
from minillm.training.pretrain import Recipe, new_model
from minillm.training.recipes import DECAY_LENGTHS, DRAFT, TARGET, decay_recipe

WEIGHTS = Path(__file__).resolve().parents[1] / "models" / "weights"
"""Where the bundled models lie."""


@dataclass(frozen=True)
class Pair:
    """What is trained, where, and for how long."""

    target_recipe: Recipe
    """Of the stable part; what decays from it is `recipes.decay_recipe`."""
    draft_recipe: Recipe
    distill_recipe: Recipe
    decay_lengths: tuple[int, ...] = DECAY_LENGTHS
    device: str = "cpu"
    folder: Path = Path("runs")
    target: ModelConfig = TARGET
    draft: ModelConfig = DRAFT
    continuation_parts: int = 12
    continuation_rows: int = 128
    continuation_length: int = 512
    evaluation_rows: int = 64
    export_to: Path = WEIGHTS

    @property
    def corpus(self) -> Path:
        """Tokens, tokenizer and the list of sources."""
        return self.folder / "corpus"

    def training_text(self) -> Passes:
        """The training files, pass after pass."""
        self._require_corpus()
        return Passes(self.corpus)

    def held_out(self) -> Windows:
        """The held-out files."""
        self._require_corpus()
        return Windows(self.corpus, "held_out")

    def recipe(self, stage: str) -> Recipe:
        """How a stage trains. That of `decay` follows from the tokens of the stable part it began with."""
        if stage == "decay":
            return decay_recipe(self.begun_with("decay")["target"], self.decay_lengths)
        return {"target": self.target_recipe, "draft": self.draft_recipe, "distill": self.distill_recipe}[stage]

    def begun_with(self, stage: str) -> dict[str, int]:
        """Tokens that each input of a stage had seen when the stage began."""
        file = self.folder / stage / "inputs.json"
        if not file.exists():
            raise TrainingError(f"{file} is missing; run the stage `{stage}` first")
        return json.loads(file.read_text(encoding="utf-8"))

    def state_file(self, stage: str) -> Path:
        """The state of a stage. Raises `TrainingError` if there is none."""
        file = self.folder / stage / "state.pt"
        if not file.exists():
            raise TrainingError(f"there is no trained model in {file.parent}; run the stage `{stage}` first")
        return file

    def new_model(self, stage: str) -> Decoder:
        """A fresh model of the shape that a stage trains."""
        return new_model(self.target if stage in ("target", "decay") else self.draft).to(self.device)

    def trained(self, stage: str) -> Decoder:
        """The finished model of a stage. Raises `TrainingError` if that stage was not run to its end."""
        state = torch.load(self.state_file(stage), weights_only=True, mmap=True, map_location=self.device)
        recipe = self.recipe(stage)
        minutes, tokens = state["seconds"] / 60, state["tokens_seen"] - state["tokens_before"]
        if minutes < recipe.minutes and tokens < recipe.tokens:
            raise TrainingError(
                f"the stage `{stage}` has run {minutes:.1f} of {recipe.minutes:g} minutes and {tokens:,} of "
                f"{recipe.tokens:,.0f} tokens; run it to its end first"
            )
        model = self.new_model(stage)
        model.load_state_dict(state["model"])
        return model

    def _require_corpus(self) -> None:
        if not (self.corpus / "corpus.json").exists():
            raise TrainingError(f"there is no corpus in {self.corpus}; run the stage `corpus` first")
