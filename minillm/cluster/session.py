"""This program's connection to a Ray cluster: one that runs already, or one that is started on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from minillm.errors import ConfigError
from minillm.extras import need

NEEDED = ("ray", "aiohttp", "fastapi", "prometheus_client", "uvicorn")
"""Ray, and what `ray[serve]` brings."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as Ray will do in future, which it announces at every start
    "RAY_prestart_worker_first_driver": "0",  # workers are started for replicas, not one per processor beforehand
    "RAY_worker_niceness": "0",  # Ray's 15 leaves replicas next to nothing on a machine that does other work
    # A busy machine takes longer than Ray and Serve wait for their own processes.
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
"""What Ray's processes get from the one that starts them, unless it is set already."""


def check_ray() -> None:
    """Raise `UnsupportedError` if the extra `ray` is not installed."""
    need("ray", *NEEDED)


def lost_errors() -> tuple[type[Exception], ...]:
    """What Ray raises for a call whose process is lost: it has ended, its result is gone with its machine, or Ray's
    memory monitor has ended it."""
    from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError

    return RayActorError, ObjectLostError, OutOfMemoryError


def set_environment() -> None:
    """Set `ENVIRONMENT`; before Ray is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def ray_session(address: str | None = None, num_cpus: int | None = None) -> Iterator[None]:
    """Connect to the cluster at `address` (`auto`: the one that this machine belongs to), or start one here.

    A cluster that was started here ends with the block. `num_cpus`: what it may use; None: all. If this program is
    connected already, its cluster is used. Raises `ConfigError` if there is no cluster at `address` or it asks for
    another token, `UnsupportedError` without Ray.
    """
    check_ray()
    set_environment()
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield
        return
    own = {"num_cpus": num_cpus, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address or "local", namespace="minillm", log_to_driver=False, logging_level="warning", **own)
    except (ConnectionError, ValueError, RuntimeError, RayError) as problem:  # the last: a token is missing or wrong
        reason = " ".join(str(problem).split())[:200]
        if address is None:
            raise ConfigError(f"Ray does not start on this machine: {reason}; name a cluster with --address") from None
        if "authentic" in str(problem):
            raise ConfigError(
                f"the Ray cluster at {address} asks for its token: {reason}; set RAY_AUTH_MODE=token, and copy "
                "~/.ray/auth_token from its head"
            ) from None
        where = f"there is no Ray cluster at {address}: {reason}"
        raise ConfigError(f"{where}; start one with `ray start --head`, or leave the address out") from None
    try:
        yield
    finally:
        ray.shutdown()
