"""Lesson 17: what replacing a matrix of the model costs, in the loss on held-out texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minillm.errors import LessonError
from minillm.models.causal import CausalAttention
from minillm.models.decoder import Decoder
from minillm.models.held_out import HeldOutPrompt, calibration_prompts, evaluation_prompts
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Texts:
    """Token ids of texts that the model was not trained on."""

    fitted: Tensor
    """For what is fitted to text."""
    read: Tensor
    """Of other files, for measuring."""

    @classmethod
    def held_out(cls, tokenizer: Tokenizer) -> Texts:
        """The held-out prompts, one after the other."""

        def ids(prompts: list[HeldOutPrompt]) -> Tensor:
            return torch.tensor([token for one in prompts for token in tokenizer.encode(one.prompt)])

        return cls(ids(calibration_prompts()), ids(evaluation_prompts()))


@torch.no_grad()
def hidden_states(model: Decoder, token_ids: Tensor) -> Tensor:
    """`[n, hidden]`, after the final norm, of a text in one piece."""
    return model(token_ids, torch.arange(len(token_ids)), CausalAttention(len(token_ids)))


@torch.no_grad()
def loss(model: Decoder, token_ids: Tensor, length: int = 512) -> float:
    """Mean negative log-probability of the next token, nats, over pieces of `length` tokens.

    The first token of a piece is given, so a last piece of one token adds nothing. Raises `LessonError` if no piece has
    two tokens.
    """
    pieces = [piece for piece in token_ids.split(length) if len(piece) > 1]
    if not pieces:
        raise LessonError(f"a text of {len(token_ids)} tokens, length={length}: a loss needs at least two tokens")
    lost = [
        F.cross_entropy(model.logits(hidden_states(model, piece[:-1])), piece[1:], reduction="sum") for piece in pieces
    ]
    return float(torch.stack(lost).sum()) / sum(len(piece) - 1 for piece in pieces)


@contextmanager
def replaced(model: Decoder, weights: Mapping[int, Tensor]) -> Iterator[None]:
    """The down projections of these layers are other matrices. What was there comes back afterwards."""
    layers = {layer: model.layers[layer].mlp.down_proj for layer in weights}
    kept = {layer: linear.weight for layer, linear in layers.items()}
    try:
        for layer, linear in layers.items():
            linear.weight = nn.Parameter(weights[layer])
        yield
    finally:
        for layer, linear in layers.items():
            linear.weight = kept[layer]


@contextmanager
def embedded_by(model: Decoder, table: Tensor, output: bool = False) -> Iterator[None]:
    """Tokens are embedded by another `table`; with `output`, logits are computed from it, too."""
    embed, head = model.embed_tokens, model.lm_head
    try:
        model.embed_tokens = nn.Embedding.from_pretrained(table)
        if output:
            model.lm_head = nn.Linear(*table.shape[::-1], bias=False)
            model.lm_head.weight = model.embed_tokens.weight
        yield
    finally:
        model.embed_tokens, model.lm_head = embed, head


def rounded(weight: Tensor, bits: int) -> tuple[float, Tensor]:
    """Bits per weight and the matrix that the engine's INT8 or INT4 (lesson 5) makes of `weight`."""
    scheme = Int8() if bits == 8 else Int4(group_size=64)
    parts = scheme.quantize(weight)
    size = 8 * sum(part.nbytes for part in parts.values()) / weight.numel()
    return size, scheme.dequantize(parts, weight.shape[1])
