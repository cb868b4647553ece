"""The network of method `heads`: from the target's last hidden state to several drafts, without attention.

    h   the target's hidden state that chose the last token t₀ (after the final norm), read once per round
    c = h + MLP([h, e(t₀)])                       what follows, before any draft is known
    sᵢ = c + Bᵢ silu(Aᵢ c)                        one vector for each draft position i
    zᵢ = silu(Pᵢ c + Q e(tᵢ₋₁) + R zᵢ₋₁)          what the drafts so far add
    logits of draft i = W (sᵢ + D zᵢ)             W: the target's unembedding, e: its embedding, both shared

Medusa (Cai et al. 2024) has independent heads. Hydra (Ankner et al. 2024) lets each head read the drafts before it,
which are accepted much more often. Here they enter through the few numbers of zᵢ. Since W (sᵢ + D zᵢ) is W sᵢ + (W D)
zᵢ, all the wide products, W sᵢ of every position, are one product of several rows, made before the first draft is
drawn; per draft only the narrow product with W D remains, which is computed once when the weights are loaded. The shape
of the network, a low-rank correction and confidences that precede the drafts, is minillm's own.

Confidence. From c alone, before anything is drawn, the network estimates for each position the probability that a draft
there is accepted if those before it were: once for greedy requests, once for temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn

from minillm.models.layers import RMSNorm
from minillm.ops.linear import Linear
from minillm.ops.silu_gate import silu_gate

KINDS = ("greedy", "sampled")
"""The rows of the confidences."""
Size = Annotated[int, Meta(ge=1, le=65_536)]


@dataclass(frozen=True)
class HeadsShape:
    """The sizes of the network. The defaults are those of the bundled heads: 0.8M parameters for hidden size 384."""

    hidden_size: Size
    num_drafts: Annotated[int, Meta(ge=1, le=63)] = 5
    inner_size: Size = 256
    """Of the MLP."""
    position_rank: Size = 32
    """Numbers between Aᵢ and Bᵢ."""
    token_rank: Size = 64
    """Numbers of zᵢ."""
    norm_eps: Annotated[float, Meta(gt=0, le=0.1)] = 1e-5


class DraftHeads(nn.Module):
    """The weights of the network, in the names of the module docstring. All inputs are flat: `[num_rows, …]`."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, count, rank = shape.hidden_size, shape.num_drafts, shape.token_rank
        self.token_norm = RMSNorm(hidden, shape.norm_eps)
        self.gate_up = Linear(2 * hidden, 2 * shape.inner_size, bias=False)
        self.down = Linear(shape.inner_size, hidden, bias=False)
        self.position_in = Linear(hidden, count * shape.position_rank, bias=False)
        self.position_out = nn.ModuleList(Linear(shape.position_rank, hidden, bias=False) for _ in range(count))
        self.context = Linear(hidden, count * rank, bias=False)
        self.token = Linear(hidden, rank, bias=False)
        self.state = Linear(rank, rank, bias=False)
        self.up = Linear(rank, hidden, bias=False)
        self.confidence = nn.Linear(hidden, len(KINDS) * count)

    def initialise(self) -> None:
        """Small random weights; zeros where a layer adds to c, sᵢ or a logit."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        for layer in (self.down, *self.position_out, self.up, self.confidence):
            nn.init.zeros_(layer.weight)
        nn.init.zeros_(self.confidence.bias)

    def trunk(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """c: `[n, hidden]` hidden states and the embeddings of the last tokens → `[n, hidden]`."""
        both = torch.cat((hidden, self.token_norm(embedded)), dim=-1)
        return hidden + self.down(silu_gate(self.gate_up(both)))

    def positions(self, c: Tensor, count: int) -> Tensor:
        """s of the first `count` positions: `[n, hidden]` → `[n, count, hidden]`."""
        narrow = nn.functional.silu(self.position_in(c)).unflatten(1, (self.shape.num_drafts, -1))
        added = [out(narrow[:, i]) for i, out in enumerate(self.position_out[:count])]
        return c.unsqueeze(1) + torch.stack(added, dim=1)

    def contexts(self, c: Tensor) -> Tensor:
        """Pᵢ c: `[n, hidden]` → `[n, num_drafts, token_rank]`."""
        return self.context(c).unflatten(1, (self.shape.num_drafts, -1))

    def tokens(self, embedded: Tensor) -> Tensor:
        """Q e: `[n, hidden]` → `[n, token_rank]`."""
        return self.token(self.token_norm(embedded))

    def next_state(self, context: Tensor, token: Tensor, state: Tensor | None) -> Tensor:
        """zᵢ from Pᵢ c, Q e(tᵢ₋₁) and zᵢ₋₁ (None before the first), each `[n, token_rank]`."""
        total = context + token
        return nn.functional.silu(total if state is None else total + self.state(state))

    def acceptance_logits(self, c: Tensor) -> Tensor:
        """The logits of the confidences: `[n, hidden]` → `[n, len(KINDS), num_drafts]`."""
        return self.confidence(c).unflatten(1, (len(KINDS), -1))

    def survival(self, c: Tensor) -> Tensor:
        """The estimated probability that a draft and all before it are accepted: like `acceptance_logits`."""
        return self.acceptance_logits(c).float().sigmoid().cumprod(-1)

    def given_tokens(self, c: Tensor, embedded: Tensor) -> Tensor:
        """What the unembedding multiplies if the tokens t₀, t₁, … are given: `[n, hidden]` and their embeddings
        `[n, num_drafts, hidden]` → `[n, num_drafts, hidden]`."""
        contexts, state, states = self.contexts(c), None, []
        for i in range(self.shape.num_drafts):
            state = self.next_state(contexts[:, i], self.tokens(embedded[:, i]), state)
            states.append(state)
        added = self.up(torch.stack(states, dim=1).flatten(0, 1)).view_as(embedded)
        return self.positions(c, self.shape.num_drafts) + added
