"""The tokenizer: byte-level BPE, trained on the corpus, saved as a Hugging Face fast tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minillm.fill_in_the_middle import FIM_TOKENS

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

# Words with one leading space, numbers of up to three digits, runs of punctuation, newlines, and indentation without
# its last space, which belongs to the next word: the split of the GPT-4 and Llama-3 tokenizers, without contractions.
SPLIT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer with `vocab_size` tokens on `texts`. Token 0 is end of text, 1 to 3 are the FIM tokens.

    Every byte has a token, so no text is unknown.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *FIM_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and the config that lets `AutoTokenizer.from_pretrained(folder)` load it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "fim_suffix_first": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
