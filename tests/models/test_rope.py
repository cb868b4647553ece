"""Rotary embeddings: for the numbers of real checkpoints what transformers computes, and tables that stay exact."""

from __future__ import annotations

import math

import pytest
import torch

from minillm.errors import CheckpointError, UnsupportedError
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.rope import RotaryEmbedding, inverse_frequencies
from minillm.ops.rope import rope as rotate
from tests.models.hf_checkpoints import rope_options

LLAMA_32 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN_25 = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("rope", "head_dim"),
    [
        (RopeConfig(500_000.0, "llama3", LLAMA_32), 64),
        (RopeConfig(500_000.0, "llama3", {**LLAMA_32, "factor": 8.0}), 128),
        (RopeConfig(1_000_000.0, "yarn", QWEN_25), 128),
        (RopeConfig(10_000.0, "yarn", {**QWEN_25, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}), 64),
        (RopeConfig(10_000.0, "yarn", {**QWEN_25, "attention_factor": 1.0, "truncate": False, "beta_fast": 4.0}), 96),
        (RopeConfig(10_000.0, "yarn", {"factor": 0.5, "original_max_position_embeddings": 8}), 32),
        (RopeConfig(10.0, "yarn", QWEN_25), 32),
        (
            RopeConfig(10_000.0, "yarn", {"factor": 2.0, "original_max_position_embeddings": 6}),
            32,
        ),  # a ramp of no width
        (RopeConfig(10_000.0, "linear", {"factor": 4.0}), 128),
        (RopeConfig(10_000.0, "dynamic", {"factor": 4.0}), 128),
    ],
)
def test_frequencies_are_those_of_transformers(rope: RopeConfig, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = rope_options(rope.kind, rope.theta, **rope.parameters)
    theirs = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, **options)
    expected, expected_scale = ROPE_INIT_FUNCTIONS[rope.kind](theirs, torch.device("cpu"))
    frequencies, scale = inverse_frequencies(rope, head_dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0)
    assert math.isclose(scale, expected_scale, rel_tol=1e-12)


PLAIN = RopeConfig()


def config(rope: RopeConfig = PLAIN, positions: int = 4096) -> ModelConfig:
    return ModelConfig(8, 32, 8, 1, 2, 1, 16, positions, rope=rope)


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'longrope' is not supported; minillm has default, linear, dynamic"):
        RotaryEmbedding(config(RopeConfig(kind="longrope")))


def test_a_number_that_a_kind_needs_is_asked_for() -> None:
    with pytest.raises(CheckpointError, match="'linear' needs the number 'factor'"):
        RotaryEmbedding(config(RopeConfig(kind="linear")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_stay_fp32_when_the_model_is_narrowed(dtype: torch.dtype) -> None:
    """In bf16 the angle of position 4095 would be off by up to 8."""
    rope = RotaryEmbedding(config())
    before = rope.cos.clone()
    rope.to(dtype)
    assert rope.cos.dtype == rope.signed_sin.dtype == torch.float32
    assert torch.equal(rope.cos, before)


def test_tables_are_real_even_in_a_model_without_storage() -> None:
    with torch.device("meta"):
        rope = RotaryEmbedding(config())
    assert rope.to_empty(device="cpu").cos[0].tolist() == [1.0] * 16


def test_dynamic_is_plain_within_its_context_and_the_table_ends_there() -> None:
    dynamic, plain = RotaryEmbedding(config(RopeConfig(kind="dynamic"), 64)), RotaryEmbedding(config(positions=64))
    assert torch.equal(dynamic.cos, plain.cos)
    with pytest.raises(IndexError):
        dynamic(torch.tensor([64]))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    rope = RotaryEmbedding(config())
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(q_position: int, k_position: int) -> float:
        rotated = [rotate(x, *rope(torch.tensor([p]))) for x, p in ((q, q_position), (k, k_position))]
        assert torch.allclose(rotated[0].norm(), q.norm())
        return (rotated[0] * rotated[1]).sum().item()

    assert math.isclose(score(9, 4), score(2009, 2004), rel_tol=1e-3)
    assert not math.isclose(score(9, 4), score(9, 5), rel_tol=1e-2)
