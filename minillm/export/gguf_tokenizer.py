"""The tokenizer part of a GGUF file: tokens, merges, and the name of a llama.cpp pre-tokenizer.

llama.cpp does not read the pre-tokenizer's regular expression from the file. It has a fixed list of expressions, and a
GGUF file names one of them (`tokenizer.ggml.pre`). If a tokenizer's expression is not in the list, the one that gives
the same tokens for the most held-out texts is used; `agreement` is the share of those texts. llama.cpp's BPE has no
normalizer, and the name also decides whether a word of the vocabulary is taken whole even if no merges make it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, pre_tokenizers

from minillm.tokenizer import BYTE_OF, Tokenizer

CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{LLAMA3_END}",),
    "qwen2": (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{LLAMA3_END}",),
    "gpt-2": (GPT2,),
    "starcoder": (r"\p{N}", GPT2),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Name → llama.cpp's expressions, applied in turn (its `llama-vocab.cpp`). On a tie, the first name is used."""
IGNORES_MERGES = frozenset({"llama-bpe"})
"""The names with which llama.cpp takes a word of the vocabulary whole."""

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's token types."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A byte-level BPE tokenizer as a GGUF file stores it. `tokens` and `types` are indexed by token id."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre: str
    """The name of the pre-tokenizer."""
    agreement: float
    """Share of the held-out texts that get the same tokens with `pre` and `bos` as with the original tokenizer."""
    bos: int | None
    """The token that the tokenizer puts before a text; None: none."""
    eos: int | None
    """The token that ends a text, as the tokenizer names it; None: none of the model's ids."""
    chat_templates: dict[str, str]
    """Name → Jinja template; the usual one is `default`. Empty: llama.cpp's server would use ChatML."""


def gguf_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> GgufTokenizer | None:
    """Convert `tokenizer` for a model with `vocab_size` ids; None if it is not a byte-level BPE.

    Ids without a token get a placeholder that cannot occur in a text. Raises `CheckpointError` if transformers, which
    finds the chat template, cannot read the tokenizer.
    """
    backend = tokenizer.backend
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE" or not model["merges"] or not tokenizer.is_byte_level:
        return None
    if any(backend.token_to_id(character) is None for character in BYTE_OF):
        return None
    pre, agreement = fitting_split(backend)
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    bos = whole[0] if whole[1 : 1 + len(plain)] == plain else None  # of the template, whatever `config.json` names
    if whole != ([] if bos is None else [bos]) + plain:
        agreement = 0.0  # other tokens around a text, which the file does not state
    added = backend.get_added_tokens_decoder()
    tokens, types = [], []
    for token_id in range(vocab_size):
        text = backend.id_to_token(token_id)
        tokens.append(f"[UNUSED_{token_id}]" if text is None else text)
        if text is None:
            types.append(UNUSED)
        elif token_id in added:
            types.append(CONTROL if added[token_id].special else USER_DEFINED)
        else:
            types.append(NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    eos = tokenizer.eos_id if tokenizer.eos_id is not None and tokenizer.eos_id < vocab_size else None
    template = tokenizer.hf().chat_template
    templates = template if isinstance(template, dict) else {"default": template} if template else {}
    return GgufTokenizer(tokens, types, merges, pre, agreement, bos, eos, templates)


def fitting_split(backend: tokenizers.Tokenizer) -> tuple[str, float]:
    """The name in `SPLITS` with which most held-out texts get the same tokens as with `backend`, and their share.

    Tokens that a template puts around a text do not count.
    """
    from minillm.models.held_out import held_out_prompts

    texts = [prompt.prompt for prompt in held_out_prompts()]
    expected = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    shares = {}
    for name, expressions in SPLITS.items():
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
        copy.normalizer = None
        copy.model.ignore_merges = name in IGNORES_MERGES
        splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        copy.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        found = copy.encode_batch(texts, add_special_tokens=False)
        shares[name] = sum(f.ids == ids for f, ids in zip(found, expected, strict=True)) / len(texts)
    best = max(shares, key=lambda name: shares[name])
    return best, shares[best]
