"""What needs Ray is collected where Ray is installed: `make test-ray` makes such an environment."""

from __future__ import annotations

import importlib.util

import pytest

from tests.cluster import ray_stand_in

collect_ignore = [] if importlib.util.find_spec("ray") else ["on_ray"]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ray_stand_in.RayStandIn:
    """A stand-in for Ray, for this test."""
    return ray_stand_in.install(monkeypatch)
