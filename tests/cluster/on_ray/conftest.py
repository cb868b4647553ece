"""One cluster of two nodes for all tests, in processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minillm.cluster.failover import two_nodes


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    with two_nodes(cpus_per_node=3):
        yield
