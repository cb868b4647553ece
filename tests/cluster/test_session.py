"""Connecting to a cluster that is not there, or that refuses. Without Ray."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from minillm.cluster import session
from minillm.errors import ConfigError
from tests.cluster.ray_stand_in import RayStandIn

NO_TOKEN = "Token authentication is enabled but no authentication token was found."


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("AuthenticationError", NO_TOKEN, "the Ray cluster at auto asks for its token: .* set RAY_AUTH_MODE=token"),
        ("ConnectionError", "no answer", "there is no Ray cluster at auto: no answer; start one"),
    ],
)
def test_the_reason_why_there_is_no_connection_is_told(
    ray: RayStandIn, monkeypatch: pytest.MonkeyPatch, kind: str, text: str, message: str
) -> None:
    classes = {"AuthenticationError": type(kind, (sys.modules["ray.exceptions"].RayError,), {})}

    def init(**_: Any) -> None:
        raise classes.get(kind, ConnectionError)(text)

    monkeypatch.setattr(session, "check_ray", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False, raising=False)
    monkeypatch.setattr(ray, "init", init, raising=False)
    with pytest.raises(ConfigError, match=message), session.ray_session("auto"):
        pytest.fail("it is connected")
