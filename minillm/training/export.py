"""Export a trained model as a folder that both minillm and transformers can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from minillm.models.decoder import Decoder
from minillm.models.loading import save_llama
from minillm.training.state_files import replacing_files
from minillm.training.train_tokenizer import END_OF_TEXT_ID, save_tokenizer

EXPORTED = torch.bfloat16
"""The dtype of exported weights: what the matrix units of CPUs and of newer GPUs take."""


def export(model: Decoder, tokenizer_file: Path, folder: Path, extra: dict[str, str] | None = None) -> None:
    """Write weights in `EXPORTED`, config, tokenizer and generation config of `model` into `folder`.

    `extra`: name → content of further text files (the model card). See `replacing_files` for what an interrupt leaves.
    """
    with replacing_files(folder) as fresh:
        save_llama(model, fresh, EXPORTED)
        save_tokenizer(Tokenizer.from_file(str(tokenizer_file)), fresh, model.config.max_position_embeddings)
        generation = {"eos_token_id": END_OF_TEXT_ID, "do_sample": False}
        (fresh / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        for name, text in (extra or {}).items():
            (fresh / name).write_text(text, encoding="utf-8")
