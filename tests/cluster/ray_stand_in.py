"""A stand-in for Ray: actors in this process, of which one runs at a time, and the names that `application` imports."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minillm.cluster.worker_pool import CLOSE_S

NAMES = {
    "ray.exceptions": ("ObjectLostError", "OutOfMemoryError", "RayActorError", "RayError", "RayTaskError"),
    "ray.serve": (),
    "ray.serve.exceptions": ("BackPressureError",),
    "ray.serve.config": ("HTTPOptions", "RequestRouterConfig"),
    "ray.serve.handle": ("DeploymentHandle",),
    "ray.serve.request_router": ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"),
}
IMPORT_RAY = ("minillm.cluster.application", "minillm.cluster.prefix_router")
"""Modules that import Ray when they are imported. A test imports them anew."""


class Handle:
    """Of an actor, which has its processor as long as this exists."""

    def __init__(self, worker: Any) -> None:
        own = weakref.ref(self)
        self.run = SimpleNamespace(remote=lambda task: Ref(own, lambda: worker.run(task)))
        self.close = SimpleNamespace(remote=lambda: Ref(own, worker.close))


@dataclass(frozen=True, eq=False)
class Ref:
    """The result of a call to come."""

    owner: weakref.ref[Handle]
    call: Callable[[], Any]


class RayStandIn(ModuleType):
    """Ray on one node, the head, with room for one actor: the oldest one runs, the others wait."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: list[weakref.ref[Handle]] = []
        self.losses: list[Exception] = []
        """Of the next results: an actor is lost, and this is raised."""
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 1, "node:__internal_head__": 1}
        return [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": resources}]

    def get_actor(self, name: str, namespace: str) -> Handle:
        raise ValueError(name)

    def remote(self, **options: Any) -> Callable[[type], SimpleNamespace]:
        return lambda kind: SimpleNamespace(remote=lambda make: self._start(kind(make)))

    def _start(self, worker: Any) -> Handle:
        handle = Handle(worker)
        self.actors.append(weakref.ref(handle))
        return handle

    def wait(self, refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list]:
        handles = [handle for own in self.actors if (handle := own()) is not None]
        runs = handles[0] if handles and self.nodes() else None
        ready = [ref for ref in refs if runs is not None and ref.owner() is runs]
        if not ready and timeout is None:
            pytest.fail("it would wait for ever")
        if not ready and runs is not None and timeout != CLOSE_S:
            pytest.fail("it would wait for ever: the actor that has the processor is idle")
        return ready[:num_returns], []

    def get(self, ref: Ref) -> Any:
        if self.losses:
            self.actors.remove(ref.owner)
            raise self.losses.pop()
        return ref.call()

    def kill(self, actor: Handle) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> RayStandIn:
    """Put it in the place of Ray, to which pools are connected."""
    made = RayStandIn()
    monkeypatch.setitem(sys.modules, "ray", made)
    for name, attributes in NAMES.items():
        module = ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (Exception,), {}))
        monkeypatch.setitem(sys.modules, name, module)
    for name in IMPORT_RAY:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that a new one is taken away after the test
        del sys.modules[name]
    monkeypatch.setattr("minillm.cluster.worker_pool.ray_session", lambda address: nullcontext())
    return made
