"""The Serve application: where it is started, and what becomes of a lost replica. Without Ray."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from minillm.bench.processes import free_port
from minillm.cluster.gateway import ReplicaLost
from minillm.cluster.replica import HttpCall, ReplicaSettings
from minillm.errors import ConfigError, EngineDeadError, QueueOverflowError
from minillm.serve.server import listen
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


class ServeStandIn:
    """Serve, whose application has these states in turn, and then the last one for ever."""

    def __init__(self, *states: str) -> None:
        self.states, self.calls = list(states), []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.calls.append(name)

    def status(self) -> SimpleNamespace:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        waiting = SimpleNamespace(message="1 replica takes long\nto be scheduled")
        found = SimpleNamespace(status=state, message="", deployments={"Replica": waiting})
        return SimpleNamespace(applications={"minillm": found})


@pytest.fixture
def start(ray: RayStandIn, application: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeStandIn]:
    """Starts two replicas with a stand-in for Serve on machines of so many processors each."""
    ray.num_cpus = [2]
    ray.nodes = lambda: [{**head(cpus), "NodeManagerAddress": "10.0.0.1"} for cpus in ray.num_cpus]
    monkeypatch.setattr(application, "HTTPOptions", dict)
    monkeypatch.setattr(application, "build_application", lambda *given: given)

    def begin(serve: ServeStandIn, num_cpus: Sequence[float] = (2,), **how: Any) -> ServeStandIn:
        ray.num_cpus = num_cpus
        monkeypatch.setattr(application, "serve", serve)
        settings = application.ClusterSettings(ReplicaSettings("minicoder"), num_replicas=2)
        with application.serving(settings, port=how.get("port", free_port())):
            serve.calls.append("serving")
        return serve

    return begin


def head(num_cpus: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": {"CPU": num_cpus, "node:__internal_head__": 1}}


def test_two_processors_are_enough_for_two_replicas(
    start: Callable[..., ServeStandIn], application: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_wait_until_it_answers", lambda *_: None)
    serve = start(ServeStandIn("DEPLOYING", "RUNNING"))
    assert serve.calls == ["start", "RunTarget", "run_many", "serving", "shutdown"]


@pytest.mark.parametrize("num_cpus", [[1.9], [1, 0.5], [0.5] * 9])
def test_replicas_that_find_no_room_are_refused_before_serve_is_started(
    start: Callable[..., ServeStandIn], num_cpus: list[float]
) -> None:
    serve = ServeStandIn("DEPLOYING")
    room = sum(map(int, num_cpus))
    with pytest.raises(ConfigError, match=f"num_replicas=2 need 1 CPUs and 0 GPUs each, .* has room for {room}; lower"):
        start(serve, num_cpus)
    assert serve.calls == []


def test_a_port_that_is_taken_is_refused_before_serve_is_started(start: Callable[..., ServeStandIn]) -> None:
    serve = ServeStandIn("DEPLOYING")
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="cannot be listened on"):
        start(serve, port=taken.getsockname()[1])
    assert serve.calls == []


@pytest.mark.parametrize(
    ("state", "message"),
    [("DEPLOYING", r"did not start within 0\.5 s: "), ("DEPLOY_FAILED", "could not be started: ")],
)
def test_replicas_that_do_not_start_are_not_waited_for_without_end(
    start: Callable[..., ServeStandIn],
    application: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    message: str,
) -> None:
    monkeypatch.setattr(application, "START_S", 0.5)
    serve = ServeStandIn("DEPLOYING", state)
    with pytest.raises(EngineDeadError, match=f"{message}1 replica takes long to be scheduled"):
        start(serve)
    assert serve.calls[-1] == "shutdown"


class OfReplicas(BaseHTTPRequestHandler):
    """Answers as the gateway does, and logs nothing."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_own_address_is_not_asked_for_through_a_proxy(
    application: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), OfReplicas) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            application._wait_until_it_answers(f"http://127.0.0.1:{server.server_port}", time.monotonic() + 1)
        finally:
            server.shutdown()
            thread.join()


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


def test_a_gateway_whose_queue_is_full_says_so(application: ModuleType) -> None:
    full = sys.modules["ray.serve.exceptions"].BackPressureError
    answer = BrokenAnswer(full())

    def cancel() -> None:
        raise full

    answer.cancel = cancel
    handle = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda call: answer))

    async def read() -> list[object]:
        call = HttpCall("GET", "/v1/models", (), b"")
        return [piece async for piece in application.ServeReplicas(handle).send(call)]

    with pytest.raises(QueueOverflowError, match="try again later"):
        asyncio.run(read())


def test_a_replica_is_sent_as_many_requests_as_its_queue_takes(
    application: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an engine runs fewer at once than `max_num_seqs`, and nothing is ever answered 503."""
    deployed: dict[str, dict[str, Any]] = {}

    def deployment(what: object, name: str, **options: Any) -> SimpleNamespace:
        deployed[name] = options
        return SimpleNamespace(bind=lambda *_: None)

    monkeypatch.setattr(application, "serve", SimpleNamespace(deployment=deployment, ingress=lambda _: lambda: None))
    monkeypatch.setattr(application, "RequestRouterConfig", dict)
    replica = ReplicaSettings("minicoder", max_num_queued_reqs=700)
    application.build_application(application.ClusterSettings(replica, num_replicas=3), "minillm")
    assert deployed["Replica"]["max_ongoing_requests"] == 700
    assert deployed["Replica"]["max_queued_requests"] == 2100
    assert deployed["Gateway"]["max_ongoing_requests"] > 2100 + 2100
