"""Lesson 17: a text in chunks, through the bundled model, for an exercise that runs the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.beside.chunked_training import ChunkAttention, SavedBytes, chunk_loss, whole_backward
from minillm.models.decoder import Decoder
from minillm.teaching.free_memory import give_back_freed_memory

Chunks = list[tuple[int, int]]
Backward = Callable[[Callable[[int, int, Tensor], tuple[Tensor, Tensor]], Chunks, Tensor], Tensor]


class ChunkedText:
    """A text whose chunks can be run one at a time. A token's row is its keys and values of all layers."""

    def __init__(self, model: Decoder, token_ids: Tensor, chunk: int) -> None:
        """`token_ids`: `[n]`; all but the last are inputs, in chunks of `chunk`."""
        inputs = len(token_ids) - 1
        self.model, self.token_ids = model, token_ids
        self.chunks: Chunks = [(start, min(start + chunk, inputs)) for start in range(0, inputs, chunk)]
        config = model.config
        self.shape = (len(model.layers), 2, config.num_kv_heads, config.head_dim)
        """Of a row: layers, key or value, KV heads, channels."""

    def run(self, start: int, end: int, past: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of tokens `start` to `end`, and their rows, `[end - start, width]`. `past`: all rows before."""
        by_layer = past.unflatten(1, self.shape)
        attention = ChunkAttention(
            [(by_layer[:, layer, 0], by_layer[:, layer, 1]) for layer in range(len(self.model.layers))]
        )
        loss = chunk_loss(self.model, self.token_ids, start, end, attention)
        rows = torch.stack([torch.stack(pair, dim=1) for pair in attention.new], dim=1)
        return loss, rows.flatten(1)

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, float]:
        """The rows of all inputs, without a graph, and the loss of the whole text."""
        layers, _, heads, width = self.shape
        kept, total = torch.empty(0, layers * 2 * heads * width), 0.0
        for start, end in self.chunks:
            loss, rows = self.run(start, end, kept)
            kept, total = torch.cat((kept, rows)), total + float(loss)
        return kept, total


Gradients = list[Tensor]


def train(model: Decoder, token_ids: Tensor, chunk: int, backward: Backward) -> tuple[Gradients, float, SavedBytes]:
    """The gradients of all parameters, the loss, and the bytes that autograd kept."""
    model.zero_grad(set_to_none=True)
    text = ChunkedText(model, token_ids, chunk)
    with SavedBytes(model) as saved:
        kept, loss = text.forward()
        with torch.enable_grad():
            backward(text.run, text.chunks, kept)
    return take_gradients(model), loss, saved


def train_at_once(model: Decoder, token_ids: Tensor) -> tuple[Gradients, float, SavedBytes]:
    """The same with one graph of the whole text."""
    model.zero_grad(set_to_none=True)
    with SavedBytes(model) as saved, torch.enable_grad():
        loss = whole_backward(model, token_ids)
    return take_gradients(model), loss, saved


def take_gradients(model: Decoder) -> Gradients:
    """The gradients, which the model forgets; memory that training has freed goes back to the system."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    give_back_freed_memory()
    return grads


def difference(some: Gradients, right: Gradients) -> float:
    """‖some - right‖ / ‖right‖ over all parameters."""
    apart = sum(float((a - b).square().sum()) for a, b in zip(some, right, strict=True))
    return (apart / sum(float(b.square().sum()) for b in right)) ** 0.5


def truncated(run: Callable[[int, int, Tensor], tuple[Tensor, Tensor]], chunks: Chunks, kept: Tensor) -> Tensor:
    """The planted mistake: truncated backpropagation. Nothing goes back over a boundary."""
    for start, end in reversed(chunks):
        loss, _ = run(start, end, kept[:start])
        loss.backward()
    return torch.zeros_like(kept)
