"""Keys moved to other positions, against keys computed there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.rope import RotaryEmbedding, inverse_frequencies
from minillm.ops.rerotation import rerotate
from minillm.ops.rope import rope
from minillm.reuse.kv_span import KVSpan

CONFIG = ModelConfig(96, 64, 96, 3, 4, 2, 16, 4096)
ROPES = {
    "plain": RopeConfig(),
    "linear": RopeConfig(kind="linear", parameters={"factor": 4.0}),
    "yarn": RopeConfig(kind="yarn", parameters={"factor": 4.0, "original_max_position_embeddings": 1024}),
}


def rotated(config: ModelConfig, k: Tensor, positions: Tensor) -> Tensor:
    return rope(k, *RotaryEmbedding(config)(positions))


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("delta", [1, -7, 1000, -1000])
def test_a_moved_key_is_the_key_of_its_new_position(kind: str, delta: int) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, rope=ROPES[kind])
    k, positions = torch.randn(5, 2, 16), torch.arange(1000, 1005)
    frequencies, _ = inverse_frequencies(config.rope, 16)
    moved = rerotate(rotated(config, k, positions), frequencies, delta)
    torch.testing.assert_close(moved, rotated(config, k, positions + delta), rtol=0, atol=2e-3)
    wrong_way = rerotate(rotated(config, k, positions), frequencies, -delta)
    assert (wrong_way - rotated(config, k, positions + delta)).abs().max() > 0.1


def test_it_is_the_product_of_complex_numbers() -> None:
    """The definition: channels i and i + d / 2 are a complex number, multiplied by e^(iδf)."""
    torch.manual_seed(0)
    keys, frequencies = torch.randn(3, 4, 2, 8, dtype=torch.float64), torch.rand(4)
    delta = torch.tensor([5, -3, 0, 77])
    pairs = torch.complex(keys[..., :4], keys[..., 4:])
    turned = pairs * torch.polar(torch.ones(4, 1, 4).double(), delta[:, None, None] * frequencies.double())
    expected = torch.cat((turned.real, turned.imag), -1).float()
    torch.testing.assert_close(rerotate(keys.float(), frequencies, delta), expected, rtol=1e-5, atol=1e-5)


def test_moving_there_and_back_changes_nothing_to_speak_of() -> None:
    torch.manual_seed(0)
    frequencies, _ = inverse_frequencies(CONFIG.rope, 16)
    keys = torch.randn(6, 2, 16)
    torch.testing.assert_close(rerotate(rerotate(keys, frequencies, 321), frequencies, -321), keys)


def test_layers_without_rope_keep_their_keys() -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, rope_layers=(True, False, True))
    keys = torch.randn(3, 4, 2, 16)
    moved = KVSpan([1, 2, 3, 4], 0, keys, keys).moved_to(9, config)
    for layer in range(3):
        assert torch.equal(moved.keys[layer], keys[layer]) == (not config.rotates(layer))
    assert moved.start == 9 and moved.end == 13 and moved.values is keys


def test_a_part_of_a_span_is_at_its_own_positions() -> None:
    keys = torch.arange(4.0).view(1, 4, 1, 1).expand(2, 4, 1, 2)
    part = KVSpan([5, 6, 7, 8], 10, keys, -keys).between(11, 13)
    assert (part.token_ids, part.start, part.end) == ([6, 7], 11, 13)
    assert part.keys[0, :, 0, 0].tolist() == [1, 2] and part.values[1, :, 0, 1].tolist() == [-1, -2]
