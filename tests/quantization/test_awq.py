"""AWQ: exact before rounding, never worse than plain rounding on its sample, better on text it has not seen."""

from __future__ import annotations

import pytest
import torch

from minillm.quantization.awq import AWQ, EXPONENTS, channel_scales
from minillm.quantization.base import LayerStatistics, QuantizedLinear
from minillm.quantization.schemes import make_scheme
from tests.quantization.models import statistics


def weight(rows: int = 32, columns: int = 72) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02


def output_error(scheme: AWQ, tensors: dict[str, torch.Tensor], found: LayerStatistics) -> float:
    """Written out again, in fp64: what the sample's outputs lose."""
    difference = (scheme.dequantize(tensors, 72) - weight()).double()
    return (found.inputs.double() @ difference.T).square().sum().item()


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("group_size", [8, 64, 128])
def test_never_worse_than_plain_rounding_on_its_sample(bits: int, group_size: int) -> None:
    assert EXPONENTS[0] == 0
    scheme = AWQ(bits=bits, group_size=group_size)
    plain = scheme.scaled(weight(), torch.ones(72))
    for seen in (statistics(weight()), LayerStatistics(torch.randn(64, 72), torch.ones(72))):
        found = output_error(scheme, scheme.quantize(weight(), seen), seen)
        assert found <= output_error(scheme, plain, seen) * (1 + 1e-6)


def test_channels_with_large_activations_lose_less() -> None:
    """Where a few channels are forty times as active, scaling must pay: their weights are rounded finer."""
    seen = statistics(weight())
    scheme = AWQ(group_size=24)
    plain, found = scheme.scaled(weight(), torch.ones(72)), scheme.quantize(weight(), seen)
    assert output_error(scheme, found, seen) < 0.5 * output_error(scheme, plain, seen)
    assert found["input_scales"][::16].max() < 0.5 * found["input_scales"][1::16].min()


def test_scaling_alone_changes_nothing_but_the_rounding() -> None:
    """At 4 bits each weight is within half a step of its scaled group, so undoing the scale must bring W back."""
    scheme, seen = AWQ(group_size=8), statistics(weight())
    tensors = scheme.scaled(weight(), channel_scales(seen.mean_abs, 0.5))
    half_step = tensors["scales"].float().repeat_interleave(8, dim=1) / 2 * tensors["input_scales"]
    assert ((scheme.dequantize(tensors, 72) - weight()).abs() <= half_step * (1 + 2e-5)).all()


def test_the_layer_multiplies_its_input_by_the_stored_scales() -> None:
    scheme, seen = AWQ(group_size=8), statistics(weight())
    layer = QuantizedLinear(scheme, 72, 32)
    layer.fill(scheme.quantize(weight(), seen))
    plain = QuantizedLinear(make_scheme("int4", group_size=8), 72, 32)
    plain.fill({name: layer.tensors[name] for name in plain.tensors})
    x = torch.randn(5, 72, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(layer(x), plain(x * layer.input_scales), rtol=1e-4, atol=1e-4)


def test_scales_lie_around_one_and_survive_dead_channels() -> None:
    mean_abs = torch.rand(64, generator=torch.Generator().manual_seed(0))
    mean_abs[5] = 0
    for exponent in EXPONENTS:
        scales = channel_scales(mean_abs, exponent)
        assert torch.isfinite(scales).all() and (scales > 0).all()
        assert torch.isclose(scales.max() * scales.min(), torch.tensor(1.0), rtol=1e-4)
    assert torch.equal(channel_scales(mean_abs, 0.0), torch.ones(64))


def test_clipping_pays_where_one_weight_is_far_from_the_rest() -> None:
    """Ranges are narrowed per group, and only those that gain by it."""
    lonely = weight()
    lonely[:, 3] = 0.3
    inputs = torch.randn(64, 72, generator=torch.Generator().manual_seed(1))
    inputs[:, 3] *= 1e-3
    scheme = AWQ(group_size=24)
    found = scheme.clipped(lonely, torch.ones(72), inputs)
    whole = scheme.scaled(lonely, torch.ones(72))
    assert scheme.output_error(lonely, found, inputs) < 0.5 * scheme.output_error(lonely, whole, inputs)
    assert (found["scales"][:, 0] < 0.9 * whole["scales"][:, 0]).all()
    assert (found["scales"] <= whole["scales"]).all()


def test_magnitudes_that_are_not_given_come_from_the_inputs() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(8, 32), torch.randn(40, 32) * torch.arange(1, 33)
    scheme = make_scheme("awq", group_size=16)
    given = scheme.quantize(weight, LayerStatistics(inputs, inputs.abs().mean(0)))
    found = scheme.quantize(weight, LayerStatistics(inputs))
    assert all(torch.equal(found[name], given[name]) for name in given)
