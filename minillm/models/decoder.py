"""One decoder for every family: embeddings, L × (attention, MLP), final norm, unembedding.

The decoder has no notion of requests, cache pages or ragged batches. It runs a flat list of tokens, and passes q, k and
v to the object that holds the KV cache: `attention.attend(layer, q, k, v, batch)`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minillm.models.config import ModelConfig
from minillm.models.layers import MLP, RMSNorm
from minillm.models.rope import RotaryEmbedding
from minillm.ops.linear import Linear
from minillm.ops.rms_norm import rms_norm
from minillm.ops.rope import rope


class Attention(Protocol):
    """Stores keys and values and computes attention over them: a KV cache, or plain causal attention in training."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        """Store `k`, `v` (`[num_tokens, num_kv_heads, head_dim]`); return the attention output, shaped like `q`."""


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.num_qk_heads = config.num_heads + config.num_kv_heads
        self.rotates = config.rotates(layer)
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv_proj = Linear(config.hidden_size, config.q_size + 2 * config.kv_size, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = Linear(config.q_size, config.hidden_size, bias=config.o_bias)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor, attention: Attention, batch: Any) -> Tensor:
        """`x`: `[num_tokens, hidden]` → the same shape."""
        q, k, v = self.heads(x, cos, signed_sin)
        x = x + self.o_proj(attention.attend(self.layer, q, k, v, batch).flatten(1))
        return x + self.mlp(self.post_attention_norm(x))

    def heads(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the input `x` as attention gets them: `[num_tokens, heads, head_dim]` each."""
        heads = self.qkv_proj(self.input_norm(x)).view(-1, self.num_qk_heads + self.num_kv_heads, self.head_dim)
        qk, v = heads.split((self.num_qk_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = self._normalise(qk, self.q_norm, self.k_norm)
        if self.rotates:
            qk = rope(qk, cos, signed_sin)
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v

    def _normalise(self, qk: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """Normalise q and k in one call: only the norm weights differ between them."""
        weights = (q_norm.weight.expand(self.num_heads, -1), k_norm.weight.expand(self.num_kv_heads, -1))
        return rms_norm(qk, torch.cat(weights), q_norm.eps)


class Decoder(nn.Module):
    """A decoder-only transformer over a flat batch of tokens."""

    num_ranks = 1
    """Processes that the weights and the KV cache are split over (see `minillm.parallel`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rope = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Tie the unembedding to the embedding if the configuration says so. Call it again after replacing either."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, batch: Any = None) -> Tensor:
        """Return the hidden states `[num_tokens, hidden]` after the final norm.

        `token_ids`, `positions`: `[num_tokens]`, int64, positions below `max_position_embeddings`.
        `attention` and `batch` decide which tokens a token attends to.
        """
        return self.run_embedded(self.embed_tokens(token_ids), positions, attention, batch)

    def run_embedded(self, x: Tensor, positions: Tensor, attention: Attention, batch: Any = None) -> Tensor:
        """As `forward`, from embeddings `[num_tokens, hidden]`, which need not be those of tokens."""
        cos, signed_sin = (table.to(x.dtype) for table in self.rope(positions))
        for layer in self.layers:
            x = layer(x, cos, signed_sin, attention, batch)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the vocabulary: `[num_rows, hidden]` → `[num_rows, vocab_size]`."""
        return self.lm_head(hidden)

    @property
    def num_parameters(self) -> int:
        """The number of parameters; a tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())
