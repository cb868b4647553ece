"""The error allowed between a kernel's result and its reference, and the settings for random examples."""

from __future__ import annotations

from hypothesis import Phase, settings
from torch import Tensor

FP32 = 1e-5
HALF = 2e-2
"""The relative error allowed between 16-bit results and an fp32 reference of the same inputs."""


def assert_close(found: Tensor, expected: Tensor, limit: float = FP32) -> None:
    """Assert equal shapes and ‖found - expected‖ ≤ limit · ‖expected‖. NaN fails: no comparison with it is true."""
    assert found.shape == expected.shape
    error, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    assert error <= limit * size, f"relative error {error / max(size, 1e-300):.3g} is over {limit}"


def examples(count: int) -> settings:
    """Run this many random examples, the same in every run, without shrinking failures. Shrinking takes hundreds of
    runs, which are minutes in the interpreter, and the examples are small already."""
    return settings(max_examples=count, derandomize=True, phases=(Phase.explicit, Phase.generate))
