"""Calibration sees what the layers see, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from minillm.batch import Batch, Segment
from minillm.cache.paged import PagedKVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.calibration import calibrate, keys_and_values, longest_row
from minillm.models.causal import CausalAttention
from minillm.models.decoder import Decoder
from minillm.models.quantize import decoder_linears, quantize_model
from minillm.quantization.schemes import make_scheme
from tests.quantization.models import random_decoder

ROWS = [[5, 9, 3, 7, 1], [2, 2, 8], [4, 6, 6, 6, 20, 21, 22]]
"""15 tokens in all."""


def embedded(model: Decoder) -> torch.Tensor:
    """What the first layer's qkv sees: it depends on the token alone."""
    return model.layers[0].input_norm(model.embed_tokens(torch.tensor([token for row in ROWS for token in row])))


def test_every_input_is_kept_if_there_is_room() -> None:
    model = random_decoder()
    found = calibrate(model, ROWS, "inputs")
    assert found.num_tokens == 15
    assert list(found.layers) == [name for name, _ in decoder_linears(model)]
    first = found.layers["layers.0.qkv_proj"]
    assert torch.allclose(first.inputs, embedded(model), atol=1e-6)
    assert torch.allclose(first.mean_abs, embedded(model).abs().mean(0), atol=1e-6)
    assert found.layers["layers.1.mlp.down_proj"].inputs.shape == (15, 24)


@pytest.mark.parametrize("max_rows", [1, 4, 5, 7, 14])
def test_a_sample_is_spread_evenly_over_all_texts(max_rows: int) -> None:
    model = random_decoder()
    stride = -(-15 // max_rows)
    first = calibrate(model, ROWS, "inputs", max_rows).layers["layers.0.qkv_proj"]
    assert torch.allclose(first.inputs, embedded(model)[::stride], atol=1e-6)
    assert torch.allclose(first.mean_abs, embedded(model).abs().mean(0), atol=1e-6)


def test_squared_gradients_are_those_of_each_text_by_itself() -> None:
    model = random_decoder()
    found = calibrate(model, ROWS, "gradients")
    expected = torch.zeros_like(model.layers[1].o_proj.weight)
    for row in ROWS:
        weight = model.layers[1].o_proj.weight.requires_grad_(True)
        hidden = model(torch.tensor(row), torch.arange(len(row)), CausalAttention(len(row)))
        nll = -F.log_softmax(model.logits(hidden), -1)[torch.arange(len(row) - 1), torch.tensor(row[1:])].sum()
        [gradient] = torch.autograd.grad(nll, [weight])
        weight.requires_grad_(False)
        expected += gradient.square()
    assert torch.allclose(found.layers["layers.1.o_proj"].squared_gradients, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("needs", ["inputs", "gradients"])
def test_the_model_is_left_as_it_was(needs: str) -> None:
    model, untouched = random_decoder(), random_decoder()
    calibrate(model, ROWS, needs)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert not any(linear._forward_pre_hooks for _, linear in decoder_linears(model))


def test_an_interrupt_leaves_no_hook_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_decoder()

    def stop(self: Decoder, *args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "logits", stop)
    for needs in ("inputs", "gradients"):
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, ROWS, needs)
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(linear._forward_pre_hooks for _, linear in decoder_linears(model))


def test_rows_over_the_context_are_cut() -> None:
    assert calibrate(random_decoder(), [[1] * 100], "inputs").num_tokens == 32


def test_rows_over_a_sliding_window_are_cut() -> None:
    """Calibration computes full attention, which agrees with the model's up to its window."""
    model = random_decoder(sliding_window=9, sliding_layers=(True, False))
    assert calibrate(model, [[1] * 20], "inputs").num_tokens == 9


def test_up_to_the_longest_row_keys_are_those_that_the_model_stores() -> None:
    """The token behind it attends to one that the window hides."""
    model, row = random_decoder(sliding_window=9, sliding_layers=(True, False)), list(range(2, 12))
    cache = PagedKVCache(model.config, 1, 16, torch.float32, torch.device("cpu"))
    batch = Batch.from_segments([Segment(row, 0, [0])], 16, torch.device("cpu"))
    model(batch.token_ids, batch.positions, cache, batch)
    found, stored = keys_and_values(model, [row])[1][0], cache.stored_rows().keys[0][1, :10]
    assert longest_row(model.config) == 9
    torch.testing.assert_close(found[:9], stored[:9], rtol=1e-4, atol=1e-5)
    assert (found[9] - stored[9]).abs().max() > 1e-3


def test_bad_calls_name_themselves() -> None:
    model = random_decoder()
    with pytest.raises(ConfigError, match="at least 2 tokens, and uses up to 1 of a row"):
        calibrate(random_decoder(sliding_window=1), ROWS, "gradients")
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        calibrate(model, [[3]], "gradients")
    with pytest.raises(ConfigError, match="at least 1 tokens"):
        calibrate(model, [], "inputs")
    with pytest.raises(ConfigError, match="needs='magic'"):
        calibrate(model, ROWS, "magic")
    with pytest.raises(ConfigError, match="needs calibration that collects gradients"):
        quantize_model(model, make_scheme("squeezellm"), calibrate(model, ROWS, "inputs"))
    with pytest.raises(UnsupportedError, match="quantised already"):
        calibrate(quantize_model(model, make_scheme("int8")), ROWS, "inputs")
