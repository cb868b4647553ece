"""The shapes and training recipes of the two bundled models."""

from __future__ import annotations

import math

from minillm.models.config import ModelConfig, RopeConfig
from minillm.training.pretrain import Recipe
from minillm.training.train_tokenizer import END_OF_TEXT_ID

VOCAB_SIZE = 4096
MAX_LENGTH = 4096
ROPE_THETA = 100_000.0
"""Large enough that the slow dimensions rotate little over 4,096 positions, so that mostly short rows suffice."""


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
        rope=RopeConfig(theta=ROPE_THETA),
        tie_word_embeddings=True,
        eos_token_ids=(END_OF_TEXT_ID,),
    )


TARGET = _llama(hidden=384, intermediate=768, layers=8, heads=6, kv_heads=2)
"""minicoder: 11.8M parameters. With a head size of 64, INT8 scales take little memory compared with the values; 3 query
heads share a KV head."""

DRAFT = _llama(hidden=160, intermediate=448, layers=2, heads=2, kv_heads=1)
"""minicoder-draft: 1.2M parameters, more than half of them its embedding."""


SHORT_ROWS = (256, 256, 256, 1024)
"""Row lengths of pretraining: mostly short ones, which are the cheapest."""
DECAY_LENGTHS = (MAX_LENGTH, 512, 512, 512, 512, 512)
"""Row lengths of the decay branch: a sixth of its tokens in rows of full length. Such a token takes three times as long
on a CPU, most of it for attention."""
DECAY_SHARE = 1 / 6
"""Tokens of the decay branch, as a share of the stable run's."""
WEIGHT_DECAY = 0.05
"""Of the matrices of target and draft; at the full rate, a step of 1,000 steps ago counts 1/e. Without it they grew
with the root of the number of steps, and the target's stable run, at first trained so, gained nothing from 34 to 50
million tokens (1.019 and 1.020 bits per byte on 98,304 held-out tokens, at the full rate) and lost afterwards (1.035 at
65 million). From there, with 0.1 and soon 0.05, it had 0.991 at 75 million. A draft had 1.157 bits per byte after 36
million tokens with it, 1.177 after 39 million without."""
DECAY_TO = 0.25
"""What the decay leaves of the learning rate. The stage after it, unlikelihood training, takes it to zero: to begin
with a small rate that has already been zero would cost more of what was learned."""
UNLIKELIHOOD_TOKENS = 6_000_000
"""Tokens of unlikelihood training against repetition, a quarter of them the model's own."""
UNLIKELIHOOD_LENGTHS = (256, 256, 256, 512, 512, MAX_LENGTH)
"""Row lengths of that stage. The model's own text is in the shortest rows; the longer ones keep it able to use a long
context (`unlikelihood.py` has the figures)."""
EXTRAPOLATION = 1.1
"""Where the finished target lies on the line from the decayed weights (0) through those at the end of that stage (1):
task arithmetic, Ilharco et al. 2023. It repeats less than at 1, for bits per byte like those at 0 (figures there, too).
"""
TARGET_MINUTES, DRAFT_MINUTES, DISTILL_MINUTES = 400.0, 20.0, 40.0
"""Default minutes of the stages on a CPU. The decay takes a sixth of the target's tokens."""
SHARES = {
    "cpu": {"target": 0.45, "unlikelihood": 0.04, "draft": 0.05, "distill": 0.18},
    "cuda": {"target": 0.36, "unlikelihood": 0.25, "draft": 0.04, "distill": 0.09},
}
"""Shares of a total number of minutes, by type of the device that a run began on. The decay, generating the
distillation's text and `DRAFTER_SHARE` take the rest. Those of a GPU are in proportion to the minutes of the bundled
models on an H100, which their cards state: 4.2 for the target, 2.9 for unlikelihood training, which mostly waits there
for the text that it writes, 0.4 for the draft and 1.0 for its distillation."""
DRAFTER_SHARE = 0.03
"""The share of each trained drafter."""


def stable_recipe(minutes: float) -> Recipe:
    """The target's stable run: a constant rate (after the warm-up) until the minutes are used up."""
    return Recipe(minutes, decay_from=1.0, lengths=SHORT_ROWS, weight_decay=WEIGHT_DECAY)


def decay_recipe(stable_tokens: int, lengths: tuple[int, ...] = DECAY_LENGTHS) -> Recipe:
    """The decay branch: the rate falls to a quarter over a sixth of the stable run's tokens."""
    return Recipe(
        tokens=DECAY_SHARE * stable_tokens,
        decay_from=0.0,
        decay_to=DECAY_TO,
        warmup_steps=1,
        lengths=lengths,
        weight_decay=WEIGHT_DECAY,
    )


def unlikelihood_recipe(minutes: float = math.inf) -> Recipe:
    """Unlikelihood training against repetition: short, from the rate at which the decay ends to zero. It ends after
    `UNLIKELIHOOD_TOKENS` tokens, or earlier if the minutes are used up."""
    return Recipe(
        minutes,
        tokens=UNLIKELIHOOD_TOKENS,
        tokens_per_step=8192,
        decay_from=0.0,
        warmup_steps=1,
        lengths=UNLIKELIHOOD_LENGTHS,
        muon_lr=DECAY_TO * Recipe.muon_lr,
        adam_lr=DECAY_TO * Recipe.adam_lr,
        weight_decay=WEIGHT_DECAY,
    )


def draft_recipe(minutes: float) -> Recipe:
    """The draft's pretraining on the corpus."""
    return Recipe(minutes, lengths=SHORT_ROWS, weight_decay=WEIGHT_DECAY)


def distill_recipe(minutes: float) -> Recipe:
    """The draft's distillation from the target: longer rows, half of the rates, an earlier decay."""
    return Recipe(
        minutes,
        lengths=(512, 512, 512, 2048),
        decay_from=0.2,
        muon_lr=0.01,
        adam_lr=1.5e-3,
        weight_decay=WEIGHT_DECAY,
    )
