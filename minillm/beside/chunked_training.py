"""Training on long texts in chunks, with the activations of one chunk at a time (inspired by OOMB).

    forward    chunk 1 → chunk 2 → chunk 3         only keys and values are kept, as in a KV cache
    backward   chunk 3 ← chunk 2 ← chunk 1         each chunk is computed again, this time with its graph

A chunk's keys and values are inputs of all later chunks. So the backward pass goes from the last chunk to the first and
collects, for the keys and values of earlier chunks, the gradient that later ones send them. When their turn comes, this
gradient enters as a further term: Σ k · ∂k + v · ∂v has exactly that derivative.

The gradients are those of the whole text at once. Activations (what a backward pass must keep) are those of one chunk,
whatever the length; attention's scores are computed a third time, one layer at a time, and never kept. Keys, values and
their gradients still grow with the text: 4 · layers · KV heads · head size numbers per token, which OOMB then moves to
the CPU in pages. The price is a second forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from minillm.errors import TrainingError
from minillm.models.decoder import Decoder


class ChunkAttention:
    """Causal attention of one chunk over the keys and values of earlier chunks and its own."""

    def __init__(self, past: list[tuple[Tensor, Tensor]]) -> None:
        """`past`: per layer, the keys and values of all earlier chunks, `[num_past, num_kv_heads, head_dim]`."""
        self.past, self.new = past, []
        """`new`: per layer, those of this chunk."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Any = None) -> Tensor:
        """See `models.decoder.Attention`."""
        self.new.append((k, v))
        return checkpoint(_attend, q, *self.past[layer], k, v, use_reentrant=False)


def _attend(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = torch.cat((past_k, k)), torch.cat((past_v, v))
    count, total = len(q), len(keys)
    hidden = torch.ones(count, total, dtype=torch.bool, device=q.device).triu(total - count + 1)
    rows = (x.transpose(0, 1) for x in (q, keys, values))
    return F.scaled_dot_product_attention(*rows, attn_mask=~hidden, enable_gqa=True).transpose(0, 1)


def whole_backward(model: Decoder, token_ids: Tensor) -> float:
    """Add the gradients of the mean next-token loss of a text, all at once. Returns the loss."""
    return chunked_backward(model, token_ids, len(token_ids))


def chunked_backward(model: Decoder, token_ids: Tensor, chunk: int) -> float:
    """`whole_backward` in chunks of `chunk` tokens. `token_ids`: `[n]`; all but the last are inputs.

    Raises `TrainingError` for a text of less than two tokens, a chunk below one, or a model with a sliding window.
    """
    if model.config.has_windows:
        raise TrainingError(
            "a chunk attends to all tokens before it, but this model has a sliding window; take another"
        )
    if len(token_ids) < 2 or chunk < 1:
        raise TrainingError(f"{len(token_ids)} tokens in chunks of {chunk}: needs at least 2 tokens and chunks of 1")
    starts = range(0, len(token_ids) - 1, chunk)
    kept, loss = _keys_and_values(model, token_ids, starts, chunk)
    grads = [[torch.zeros_like(part) for part in pair] for pair in kept]
    for start in reversed(starts):
        _backward_of_chunk(model, token_ids, start, min(start + chunk, len(token_ids) - 1), kept, grads)
    return loss


@torch.no_grad()
def _keys_and_values(
    model: Decoder, token_ids: Tensor, starts: range, chunk: int
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """The keys and values of all inputs, per layer, and the loss."""
    config = model.config
    none = token_ids.new_empty((0, config.num_kv_heads, config.head_dim), dtype=model.embed_tokens.weight.dtype)
    kept, total = [(none, none) for _ in model.layers], 0.0
    for start in starts:
        attention = ChunkAttention(kept)
        total += float(chunk_loss(model, token_ids, start, min(start + chunk, len(token_ids) - 1), attention))
        kept = [
            (torch.cat((old[0], new[0])), torch.cat((old[1], new[1])))
            for old, new in zip(kept, attention.new, strict=True)
        ]
    return kept, total


def _backward_of_chunk(
    model: Decoder,
    token_ids: Tensor,
    start: int,
    end: int,
    kept: list[tuple[Tensor, Tensor]],
    grads: list[list[Tensor]],
) -> None:
    """Compute the chunk again and send its gradients to the parameters and to earlier keys and values."""
    past = [tuple(part[:start].detach().requires_grad_() for part in pair) for pair in kept]
    for pair, grad in zip(past, grads, strict=True):
        for part, sent in zip(pair, grad, strict=True):
            part.grad = sent[:start]  # the backward pass adds to it in place
    attention = ChunkAttention(past)  # type: ignore[arg-type]
    target = chunk_loss(model, token_ids, start, end, attention)
    for new, grad in zip(attention.new, grads, strict=True):
        for part, sent in zip(new, grad, strict=True):
            # A copy: autograd saves it, and would refuse it once other rows of `sent` have changed.
            target = target + (part * sent[start:end].clone()).sum()
    target.backward()


def chunk_loss(model: Decoder, token_ids: Tensor, start: int, end: int, attention: ChunkAttention) -> Tensor:
    """This chunk's part of the mean loss: inputs `start` to `end`, each with the next token, over all inputs."""
    hidden = model(token_ids[start:end], torch.arange(start, end, device=token_ids.device), attention)
    lost = F.cross_entropy(model.logits(hidden), token_ids[start + 1 : end + 1], reduction="sum")
    return lost / (len(token_ids) - 1)


class SavedBytes:
    """Counts the bytes that autograd keeps for the backward pass, without parameters: `with SavedBytes(model) as s`.

    What is computed again in the backward pass is not kept, and does not count.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.peak = self.now = 0
        """Bytes now, and the most at any time."""
        self.history: list[int] = []
        """Bytes after each change."""
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def __enter__(self) -> SavedBytes:
        """Start counting."""
        self._hooks.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        """Stop counting."""
        self._hooks.__exit__(*problem)

    def _pack(self, tensor: Tensor) -> _Held:
        counted = 0 if tensor.untyped_storage().data_ptr() in self._parameters else tensor.nbytes
        self._change(counted)
        return _Held(self, tensor, counted)

    def _change(self, by: int) -> None:
        self.now += by
        self.peak = max(self.peak, self.now)
        self.history.append(self.now)


class _Held:
    """A saved tensor; it is no longer counted once the graph lets it go."""

    def __init__(self, counter: SavedBytes, tensor: Tensor, counted: int) -> None:
        self.counter, self.tensor, self.counted = counter, tensor, counted

    def __del__(self) -> None:
        self.counter._change(-self.counted)
