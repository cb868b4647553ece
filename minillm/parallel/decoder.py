"""The decoder of one rank: `Decoder` with fewer heads, inner channels and tokens, and the sums that make it whole.

Every rank runs every layer over all tokens of the step. A layer needs two sums over the ranks:

    x (on all ranks) → norm → q, k, v of own heads → attention → o_proj of own heads   ── all-reduce → + x
                     → norm → gate, up of own channels → silu · → down_proj of own     ── all-reduce → + x

Between a product split by columns and the one split by rows that follows, nothing is exchanged: attention works head by
head, SwiGLU channel by channel. A step adds one all-reduce after the embedding and one all-gather of the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minillm.models.config import ModelConfig
from minillm.models.decoder import Attention, Decoder
from minillm.ops.linear import Linear
from minillm.parallel.group import Group
from minillm.parallel.split import config_of_rank


class RowParallelLinear(Linear):
    """A linear layer whose inputs are split over the ranks: y = Σ over ranks of x_r W_r."""

    def __init__(self, group: Group, in_features: int, out_features: int, bias: bool) -> None:
        """`in_features`: of this rank."""
        super().__init__(in_features, out_features, bias=bias)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that nn.Linear gives it)
        """`[rows, in of this rank]` → `[rows, out]`, the same on all ranks."""
        return self.group.all_reduce(super().forward(input))


class ParallelDecoder(Decoder):
    """One rank's part of a decoder. Its layers are those of a smaller model; `config` has its heads and inner channels,
    but the vocabulary size of the whole model."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        """`config`: of the whole model."""
        own = config_of_rank(config, group.size)
        super().__init__(own)
        self.config = replace(own, vocab_size=config.vocab_size)
        self.group = group
        self.num_ranks = group.size
        self.first_token, self.num_tokens = group.rank * own.vocab_size, own.vocab_size
        for layer in self.layers:
            layer.o_proj = RowParallelLinear(group, own.q_size, own.hidden_size, own.o_bias)
            layer.mlp.down_proj = RowParallelLinear(group, own.intermediate_size, own.hidden_size, own.mlp_bias)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, batch: Any = None) -> Tensor:
        """See `Decoder.forward`. The hidden states are the same on all ranks."""
        return self.run_embedded(self.embed(token_ids), positions, attention, batch)

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[num_tokens]` → `[num_tokens, hidden]`: each row comes from the rank that holds its token; others add 0."""
        index = token_ids - self.first_token
        is_own = (index >= 0) & (index < self.num_tokens)
        rows = self.embed_tokens(index.where(is_own, 0))
        return self.group.all_reduce(torch.where(is_own.unsqueeze(1), rows, 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`. All ranks get all logits."""
        return self.group.all_gather(self.lm_head(hidden))[:, : self.config.vocab_size]
