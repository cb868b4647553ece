"""The failover check: it tries again if Ray's nodes do not start, and judges what it has counted. Without Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minillm.cluster import failover
from minillm.cluster.failover import START_TRIES, FailoverSettings, passed
from minillm.errors import ConfigError, EngineDeadError


def nodes(fails: int) -> tuple[type, list[str]]:
    """A stand-in for Ray's class whose first `fails` nodes do not start."""
    log: list[str] = []

    class Cluster:
        def add_node(self, **options: Any) -> None:
            log.append("node")
            if log.count("node") <= fails:
                raise Exception("timed out during startup")

        def shutdown(self) -> None:
            log.append("shutdown")

    return Cluster, log


@pytest.mark.parametrize(("fails", "log"), [(0, "node node"), (2, "node shutdown node shutdown node node")])
def test_nodes_that_do_not_start_are_tried_again(fails: int, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, seen = nodes(fails)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", ModuleType("ray.cluster_utils"))
    sys.modules["ray.cluster_utils"].Cluster = cluster
    assert isinstance(failover._started(2), cluster)
    assert " ".join(seen) == log


def test_nodes_that_never_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, seen = nodes(99)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", ModuleType("ray.cluster_utils"))
    sys.modules["ray.cluster_utils"].Cluster = cluster
    with pytest.raises(EngineDeadError, match="timed out during startup"):
        failover._started(2)
    assert seen.count("shutdown") == START_TRIES


@pytest.mark.parametrize("wrong", [{}, {"answered_once": 499}, {"status_200": 499}, {"same_tokens": 499}])
def test_one_request_that_is_lost_or_wrong_fails_the_check(wrong: dict[str, int]) -> None:
    good = {"requests": 500, "answered_once": 500, "status_200": 500, "same_tokens": 500}
    assert passed({"rows": [good, good | wrong]}) is (wrong == {})


@pytest.mark.parametrize("status", [None, 500])
def test_a_request_without_an_answer_is_counted(status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of four: its connection is closed, or its answer is an error in plain text."""
    aiohttp = ModuleType("aiohttp")
    aiohttp.ClientError = type("ClientError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "aiohttp", aiohttp)
    asked: list[Any] = []

    async def completion() -> dict[str, Any]:
        usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        return {"usage": usage, "choices": [{"token_ids": [7]}]}

    async def no_json() -> None:
        raise aiohttp.ClientError("plain text")

    @asynccontextmanager
    async def post(url: str, json: Any) -> AsyncIterator[SimpleNamespace]:
        asked.append(json)
        good = len(asked) != 3
        if not good and status is None:
            raise aiohttp.ClientError("the server has closed the connection")
        yield SimpleNamespace(status=200 if good else status, headers={}, json=completion if good else no_json)

    client = failover._Client("http://cluster", FailoverSettings())

    async def ask_all() -> None:
        for number in range(4):
            await client._ask(SimpleNamespace(post=post), number, [5])

    asyncio.run(ask_all())
    counts = failover._counts(client, [[7]] * 4)
    assert (counts["answered_once"], counts["status_200"], counts["same_tokens"]) == (3 if status is None else 4, 3, 3)
    assert client._in_flight == 0 and not passed({"rows": [counts]})


def test_without_the_answer_of_a_replica_none_is_killed_and_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own errors name no replica."""

    @asynccontextmanager
    async def post(url: str, json: Any) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(status=503, headers={})

    @asynccontextmanager
    async def session(**options: Any) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(post=post)

    aiohttp = ModuleType("aiohttp")
    aiohttp.ClientError, aiohttp.ClientSession = type("ClientError", (Exception,), {}), session
    aiohttp.ClientTimeout = aiohttp.TCPConnector = SimpleNamespace
    monkeypatch.setitem(sys.modules, "aiohttp", aiohttp)
    monkeypatch.setattr(failover, "process_of", lambda replica: pytest.fail(f"replica {replica!r} was killed"))
    client = failover._Client("http://cluster", FailoverSettings())
    asyncio.run(client.run([[5]] * 6))
    counts = failover._counts(client, [[7]] * 6)
    assert (counts["answered_once"], counts["killed"], counts["requests_per_replica"]) == (6, "", {})
    assert not passed({"rows": [counts]})


def test_a_check_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="requests=0"):
        FailoverSettings(requests=0)
