"""The draft of SPIRe (Neelam et al. 2025): the target's last blocks, a sparse mask, and feedback memory.

    block l of the draft, at token t      x_t^l = block_l(x_t^{l-1}; keys and values of tokens s ≤ t)
    x_t^0                                 the target's embedding of token t
    memory of token t                     m_t = Σ_l softmax(w)_l x_t^l,  l = 0 … number of blocks
    keys and values of token s < t        W_k^l norm^l(m_s), W_v^l norm^l(m_s), the same m_s in all blocks
    logits                                the target's unembedding of norm(x_t^last)

A block of an ordinary decoder sees of an earlier token what *that block's input* was. With feedback memory (Fan et al.
2020), the first block already sees what the last one made of it. So a shallow draft gets deeper with every token.

    position         0       1 … n-62   n-61 …… n-2   n-1     n    n+1    n+2
    token                                             last    x₁    x₂    x₃        the step that drafts x₄
    seen by x₃       sink       no      └────────────── window of 64 ───────┘
    keys, values     target's           target's      memories of the draft  its own

As published: the target's embedding and unembedding, its last blocks as initialisation (2 of 8), the mask (window 64,
1 sink), the formula of m_t, memories older than the last k tokens replaced by the target's activations, training on
k-step rollouts with a loss of half KL and half 1 − Σ min(p, q).

Our reading, where we know no more than that:
- The target's activations are taken from its KV cache. The inputs of the target's last blocks, through the target's own
  projections, *are* the keys and values that it has cached in these layers; block l of the draft reads those of the
  block that it was copied from. So there is no pool for the draft, nothing to compute for a prompt, and nothing to
  lose: whatever shares, evicts or rolls back the target's cache does it for the draft, whatever executor runs it.
- "Older than k" are all tokens that the target has verified. The others are the drafts of this round and the token
  before them, which the target has chosen but not computed.
- A token sees itself through its own x_t^{l-1}, as in the target. Its m_t does not exist before the last block.
- Each block has its own W_k and W_v (copies of the target's); Fan et al. share one pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minillm.config import at_least
from minillm.errors import ConfigError
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.models.layers import RMSNorm
from minillm.speculative.masked_attention import hidden_keys, masked_attention
from minillm.speculative.target_parts import TargetParts


@dataclass(frozen=True)
class SpireShape:
    """What the draft is made of. `window=None` and `feedback=False` are for ablations."""

    hidden_size: int
    """That of the target."""
    num_layers: int = 2
    """Blocks, counterparts of the target's last ones."""
    window: int | None = 64
    """A token attends to itself and the `window - 1` tokens before it, and to the sinks. None: to all before it."""
    num_sinks: int = 1
    """First tokens of the text that every token sees."""
    feedback: bool = True
    """Whether there is feedback memory. False: an ordinary decoder, which computes keys and values of all tokens that
    it sees itself, in each round again."""

    def __post_init__(self) -> None:
        at_least("num_layers", self.num_layers, 1)
        at_least("num_sinks", self.num_sinks, 0)
        if self.window is not None:
            at_least("window", self.window, 1 if self.num_sinks else 2)  # a draft without past has nothing to read
        if not isinstance(self.feedback, bool):
            raise ConfigError(f"feedback={self.feedback!r} must be True or False")


@dataclass(frozen=True)
class KVRows:
    """Keys and values of one block, `[groups, n, num_kv_heads, head_dim]` each."""

    keys: Tensor
    values: Tensor

    def narrowed(self, kept: Tensor) -> KVRows:
        """The groups `kept` (`[m]`, int64)."""
        return KVRows(self.keys.index_select(0, kept), self.values.index_select(0, kept))


@dataclass(frozen=True)
class Context:
    """The tokens before a rollout, as the draft sees them. A group is a request, or in training a row of the batch."""

    rows: list[KVRows]
    """One per block of the draft."""
    positions: Tensor
    """`[groups, n]`, int64; `PADDING` is padding."""

    def narrowed(self, kept: Tensor) -> Context:
        """The groups `kept` (`[m]`, int64)."""
        return Context([rows.narrowed(kept) for rows in self.rows], self.positions.index_select(0, kept))


class Rollout:
    """Draft steps that have begun at some tokens: the `attention` of the draft's blocks.

    In each group, several rollouts share one context and do not see each other. The next token of rollout r is at
    position `starts[group, r]` plus the number of steps so far.
    """

    def __init__(self, shape: SpireShape, context: Context, starts: Tensor) -> None:
        """`starts`: `[groups, rollouts]`, int64. A rollout sees the context before its start."""
        self.shape, self.context, self.starts = shape, context, starts
        self.own: list[list[KVRows]] = [[] for _ in context.rows]
        """For each block, the rows of each step so far: those of the memory once it is known."""
        self.current: list[KVRows] = []
        """For each block, what the newest token's own input gives."""
        self.hidden = torch.empty(0)

    @property
    def num_steps(self) -> int:
        """Steps whose rows later steps see."""
        return len(self.own[0])

    @property
    def positions(self) -> Tensor:
        """The positions of the next tokens, `[groups · rollouts]`."""
        return (self.starts + self.num_steps).flatten()

    def begin_step(self) -> None:
        """Prepare the masks of the next step."""
        queries, context = self.starts + self.num_steps, self.context.positions
        shape, (groups, count) = self.shape, self.starts.shape
        seen = hidden_keys(queries, context, shape.window, shape.num_sinks)
        parts = [seen | (context.unsqueeze(1) >= self.starts.unsqueeze(2))]
        others = ~torch.eye(count, dtype=torch.bool, device=queries.device)
        for step in range(self.num_steps + 1):
            parts.append(hidden_keys(queries, self.starts + step, shape.window, shape.num_sinks) | others)
        self.hidden = torch.cat([part.expand(groups, -1, -1) for part in parts], dim=2)
        self.current = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """See `models.decoder.Attention`; the blocks come in order, `layer` is their number in the target."""
        shape = self.starts.shape
        block, now = len(self.current), KVRows(k.unflatten(0, shape), v.unflatten(0, shape))
        self.current.append(now)
        rows = [self.context.rows[block], *self.own[block], now]
        keys, values = torch.cat([r.keys for r in rows], 1), torch.cat([r.values for r in rows], 1)
        return masked_attention(q.unflatten(0, shape), keys, values, self.hidden).flatten(0, 1)

    def end_step(self, rows: list[KVRows]) -> None:
        """Let later steps see the newest tokens as these rows, one per block."""
        for own, new in zip(self.own, rows, strict=True):
            own.append(new)

    def narrow(self, kept: list[int]) -> None:
        """Go on with the groups `kept` only."""
        index = torch.tensor(kept, device=self.starts.device)
        self.context, self.starts = self.context.narrowed(index), self.starts.index_select(0, index)
        self.own = [[rows.narrowed(index) for rows in steps] for steps in self.own]


class WindowAttention:
    """The `attention` of an ordinary decoder with the sparse mask over whole texts; it keeps the rows of each block."""

    def __init__(self, shape: SpireShape, positions: Tensor) -> None:
        """`positions`: `[groups, n]`, int64, ascending; `PADDING` is padding."""
        self.shape = positions.shape
        self.hidden = hidden_keys(positions, positions, shape.window, shape.num_sinks)
        self.rows: list[KVRows] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """See `models.decoder.Attention`."""
        q, k, v = (x.unflatten(0, self.shape) for x in (q, k, v))
        self.rows.append(KVRows(k, v))
        return masked_attention(q, k, v, self.hidden).flatten(0, 1)


class SpireModel(nn.Module):
    """The weights of the draft: its blocks, its final norm, and the weights w of the memory."""

    def __init__(self, shape: SpireShape, target: TargetParts) -> None:
        """Raises `ConfigError` if the target has fewer blocks."""
        super().__init__()
        config = target.config
        if shape.num_layers > config.num_layers:
            raise ConfigError(
                f"num_layers={shape.num_layers} is more than the {config.num_layers} blocks of the target"
            )
        self.shape, self.target = shape, target
        first = config.num_layers - shape.num_layers
        self.layers = nn.ModuleList(DecoderLayer(config, first + i) for i in range(shape.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixture = nn.Parameter(torch.zeros(shape.num_layers + 1))

    def copy_blocks_of(self, target: Decoder) -> None:
        """Start from the target's last blocks and its final norm."""
        for mine, theirs in zip(self.layers, target.layers[-self.shape.num_layers :], strict=True):
            mine.load_state_dict(theirs.state_dict())
        self.norm.load_state_dict(target.norm.state_dict())

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Any) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm, and memories: `[num_tokens, hidden]` each.

        `token_ids`, `positions`: `[num_tokens]`, int64. `attention`: a `Rollout` or a `WindowAttention`.
        """
        states = [self.target.embed(token_ids)]
        cos, signed_sin = self.target.rotations(positions)
        for layer in self.layers:
            states.append(layer(states[-1], cos, signed_sin, attention, None))
        return self.norm(states[-1]), self.memory(states)

    def memory(self, states: list[Tensor]) -> Tensor:
        """m_t = Σ_l softmax(w)_l x_t^l, from x_t^0 … x_t^last."""
        weights = self.mixture.softmax(0)
        return sum((weight * x for weight, x in zip(weights, states, strict=True)), torch.zeros_like(states[0]))

    def step(self, rollout: Rollout, token_ids: Tensor) -> Tensor:
        """One draft step of each rollout: `[groups · rollouts]` tokens → hidden states after the final norm."""
        positions = rollout.positions
        rollout.begin_step()
        hidden, memory = self(token_ids, positions, rollout)
        if not self.shape.feedback:
            rollout.end_step(rollout.current)
            return hidden
        shape, (cos, signed_sin) = rollout.starts.shape, self.target.rotations(positions)
        rows = [layer.heads(memory, cos, signed_sin)[1:] for layer in self.layers]
        rollout.end_step([KVRows(k.unflatten(0, shape), v.unflatten(0, shape)) for k, v in rows])
        return hidden

    def own_context(self, token_ids: Tensor, positions: Tensor) -> Context:
        """What a draft without feedback memory makes of a text itself: `[groups, n]` tokens → their rows."""
        attention = WindowAttention(self.shape, positions)
        self(token_ids.flatten(), positions.flatten().clamp(min=0), attention)
        return Context(attention.rows, positions)
