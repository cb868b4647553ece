"""The decoder as a PyTorch module: it trains, narrows, compiles, and counts itself."""

from __future__ import annotations

import torch

from minillm.models.causal import CausalAttention
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from tests.models.naive_attention import NaiveAttention


def decoder(**changes: object) -> Decoder:
    torch.manual_seed(0)
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
    return Decoder(ModelConfig(**{**shape, "num_kv_heads": 2, "head_dim": 4, "max_position_embeddings": 32, **changes}))


def loss(model: Decoder) -> torch.Tensor:
    ids = torch.arange(12)
    return model.logits(model(ids, ids, CausalAttention(12))).float().logsumexp(-1).sum()


def test_every_parameter_gets_a_gradient_under_autocast() -> None:
    model = decoder(qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss(model).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_bf16_weights_stay_close_to_fp32() -> None:
    """bf16 keeps 8 bits, so after a few layers of this width the hidden states agree to a few percent."""
    model, ids = decoder(qk_norm=True), torch.arange(12)
    exact = model(ids, ids, CausalAttention(12))
    narrow = model.to(torch.bfloat16)(ids, ids, CausalAttention(12))
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - exact).norm() / exact.norm() < 0.03


def test_tracing_the_decoder_for_a_compiler_breaks_nowhere() -> None:
    """`fullgraph` refuses any construct that a compiler would have to leave to Python."""
    model, ids = decoder(qk_norm=True), torch.arange(12)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    attention = CausalAttention(12)
    assert torch.allclose(compiled(ids, ids, attention), model(ids, ids, attention), atol=1e-6)


def test_a_flat_batch_may_hold_positions_in_any_order() -> None:
    """Two sequences in one call give what each gives alone: a token's row depends on its position, not on its place."""
    model, ids = decoder(), torch.tensor([3, 9, 4, 3, 9, 4])
    both = model(ids, torch.tensor([5, 6, 7, 0, 1, 2]), CausalAttention(3))
    alone = [
        model(ids[:3], positions, NaiveAttention(model.config)) for positions in (torch.arange(5, 8), torch.arange(3))
    ]
    assert torch.allclose(both, torch.cat(alone), atol=1e-5)


def test_a_tied_embedding_is_counted_once() -> None:
    assert decoder().num_parameters - decoder(tie_word_embeddings=True).num_parameters == 30 * 16
