"""How far a kernel's result may be from its reference, and how many examples are enough."""

from __future__ import annotations

from hypothesis import Phase, settings
from torch import Tensor

FP32 = 1e-5
HALF = 2e-2
"""For 16-bit results against a fp32 reference of the same inputs."""


def assert_close(found: Tensor, expected: Tensor, limit: float = FP32) -> None:
    """‖found - expected‖ ≤ limit · ‖expected‖, of one shape. NaN anywhere fails, for no comparison with it is true."""
    assert found.shape == expected.shape
    error, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    assert error <= limit * size, f"relative error {error / max(size, 1e-300):.3g} is over {limit}"


def examples(count: int) -> settings:
    """So many random examples, the same in every run. A failure is not made smaller first: that takes hundreds of runs,
    which the interpreter makes minutes of, and the examples are small as they come."""
    return settings(max_examples=count, derandomize=True, phases=(Phase.explicit, Phase.generate))
