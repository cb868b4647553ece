"""Checkpoints of a given shape with random weights, to measure speed at sizes that are too large to bundle.

Decode speed does not depend on the values of the weights. They are seeded and scaled so that activations and logits
have a usual magnitude; the generated text is noise. A checkpoint is created once and kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minillm.errors import ConfigError
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import save_llama
from minillm.tokenizer import BYTE_OF

SHAPES = {
    "0.4b": ModelConfig(
        vocab_size=32_000,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        eos_token_ids=(0,),
        dtype="bfloat16",
    ),
    "0.4b-draft": ModelConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        eos_token_ids=(0,),
        dtype="bfloat16",
    ),
}
"""Name → shape. 0.4b: 387 million parameters, 778 MB in bf16; 0.4b-draft: 11 million, for a draft model of it."""
SEED = 0


def shape_folder(name: str, root: Path | None = None) -> Path:
    """The folder of the checkpoint, which is created if it does not exist; `root` is the cache folder.

    Raises `ConfigError` for a name that is not in `SHAPES`.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is not available; there are: {', '.join(SHAPES)}")
    root = cache_folder() if root is None else root
    root.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{SHAPES[name]} {SEED}".encode()).hexdigest()[:8]
    folder = root / f"shape-{name}-{digest}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=root) as part:
            made = Path(part, "made")
            save_llama(random_decoder(SHAPES[name]), made, getattr(torch, SHAPES[name].dtype))
            byte_tokenizer(SHAPES[name].vocab_size).save(str(made / "tokenizer.json"))
            made.rename(folder)  # atomic: the folder is complete or absent
    return folder


def model_or_shape(model: str | None, shape: str | None) -> str:
    """What a benchmark runs: `model`, or the checkpoint of `shape`, or the bundled model if both are None.

    Raises `ConfigError` if both are given, and what `shape_folder` raises.
    """
    if shape is None:
        return "minicoder" if model is None else model
    if model is not None:
        raise ConfigError(f"--model {model} is not used with --shape {shape}: leave one of them out")
    return str(shape_folder(shape))


def cache_folder() -> Path:
    """The folder for checkpoints: `$MINILLM_CACHE`, else `minillm` in the user's cache folder."""
    own = os.environ.get("MINILLM_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"


def random_decoder(config: ModelConfig, seed: int = SEED) -> Decoder:
    """A decoder with random weights that preserve the scale of activations; its logits have a spread of about 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Decoder(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.requires_grad_(False).eval()


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A stand-in tokenizer: an end-of-text token, the 256 bytes, and unused placeholders for the other ids."""
    names = ["<|endoftext|>", *BYTE_OF]
    names += [f"<{token_id}>" for token_id in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer
