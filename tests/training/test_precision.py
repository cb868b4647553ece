from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minillm import hardware
from minillm.models.causal import CausalAttention
from minillm.training import precision
from minillm.training.muon import orthogonalise
from minillm.training.pretrain import new_model, next_token_loss
from minillm.training.prompt_tokens_loss import PromptAttention
from minillm.training.record import Hardware
from minillm.training.unlikelihood import fast_copy

from .conftest import config

TURING, AMPERE = SimpleNamespace(major=7, minor=5), SimpleNamespace(major=8, minor=0)
"""What PyTorch says of GPUs without and with instructions for bf16."""
DTYPES = (torch.bfloat16, torch.float32)


def product_dtype() -> torch.dtype:
    """What a linear layer returns in training, here."""
    with precision.forward_precision("cpu"):
        return nn.Linear(4, 4)(torch.ones(1, 4)).dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_multiplies_in_the_dtype_of_the_cpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(precision, "ON_CPU", dtype)
    assert product_dtype() == dtype
    assert orthogonalise(torch.randn(8, 8)).dtype == dtype
    assert fast_copy(new_model(config())).embed_tokens.weight.dtype == dtype
    assert f"torch.{Hardware.here('cpu').products}" == str(dtype)


@pytest.mark.parametrize(("card", "dtype"), [(TURING, torch.float32), (AMPERE, torch.bfloat16)], ids=["sm_75", "sm_80"])
def test_a_gpu_that_only_emulates_bf16_trains_in_fp32(
    monkeypatch: pytest.MonkeyPatch, card: SimpleNamespace, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert precision.forward_dtype("cuda") == dtype


@pytest.mark.parametrize(
    ("card", "autocast", "kv_heads"),
    [(TURING, False, 4), (AMPERE, True, 2), (AMPERE, False, 4)],
    ids=["sm_75", "sm_80 training", "sm_80 fp32"],
)
def test_fused_attention_gets_grouped_heads_only_where_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, card: SimpleNamespace, autocast: bool, kv_heads: int
) -> None:
    """PyTorch's only fused kernel before sm_80 and in fp32 refuses them, and the scores of all heads would be kept."""
    given, fused = [], F.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
        given.append((k.shape[1], v.shape[1], options))
        return fused(q, k, v, **options)

    attention, rows = CausalAttention(12), [torch.randn(2 * 12, heads, 16) for heads in (4, 2, 2)]
    on_cpu = attention.attend(0, *rows)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: autocast)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    on_gpu = attention.attend(0, *rows)
    assert given == [(kv_heads, kv_heads, {"is_causal": True, "enable_gqa": autocast})]
    assert torch.allclose(on_gpu, on_cpu, atol=1e-6)


def test_attention_with_a_mask_gets_no_grouped_heads_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused kernel takes both."""
    given, fused = [], F.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        given.append((k.shape[1], v.shape[1], options["enable_gqa"]))
        return fused(q, k, v, **options)

    attention = PromptAttention(12, 3, torch.device("cpu"))
    rows = [torch.randn(2 * len(attention.positions), heads, 16) for heads in (4, 2, 2)]
    on_cpu = attention.attend(0, *rows)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    on_gpu = attention.attend(0, *rows)
    assert given == [(4, 4, False)]
    assert torch.allclose(on_gpu, on_cpu, atol=1e-6)


def test_the_loss_follows_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 it is the exact one; in bf16 it is close to it, but differs."""
    inputs = torch.arange(48).view(2, 24) % 29
    model, losses = new_model(config()), []
    for dtype in DTYPES:
        monkeypatch.setattr(precision, "ON_CPU", dtype)
        losses.append(next_token_loss(model, inputs, inputs).item())
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_loss_is_one_graph_of_the_same_dtype(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(precision, "ON_CPU", dtype)
    inputs = torch.arange(48).view(2, 24) % 29
    model, compiled = new_model(config()), torch.compile(next_token_loss, backend="eager", fullgraph=True)
    assert compiled(model, inputs, inputs).item() == next_token_loss(model, inputs, inputs).item()


@pytest.mark.parametrize(
    ("simd", "dtype"),
    [
        ((), torch.float32),
        (("avx2",), torch.float32),
        (("avx2", "avx512f", "avx512_vnni"), torch.float32),
        (("avx2", "avx512f", "avx512_bf16"), torch.bfloat16),
        (("asimd", "asimddp"), torch.float32),
        (("asimd", "bf16"), torch.bfloat16),
    ],
)
def test_bf16_is_chosen_where_instructions_multiply_it(simd: tuple[str, ...], dtype: torch.dtype) -> None:
    """AVX-512 alone has none for bf16."""
    assert set(simd) | precision.CPU_BF16 <= set(hardware.SIMD)
    assert precision.cpu_dtype(simd) == dtype
