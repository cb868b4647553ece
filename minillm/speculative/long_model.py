"""The draft of LongSpec (Yang et al. 2025): one block that reads the target's cache.

    x = embedding of the token, the target's
    x = x + self_attention(norm(x))        the last 512 tokens; the draft's own keys and values
    x = x + cross_attention(norm(x))       all tokens that the target has verified: its keys and values, last layer
    x = x + mlp(norm(x))
    logits = the target's unembedding of norm(x)

However long the text is, the draft needs no more memory: what it knows of far tokens it reads in the target's cache.
With one block, its own keys and values depend on a token and its position only. So they are never stale: not after a
rejection, and not where a prefix was found in the cache.

As published: the three sublayers in this order, embedding and unembedding of the target, keys and values of its last
layer (queries are rotated, keys have been), the window of 512, and training in which a token sees the target's rows of
the tokens before its rollout only (blocks of 4) and in which positions have random offsets behind four anchors.

Our choice: the projections, the MLP and the norms start as copies of the target's last block. Its queries fit these
keys already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.config import at_least
from minillm.errors import ConfigError
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.models.layers import MLP, RMSNorm
from minillm.ops.linear import Linear
from minillm.ops.rope import rope
from minillm.speculative.masked_attention import hidden_keys, masked_attention
from minillm.speculative.spire_model import KVRows
from minillm.speculative.target_parts import TargetParts

NUM_ANCHORS = 4
"""First tokens of a text whose positions no offset moves in training."""


@dataclass(frozen=True)
class LongShape:
    """What the draft is made of."""

    hidden_size: int
    """That of the target."""
    window: int = 512
    """Tokens that self-attention sees, the newest included."""
    intermediate_size: int | None = None
    """Width of the MLP; None: the target's."""
    cross_attention: bool = True
    """Whether it reads the target's cache; False is for ablations."""

    def __post_init__(self) -> None:
        at_least("window", self.window, 1)
        if self.intermediate_size is not None:
            at_least("intermediate_size", self.intermediate_size, 1)
        if not isinstance(self.cross_attention, bool):
            raise ConfigError(f"cross_attention={self.cross_attention!r} must be True or False")


class CrossAttention(nn.Module):
    """Queries and output of the attention over the target's rows, and the norm before it."""

    def __init__(self, target: TargetParts) -> None:
        super().__init__()
        config = target.config
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rotates = config.rotates(config.num_layers - 1)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.q_proj = Linear(config.hidden_size, config.q_size, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = Linear(config.q_size, config.hidden_size, bias=config.o_bias)

    def queries(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """`[num_tokens, hidden]` → `[num_tokens, num_heads, head_dim]`, rotated as the target's are."""
        q = self.q_proj(self.norm(x)).unflatten(1, (self.num_heads, self.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return rope(q, cos, signed_sin) if self.rotates else q

    def copy_attention_of(self, layer: DecoderLayer) -> None:
        """Start from the attention of a block of the target."""
        with torch.no_grad():
            self.norm.weight.copy_(layer.input_norm.weight)
            size = self.num_heads * self.head_dim
            for mine, theirs in ((self.q_proj.weight, layer.qkv_proj.weight), (self.q_proj.bias, layer.qkv_proj.bias)):
                if mine is not None:
                    mine.copy_(theirs[:size])
        self.o_proj.load_state_dict(layer.o_proj.state_dict())
        if self.q_norm is not None:
            self.q_norm.load_state_dict(layer.q_norm.state_dict())


class LongModel(nn.Module):
    """The weights of the draft: the block and the final norm."""

    def __init__(self, shape: LongShape, target: TargetParts) -> None:
        super().__init__()
        config = target.config
        self.shape, self.target = shape, target
        self.block = DecoderLayer(config, config.num_layers - 1)
        """Self-attention and the MLP."""
        if shape.intermediate_size is not None:
            self.block.mlp = MLP(config.hidden_size, shape.intermediate_size, config.mlp_bias)
        self.cross = CrossAttention(target) if shape.cross_attention else None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def copy_block_of(self, target: Decoder) -> None:
        """Start from the target's last block and its final norm. An MLP of another width starts anew."""
        last = target.layers[-1]
        stored = last.state_dict()
        if self.shape.intermediate_size is not None:
            stored = {name: value for name, value in stored.items() if not name.startswith("mlp.")}
        self.block.load_state_dict(stored, strict=self.shape.intermediate_size is None)
        if self.cross is not None:
            self.cross.copy_attention_of(last)
        self.norm.load_state_dict(target.norm.state_dict())

    def rows(self, token_ids: Tensor, positions: Tensor) -> KVRows:
        """Keys and values of self-attention for these tokens, `[num_tokens]` → `[num_tokens, num_kv_heads, head_dim]`
        each. They depend on nothing else."""
        _, keys, values = self.block.heads(self.target.embed(token_ids), *self.target.rotations(positions))
        return KVRows(keys, values)

    def finish(self, x: Tensor) -> Tensor:
        """After attention: the MLP and the final norm, `[num_tokens, hidden]` → the same shape."""
        return self.norm(x + self.block.mlp(self.block.post_attention_norm(x)))

    def over_texts(self, inputs: Tensor, positions: Tensor, target_rows: KVRows, unseen: Tensor) -> Tensor:
        """Hidden states of all tokens of some texts, `[texts · length, hidden]`, as in training.

        `inputs`, `positions`: `[texts, length]`; `target_rows`: `[texts, length, num_kv_heads, head_dim]`;
        `unseen`: `[length, length]`, bool: which of the target's rows (second index) a token does not see.
        """
        cos, signed_sin = self.target.rotations(positions.flatten())
        x = self.target.embed(inputs.flatten())
        q, k, v = (part.unflatten(0, inputs.shape) for part in self.block.heads(x, cos, signed_sin))
        hidden = hidden_keys(positions, positions, self.shape.window)
        x = x + self.block.o_proj(masked_attention(q, k, v, hidden).flatten(2).flatten(0, 1))
        if self.cross is not None:
            q = self.cross.queries(x, cos, signed_sin).unflatten(0, inputs.shape)
            seen = masked_attention(q, target_rows.keys, target_rows.values, unseen.unsqueeze(0))
            x = x + self.cross.o_proj(seen.flatten(2).flatten(0, 1))
        return self.finish(x)
