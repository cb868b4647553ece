"""A target and its draft in the making: their shapes, their recipes and where each stage keeps its state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minillm.errors import TrainingError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.training.data import Windows
from minillm.training.pretrain import Recipe, new_model
from minillm.training.recipes import DRAFT, TARGET

WEIGHTS = Path(__file__).resolve().parents[1] / "models" / "weights"
"""Where the bundled models lie."""


@dataclass(frozen=True)
class Pair:
    """What is trained, where, and for how long."""

    target_recipe: Recipe
    draft_recipe: Recipe
    distill_recipe: Recipe
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

    def windows(self, split: str) -> Windows:
        """A split of the corpus."""
        if not (self.corpus / "corpus.json").exists():
            raise TrainingError(f"there is no corpus in {self.corpus}; run the stage `corpus` first")
        return Windows(self.corpus, split)

    def trained(self, stage: str) -> Decoder:
        """The finished model of a stage. Raises `TrainingError` if that stage was not run to its end."""
        config = self.target if stage == "target" else self.draft
        recipe = {"target": self.target_recipe, "draft": self.draft_recipe, "distill": self.distill_recipe}[stage]
        state_file = self.folder / stage / "state.pt"
        if not state_file.exists():
            raise TrainingError(f"there is no trained model in {state_file.parent}; run the stage `{stage}` first")
        state = torch.load(state_file, weights_only=True, mmap=True)
        minutes = state["seconds"] / 60
        if minutes < recipe.minutes and state["tokens_seen"] < recipe.tokens:
            raise TrainingError(
                f"the stage `{stage}` has run {minutes:.1f} of {recipe.minutes:g} minutes; run it to its end first"
            )
        model = new_model(config)
        model.load_state_dict(state["model"])
        return model
