"""Calibration statistics of a model: samples of its linears' inputs, or the squared gradients of their weights.

The text is held-out code (`minillm.models.held_out.calibration_prompts`), disjoint from the code that quality is
measured on. Rows run one at a time with a causal mask and no sliding window, so they are truncated to `longest_row`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from minillm.errors import ConfigError, UnsupportedError
from minillm.models.causal import CausalAttention
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.held_out import calibration_prompts
from minillm.models.quantize import Calibration, decoder_linears
from minillm.quantization.base import LayerStatistics, QuantizedLinear
from minillm.tokenizer import Tokenizer

MAX_ROWS = 1024
"""Input rows kept per layer, evenly spread over the text: 4 · in · 1024 bytes per layer."""


def calibration_rows(tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of the calibration prompts, one row each."""
    return [tokenizer.encode(prompt.prompt) for prompt in calibration_prompts()]


class CalibrationTexts:
    """What a cache layout may ask about text (`KVCache.prepare`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def rows(self) -> list[list[int]]:
        """See `calibration_rows`."""
        return calibration_rows(self.tokenizer)

    def ids_with(self, text: bytes) -> list[int]:
        """All tokens whose bytes contain `text`."""
        special = set(self.tokenizer.special_ids)
        ids = (i for i in range(self.tokenizer.vocab_size) if i not in special)
        return [i for i in ids if text in self.tokenizer.token_bytes(i)]


def longest_row(config: ModelConfig) -> int:
    """Most tokens of a row for which full attention computes what the model does: its context or smallest window."""
    windows = (config.window(layer) for layer in range(config.num_layers))
    return min([config.max_position_embeddings, *(window for window in windows if window is not None)])


@torch.inference_mode()
def keys_and_values(model: Decoder, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """For each layer the keys and values of all tokens of these texts as attention gets them, with RoPE: `[n,
    num_kv_heads, head_dim]` each. `rows`: of at most `longest_row` tokens."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.layers]

    class Recorder(CausalAttention):
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
            found[layer].append((k, v))
            return super().attend(layer, q, k, v, batch)

    device = model.embed_tokens.weight.device
    for row in rows:
        model(torch.tensor(row, device=device), torch.arange(len(row), device=device), Recorder(len(row)))
    keys, values = ([torch.cat([pair[i] for pair in of_layer]) for of_layer in found] for i in (0, 1))
    return list(zip(keys, values, strict=True))


def calibrate(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    needs: str,
    max_rows: int = MAX_ROWS,
    progress: bool = False,
) -> Calibration:
    """Run `model` over `rows` of token ids and collect the statistics in `needs`: `inputs` or `gradients`.

    Rows longer than `longest_row` are truncated. Raises `ConfigError` if no row is long enough,
    `UnsupportedError` if the model is already quantised.
    """
    collect = {"inputs": _inputs, "gradients": _squared_gradients}.get(needs)
    if collect is None:
        raise ConfigError(f"needs={needs!r} must be 'inputs' or 'gradients'")
    linears: dict[str, nn.Linear] = {}
    for name, linear in decoder_linears(model):
        if isinstance(linear, QuantizedLinear):
            raise UnsupportedError(f"{name} is quantised already; calibrate the original model")
        linears[name] = linear
    shortest = 2 if needs == "gradients" else 1
    longest = longest_row(model.config)
    kept = [cut for row in rows if len(cut := list(row[:longest])) >= shortest]
    if not kept:
        raise ConfigError(
            f"calibration needs rows of at least {shortest} tokens, and uses up to {longest} of a row; there are none"
        )
    num_tokens = sum(map(len, kept))
    device = model.embed_tokens.weight.device
    texts = (
        torch.tensor(row, device=device) for row in tqdm(kept, desc="calibrating", unit=" texts", disable=not progress)
    )
    return Calibration(needs, num_tokens, collect(model, linears, texts, -(-num_tokens // max_rows)))


@torch.no_grad()
def _inputs(
    model: Decoder, linears: dict[str, nn.Linear], texts: Iterator[Tensor], stride: int
) -> dict[str, LayerStatistics]:
    """Collect every `stride`-th input of each layer, and the mean |x| over all of its inputs."""
    samples: dict[str, list[Tensor]] = {name: [] for name in linears}
    totals = {name: torch.zeros(linear.in_features, dtype=torch.float64) for name, linear in linears.items()}
    done = 0
    for text in texts:
        with _recording_inputs(linears) as inputs:
            _logits(model, text)
        for name, x in inputs.items():
            samples[name].append(x[-done % stride :: stride].float().clone())
            totals[name] += x.abs().sum(0, dtype=torch.float64).cpu()
        done += len(text)
    return {
        name: LayerStatistics(
            inputs=torch.cat(samples[name]), mean_abs=(totals[name] / done).float().to(samples[name][0])
        )
        for name in linears
    }


def _squared_gradients(
    model: Decoder, linears: dict[str, nn.Linear], texts: Iterator[Tensor], stride: int
) -> dict[str, LayerStatistics]:
    """Σ over texts of (∂ log p(text) / ∂ weight)². A text is one sample: gradients are squared after summing."""
    squares = {name: torch.zeros_like(linear.weight, dtype=torch.float32) for name, linear in linears.items()}
    weights = [linear.weight for linear in linears.values()]
    before = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for text in texts:
            with torch.enable_grad():
                loss = F.cross_entropy(_logits(model, text)[:-1].float(), text[1:], reduction="sum")
                gradients = torch.autograd.grad(loss, weights)
            for square, gradient in zip(squares.values(), gradients, strict=True):
                square.addcmul_(gradient.float(), gradient.float())
    finally:
        for weight, required_grad in zip(weights, before, strict=True):
            weight.requires_grad_(required_grad)
    return {name: LayerStatistics(squared_gradients=square) for name, square in squares.items()}


def _logits(model: Decoder, text: Tensor) -> Tensor:
    """`[length]` → `[length, vocab]`."""
    positions = torch.arange(len(text), device=text.device)
    return model.logits(model(text, positions, CausalAttention(len(text))))


@contextmanager
def _recording_inputs(linears: dict[str, nn.Linear]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that receives the input of each layer when it runs."""
    recorded: dict[str, Tensor] = {}

    def record(name: str, linear: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        return linear.register_forward_pre_hook(lambda _, args: recorded.__setitem__(name, args[0]))

    handles = [record(name, linear) for name, linear in linears.items()]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
