"""The two bundled models: their shapes and how each is trained."""

from __future__ import annotations

from minillm.models.config import ModelConfig, RopeConfig
from minillm.training.pretrain import Recipe
from minillm.training.tokenizer import END_OF_TEXT_ID

VOCAB_SIZE = 4096
MAX_LENGTH = 1024
TOKENS_PER_STEP = 6144
TARGET_MINUTES, DRAFT_MINUTES, DISTILL_MINUTES = 76.0, 6.0, 20.0
"""What the bundled models were given on two CPU cores."""


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0),
        tie_word_embeddings=True,
        eos_token_ids=(END_OF_TEXT_ID,),
    )


TARGET = _llama(hidden=384, intermediate=768, layers=8, heads=6, kv_heads=2)
"""minicoder: 11.8M parameters. Heads of 64 keep INT8 scales small beside the values; 3 query heads share a KV head."""

DRAFT = _llama(hidden=160, intermediate=448, layers=2, heads=2, kv_heads=1)
"""minicoder-draft: 1.2M parameters, more than half of them its embedding."""


def pretrain_recipe(minutes: float) -> Recipe:
    """How both models learn from the corpus."""
    return Recipe(minutes, tokens_per_step=TOKENS_PER_STEP)


def distill_recipe(minutes: float) -> Recipe:
    """How the draft then learns from the target: longer rows, half of the rates, an earlier decay."""
    return Recipe(
        minutes, tokens_per_step=TOKENS_PER_STEP, short_length=512, decay_from=0.2, muon_lr=0.01, adam_lr=1.5e-3
    )
