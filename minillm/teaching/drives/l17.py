"""What the cases of lesson 17 do with a function: call it, and watch how much exists at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minillm.beside.chunked_training import SavedBytes
from minillm.teaching.drives.l16 import Products
from minillm.teaching.drives.only_torch import refuse_numpy

Function = Callable[..., Any]


class LargestTensor(TorchFunctionMode):
    """The most numbers in any tensor that a function of PyTorch returns, views of `inputs` left out. (A
    `TorchDispatchMode` would see more, but imports PyTorch's compiler, and with it Triton.)"""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.numbers = 0
        self.memory = {_memory(x) for x in inputs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_numpy(func)
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not (self.memory and _memory(found) in self.memory):
            self.numbers = max(self.numbers, found.numel())
        return found


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def lse_of_tiles(function: Function, x: Tensor, y: Tensor, temperature: float, tile: int) -> dict[str, object]:
    """The result, and whether no matrix product was larger than x or a tile of similarities with one column more, and
    no other tensor but views of the inputs larger than that, a tile of y, or one number for each row of x and tile."""
    with LargestTensor(x, y) as largest, Products() as products:
        found = function(x, y, temperature, tile)
    similarities = max(len(x) * (tile + 1), x.numel())
    room = max(similarities, len(x) * -(-len(y) // tile), tile * y.shape[1])
    small = products.results <= similarities and largest.numbers <= room
    return {"returned": found, "one tile at a time": small}


def product(function: Function, x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> dict[str, object]:
    """The result, and whether no tensor was larger than x, than the products of x with each of u, s and v, than those
    with every block of the matrix, and than u or v multiplied by all of s. In small cases a block is no larger than
    these, in the large one it is."""
    with LargestTensor() as largest:
        found = function(x, u, s, v)
    products = (*(part.numel() for part in (u, s, v)), len(v) * u.shape[0] * u.shape[1])
    scaled = max(len(v) * u.numel(), len(u) * v.numel())
    room = max(x.numel(), len(x) * max(products), scaled)
    return {"returned": found, "without the matrix": largest.numbers <= room}


class TinyText:
    """A text of one attention layer: a token's row, made of the token and the row before, is its key and its value.
    Each token predicts the next."""

    def __init__(self, tokens: Tensor, weight: Tensor) -> None:
        """`tokens`: `[n, d]`; `weight`: `[d, d]`, a leaf that makes the rows."""
        self.tokens, self.weight = tokens, weight

    def run(self, start: int, end: int, past: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of tokens `start` to `end`, and their rows `[end - start, d]`, which later chunks read."""
        made = [past[-1] if start else torch.zeros(self.tokens.shape[1])]
        for token in self.tokens[start:end]:
            made.append(torch.tanh((token + made[-1]) @ self.weight))
        rows = torch.stack(made[1:])
        keys = torch.cat((past, rows))
        hidden = torch.ones(len(rows), len(keys), dtype=torch.bool).triu(len(past) + 1)
        scores = (self.tokens[start:end] @ keys.T).masked_fill(hidden, -torch.inf)
        wanted = self.tokens.roll(-1, 0)[start:end]
        return (scores.softmax(1) @ keys - wanted).square().sum(), rows

    def rows(self, chunks: Sequence[tuple[int, int]]) -> Tensor:
        """The rows of all tokens, without a graph."""
        kept = self.tokens[:0]
        with torch.no_grad():
            for start, end in chunks:
                kept = torch.cat((kept, self.run(start, end, kept)[1]))
        return kept

    def most_bytes(self, chunks: Sequence[tuple[int, int]], kept: Tensor) -> int:
        """The most bytes that the graph of one chunk keeps."""
        peaks = []
        for start, end in chunks:
            with SavedBytes(torch.nn.Module()) as saved:
                loss, rows = self.run(start, end, kept[:start].detach().requires_grad_())
                (loss + (rows * kept[start:end]).sum()).detach()
            peaks.append(saved.peak)
        return max(peaks)


def gradients(
    function: Function, tokens: Tensor, weight: Tensor, chunks: Sequence[tuple[int, int]]
) -> dict[str, object]:
    """What the function returns, the gradient of the weight, and whether one chunk's graph existed at a time."""
    text = TinyText(tokens, weight.clone().requires_grad_())
    kept = text.rows(chunks)
    room = 1.4 * text.most_bytes(chunks, kept)
    with SavedBytes(torch.nn.Module()) as saved:
        sent = function(text.run, chunks, kept.clone())
    return {"returned": sent, "gradient of the weight": text.weight.grad, "one graph at a time": saved.peak <= room}
