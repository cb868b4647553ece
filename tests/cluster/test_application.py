"""The Serve application: where it is started, and what becomes of a lost replica. Without Ray."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from minillm.cluster.gateway import ReplicaLost
from minillm.cluster.replica import HttpCall, ReplicaSettings
from minillm.errors import ConfigError
from tests.cluster.ray_stand_in import RayStandIn


@pytest.fixture
def application(ray: RayStandIn) -> ModuleType:
    return importlib.import_module("minillm.cluster.application")


def test_serve_is_started_on_the_head_node_only(ray: RayStandIn, application: ModuleType) -> None:
    application._check_is_head()
    ray.util.get_node_ip_address = lambda: "10.0.0.2"
    settings = application.ClusterSettings(ReplicaSettings("minicoder"))
    with pytest.raises(ConfigError, match=r"head node, 10\.0\.0\.1, and this is 10\.0\.0\.2"):
        application.serving(settings).__enter__()


class BrokenAnswer:
    """Of a replica that is lost after the first piece."""

    def __init__(self, problem: Exception) -> None:
        self.problem, self.cancelled = problem, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"a piece"
        raise self.problem

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("loss", ["RayActorError", "ObjectLostError", "OutOfMemoryError"])
def test_the_gateway_learns_that_a_replica_is_lost(application: ModuleType, loss: str) -> None:
    answer = BrokenAnswer(getattr(sys.modules["ray.exceptions"], loss)())
    handle = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda call: answer))

    async def read() -> list[object]:
        call = HttpCall("GET", "/v1/models", (), b"")
        return [piece async for piece in application.ServeReplicas(handle).send(call)]

    with pytest.raises(ReplicaLost, match=loss):
        asyncio.run(read())
    assert answer.cancelled
