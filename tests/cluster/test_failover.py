"""The failover check: it tries again if Ray's nodes do not start, and judges what it has counted. Without Ray."""

from __future__ import annotations

import sys
from types import ModuleType
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


def test_a_check_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="requests=0"):
        FailoverSettings(requests=0)
