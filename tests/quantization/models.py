"""Models and measures that the tests of quantisation share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models import bundled
from minillm.models.causal import CausalAttention
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import load_model
from minillm.quantization.base import LayerStatistics
from minillm.tokenizer import Tokenizer


def random_decoder(**changes: object) -> Decoder:
    """Two layers whose widths (16, 24, odd group tails) divide by no usual group size, with all biases there can be."""
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
    more = {"num_kv_heads": 2, "head_dim": 4, "max_position_embeddings": 32, "eos_token_ids": (0,)}
    torch.manual_seed(0)
    return Decoder(ModelConfig(**{**shape, **more, **changes})).requires_grad_(False).eval()


def statistics(weight: Tensor, rows: int = 64) -> LayerStatistics:
    """Invented statistics for one layer: a few input channels are forty times as active as the rest."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, weight.shape[1], generator=generator)
    inputs[:, ::16] *= 40
    squares = torch.randn(weight.shape, generator=generator).square()
    return LayerStatistics(inputs, inputs.abs().mean(0), squares)


def minicoder() -> tuple[Decoder, Tokenizer]:
    """The bundled target in fp32, and its tokenizer."""
    return load_model("minicoder", torch.float32), Tokenizer.from_folder(bundled.path("minicoder"))


@torch.inference_mode()
def log_probs(model: Decoder, rows: Sequence[Sequence[int]]) -> Tensor:
    """What the model expects after every token of every row: `[tokens, vocab]`."""
    each = []
    for row in rows:
        hidden = model(torch.tensor(row), torch.arange(len(row)), CausalAttention(len(row)))
        each.append(F.log_softmax(model.logits(hidden), dim=-1))
    return torch.cat(each)


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL(reference ‖ other) in nats, the mean over tokens. Both `[tokens, vocab]` log probabilities."""
    return F.kl_div(other, reference, reduction="batchmean", log_target=True).item()
