"""How much of minicoder is left, on code that nothing was fitted to. Measured, so with room on both sides."""

from __future__ import annotations

import copy

import pytest
import torch

from minillm.models.calibration import calibrate
from minillm.models.decoder import Decoder
from minillm.models.held_out import calibration_prompts, evaluation_prompts
from minillm.models.quantize import Calibration, linear_bytes, num_weights, quantize_model
from minillm.quantization.base import Scheme
from minillm.quantization.schemes import make_scheme
from tests.quantization.models import divergence, log_probs, minicoder


class Bench:
    """minicoder, some evaluation text, and what the full-precision model expects there."""

    def __init__(self) -> None:
        self.model, tokenizer = minicoder()
        self.rows = [tokenizer.encode(prompt.prompt) for prompt in evaluation_prompts()[::4]]
        fitted = [tokenizer.encode(prompt.prompt) for prompt in calibration_prompts()[::2]]
        self.inputs = calibrate(self.model, fitted, "inputs", max_rows=128)
        self.gradients = calibrate(self.model, fitted[::4], "gradients")
        self.reference = log_probs(self.model, self.rows)

    def quantised(self, scheme: Scheme) -> Decoder:
        found: dict[str, Calibration] = {"inputs": self.inputs, "gradients": self.gradients}
        return quantize_model(copy.deepcopy(self.model), scheme, found.get(scheme.needs))

    def loss(self, scheme: Scheme) -> float:
        """KL to full precision in nats per token."""
        return divergence(self.reference, log_probs(self.quantised(scheme), self.rows))


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.manual_seed(0)
    return Bench()


def test_fewer_bits_cost_more(bench: Bench) -> None:
    """Whole orders of magnitude lie between them: 0.0002, 0.0009 and 0.025 nats on all evaluation prompts."""
    int8, w8a8, int4 = (bench.loss(make_scheme(method)) for method in ("int8", "w8a8", "int4"))
    assert 0 < int8 < 0.001 and int8 < w8a8 < 0.006 and w8a8 < int4 < 0.08


def test_awq_loses_less_than_plain_rounding(bench: Bench) -> None:
    """At the same groups; its input scales cost 0.05 bits per weight more."""
    assert bench.loss(make_scheme("awq")) < 0.9 * bench.loss(make_scheme("int4"))


def test_squeezellm_loses_less_than_plain_rounding_of_whole_rows(bench: Bench) -> None:
    assert bench.loss(make_scheme("squeezellm")) < 0.8 * bench.loss(make_scheme("int4", group_size=768))


def test_bits_per_weight_are_what_the_lesson_says(bench: Bench) -> None:
    found = {}
    for method in ("int8", "w8a8", "int4"):
        model = bench.quantised(make_scheme(method))
        found[method] = 8 * sum(linear_bytes(model).values()) / num_weights(model)
    assert {method: round(bits, 3) for method, bits in found.items()} == {"int8": 8.074, "w8a8": 8.074, "int4": 4.164}
