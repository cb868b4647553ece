"""What a trained drafter shares with its target: embedding, unembedding, RoPE tables, and the slots of its cache. None
of it is trained or stored with the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.ops.linear import Linear
from minillm.ops.linear import linear as linear_product
from minillm.request import Request


class TargetParts:
    """The frozen ends of a target: from token ids to embeddings, and from hidden states to logits.

    The tensors are the target's own if they have the compute dtype. A CPU executor moves the target's weights away, and
    they may be stored in 16 bits: then this keeps a copy in float32.
    """

    def __init__(self, target: Decoder) -> None:
        self.config = target.config
        self.dtype = target.norm.weight.dtype
        """The compute dtype."""
        self.rope = target.rope
        self.embedding = target.embed_tokens.weight.detach().to(self.dtype)
        head = target.lm_head
        self.logits: Callable[[Tensor], Tensor] = head
        """`[num_rows, hidden]` → `[num_rows, vocab]`."""
        if isinstance(head, Linear):
            is_tied = head.weight is target.embed_tokens.weight
            self.logits = partial(_product, self.embedding if is_tied else head.weight.detach().to(self.dtype))

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[num_tokens]`, int64 → `[num_tokens, hidden]`."""
        return F.embedding(token_ids, self.embedding)

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of `positions` (`[num_tokens]`) for `ops.rope`, in the compute dtype."""
        cos, signed_sin = self.rope(positions)
        return cos.to(self.dtype), signed_sin.to(self.dtype)


def _product(weight: Tensor, x: Tensor) -> Tensor:
    return linear_product(x, weight)


def slots_of(request: Request, positions: Sequence[int], block_size: int) -> list[int]:
    """The slots of these tokens of a request in the target's cache."""
    table = request.block_table
    return [table[position // block_size] * block_size + position % block_size for position in positions]


def padded(rows: Sequence[Sequence[int]], padding: int | None, device: torch.device) -> Tensor:
    """These lists as one int64 tensor `[len(rows), longest]`. The end of a shorter list is filled with `padding`; None:
    with its own first number."""
    longest = max(map(len, rows))
    filled = [[*row, *[row[0] if padding is None else padding] * (longest - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device).view(len(rows), longest)
