"""The Serve application: gateways and replicas, started and stopped."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from minillm.bench.processes import open_own
from minillm.cluster.gateway import Answer, ReplicaLost, build_gateway
from minillm.cluster.prefix_of_request import PrefixReader
from minillm.cluster.prefix_router import PrefixRouter
from minillm.cluster.prefix_table import MAX_IMBALANCE, PrefixTable
from minillm.cluster.replica import HttpCall, Replica, ReplicaSettings
from minillm.cluster.session import lost_errors
from minillm.cluster.worker_pool import check_resources, room
from minillm.config import at_least
from minillm.engine.assembly import DEFAULT_BLOCK_SIZE
from minillm.errors import ConfigError, EngineDeadError, QueueOverflowError
from minillm.serve.server import listen, url_of

ROUTERS = ("prefix", "power_of_two")
"""`power_of_two` is Serve's own: the less loaded of two random replicas."""
HEALTH_CHECK_S = 2
START_S = 900
"""For replicas to start, which may download the model first, and for the address to answer."""
CONTROLLER = "SERVE_CONTROLLER_ACTOR"
"""The actor that a cluster has while it runs Serve."""
HEAD = "node:__internal_head__"
"""The resource that only the head node has."""
QUIET = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True)
class ClusterSettings:
    """How many replicas of what, and how requests find them."""

    replica: ReplicaSettings
    num_replicas: int = 2
    num_gateways: int = 1
    cpus_per_replica: float = 1
    gpus_per_replica: float = 0
    router: str = "prefix"
    max_imbalance: int = MAX_IMBALANCE
    api_keys: tuple[str, ...] = ()
    router_limits: dict[str, Any] = field(default_factory=dict)
    """Other limits of `PrefixTable`."""

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ConfigError(f"router={self.router!r} must be one of {', '.join(ROUTERS)}")
        for name in ("num_replicas", "num_gateways"):
            at_least(name, getattr(self, name), 1)
        check_resources("cpus_per_replica", self.cpus_per_replica)
        check_resources("gpus_per_replica", self.gpus_per_replica, whole_above_one=True)
        PrefixTable(max_imbalance=self.max_imbalance, **self.router_limits)
        self.replica.server_settings(self.api_keys)

    @property
    def max_num_queued_reqs(self) -> int:
        """Requests that all replicas take together. As many more wait in each gateway, so that no burst of requests is
        refused that the replicas have room for."""
        return self.replica.max_num_queued_reqs * self.num_replicas

    @property
    def block_size(self) -> int:
        """Tokens per block of the replicas' caches."""
        return int(self.replica.engine.get("block_size") or DEFAULT_BLOCK_SIZE)


class ServeReplicas:
    """The replicas as the gateway reaches them: through Serve's handle and its router."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.handle = handle.options(method_name="handle", stream=True)

    async def send(self, call: HttpCall) -> Answer:
        """See `minillm.cluster.gateway.Replicas`."""
        response = self.handle.remote(call)
        try:
            async for piece in response:
                yield piece
        except lost_errors() as problem:
            raise ReplicaLost(type(problem).__name__) from problem
        except BackPressureError:
            raise QueueOverflowError("all replicas are full, and so is the gateway's queue; try again later") from None
        finally:
            with suppress(BackPressureError):  # raised again by a response that was refused
                response.cancel()


def build_application(settings: ClusterSettings, name: str) -> serve.Application:
    """The deployments of gateway and replicas, bound to each other."""
    routing = RequestRouterConfig()
    if settings.router == "prefix":
        limits = {"max_imbalance": settings.max_imbalance, **settings.router_limits}
        routing = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs=limits)
    replica = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=settings.num_replicas,
        max_ongoing_requests=settings.replica.max_num_queued_reqs,
        max_queued_requests=settings.max_num_queued_reqs,
        ray_actor_options={"num_cpus": settings.cpus_per_replica, "num_gpus": settings.gpus_per_replica},
        health_check_period_s=HEALTH_CHECK_S,
        logging_config=QUIET,
        request_router_config=routing,
    ).bind(settings.replica)
    gateway = serve.deployment(
        serve.ingress(_gateway_builder(settings, name))(),
        name="Gateway",
        num_replicas=settings.num_gateways,
        max_ongoing_requests=3 * settings.max_num_queued_reqs,  # those that replicas have, that wait, that are refused
        ray_actor_options={"num_cpus": 0},  # it waits most of the time; two replicas fit on two processors
        logging_config=QUIET,
    )
    return gateway.bind(replica)


def _gateway_builder(settings: ClusterSettings, name: str) -> Callable[[], FastAPI]:
    def build() -> FastAPI:
        handle = serve.get_deployment_handle("Replica", app_name=name)
        model, block_size, template = settings.replica.model, settings.block_size, settings.replica.chat_template
        reader = PrefixReader(model, block_size, template) if settings.router == "prefix" else None
        return build_gateway(ServeReplicas(handle), settings.replica, reader, settings.api_keys)

    return build


@contextmanager
def serving(
    settings: ClusterSettings, host: str = "127.0.0.1", port: int = 8000, name: str = "minillm"
) -> Iterator[str]:
    """Start gateways and replicas in the connected cluster; yields the address once it answers.

    At the end Serve is stopped. Raises `ConfigError` if this is not the cluster's head node, if the cluster runs Serve
    already or has too few processors or GPUs, or if the port is taken, `EngineDeadError` if the replicas do not start
    within `START_S`.
    """
    _check_is_head()
    if _runs_serve():
        raise ConfigError("this Ray cluster runs Serve already; stop it with `serve shutdown`, or use another cluster")
    _check_room(settings)
    listen(host, port).close()
    http = HTTPOptions(host=host, port=port)
    try:
        # On a busy machine the process that listens takes longer than Serve waits for it; it is waited for below.
        with suppress(TimeoutError):
            serve.start("HeadOnly", http_options=http, logging_config=QUIET)
        target = serve.RunTarget(build_application(settings, name), name=name, route_prefix="/")
        with suppress(TimeoutError):  # for the same reason
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        deadline, url = time.monotonic() + START_S, url_of(host, port)
        _wait_until_it_runs(name, deadline)
        _wait_until_it_answers(f"{url}/v1/models", deadline)
        yield url
    finally:
        serve.shutdown()


def _check_is_head() -> None:
    """Raise `ConfigError` on any other machine: Serve listens on the head node."""
    here = ray.util.get_node_ip_address()
    heads = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
    if heads and here not in heads:
        raise ConfigError(
            f"the cluster's HTTP address would be on its head node, {heads[0]}, and this is {here}; run this on the "
            "head node"
        )


def _runs_serve() -> bool:
    try:
        ray.get_actor(CONTROLLER, namespace="serve")
    except ValueError:  # there is no such actor
        return False
    return True


def _check_room(settings: ClusterSettings) -> None:
    """Raise `ConfigError` if the replicas never fit: Serve would wait for more machines."""
    number, cpus, gpus = settings.num_replicas, settings.cpus_per_replica, settings.gpus_per_replica
    if (there := room(cpus, gpus)) < number:
        raise ConfigError(
            f"num_replicas={number} need {cpus:g} CPUs and {gpus:g} GPUs each, and the cluster has room for {there:g}; "
            "lower num_replicas, or what each of them gets"
        )


def _wait_until_it_runs(name: str, deadline: float) -> None:
    """Wait for the replicas, as `serve.run` does, which never gives up. Raises `EngineDeadError`."""
    while (found := serve.status().applications[name]).status != "RUNNING":
        said = [found.message, *(each.message for each in found.deployments.values())]
        reason = " ".join(" ".join(said).split())
        if found.status == "DEPLOY_FAILED":
            raise EngineDeadError(f"the replicas could not be started: {reason}")
        if time.monotonic() > deadline:
            raise EngineDeadError(f"the replicas did not start within {START_S} s: {reason}")
        time.sleep(0.2)


def _wait_until_it_answers(url: str, deadline: float) -> None:
    """Wait for any answer of the gateway. Raises `EngineDeadError` after the deadline."""
    while True:
        try:
            with open_own(url, timeout=10):
                return
        except urllib.error.HTTPError as answer:
            if answer.code != HTTPStatus.NOT_FOUND:  # a proxy that does not know the gateway yet
                return
            problem: Exception = answer
        except OSError as no_answer:
            problem = no_answer
        if time.monotonic() > deadline:
            raise EngineDeadError(f"{url} did not answer within {START_S} s: {problem}")
        time.sleep(0.2)
