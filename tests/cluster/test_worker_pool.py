"""Workers where there is room for one: they take turns, and a lost one's task is done again. Without Ray."""

from __future__ import annotations

import sys

import pytest

from minillm.cluster.worker_pool import MAX_LOSSES, TasksGivenUpError, WorkerPool, room
from minillm.errors import ConfigError, EngineDeadError
from tests.cluster.ray_stand_in import RayStandIn


class Squares:
    def run(self, number: int) -> int:
        return number * number


def test_more_workers_than_there_is_room_for_take_turns(ray: RayStandIn) -> None:
    """The second one has its task from the start, and no processor before the first one has ended."""
    assert dict(WorkerPool(2).map(Squares, range(4))) == {0: 0, 1: 1, 2: 4, 3: 9}


@pytest.mark.parametrize("loss", ["RayActorError", "ObjectLostError", "OutOfMemoryError"])
def test_the_task_of_a_lost_worker_is_done_by_another(ray: RayStandIn, loss: str) -> None:
    ray.losses = [getattr(sys.modules["ray.exceptions"], loss)()]
    pool = WorkerPool(1)
    with pytest.warns(RuntimeWarning, match="workers lost: 1; others have done their tasks again"):
        assert dict(pool.map(Squares, range(3))) == {0: 0, 1: 1, 2: 4}
    assert (pool.num_lost, len(ray.actors)) == (1, 1)


def test_a_task_that_loses_every_worker_is_given_up(ray: RayStandIn) -> None:
    ray.losses = [sys.modules["ray.exceptions"].RayActorError() for _ in range(MAX_LOSSES)]
    with pytest.raises(TasksGivenUpError, match="1 of 1 tasks lost 3 workers") as raised:
        list(WorkerPool(1).map(Squares, range(1)))
    assert raised.value.numbers == [0]


def test_workers_that_end_before_any_task_is_done_are_not_built_for_every_task(ray: RayStandIn) -> None:
    kind = sys.modules["ray.exceptions"].RayActorError
    ray.losses = [kind("killed, for lack of memory") for _ in range(100)]
    pool = WorkerPool(1)
    with pytest.raises(EngineDeadError, match="9 workers have ended and no task is done; the last one: killed, for l"):
        list(pool.map(Squares, range(30)))
    assert (pool.num_lost, len(ray.losses)) == (MAX_LOSSES**2, 100 - MAX_LOSSES**2)


def test_a_pool_whose_last_machine_is_gone_does_not_wait_for_ever(ray: RayStandIn) -> None:
    ray.losses = [sys.modules["ray.exceptions"].RayActorError()]
    nodes = ray.nodes
    ray.nodes = lambda: nodes() if ray.losses else []
    with pytest.raises(EngineDeadError, match="needs 1 CPUs and 0 GPUs, and no machine that has both is left"):
        list(WorkerPool(1).map(Squares, range(2)))


@pytest.mark.parametrize(
    ("machines", "cpus", "gpus", "expected"),
    [
        ([{"CPU": 4}, {"CPU": 1, "GPU": 1}], 2, 1, 0),  # neither has both
        ([{"CPU": 4}, {"CPU": 1, "GPU": 1}], 1, 1, 1),
        ([{"CPU": 4}, {"CPU": 3}], 2, 0, 3),
        ([{"CPU": 1}], 0.1, 0, 10),
        ([{"CPU": 9, "GPU": 2}], 1, 0.6, 2),  # one in each, and none of what is left of both
        ([{"CPU": 9, "GPU": 3}], 0, 2, 1),
        ([{}], 0, 0, float("inf")),
        ([], 0, 0, 0),
    ],
)
def test_workers_fit_on_single_machines(
    ray: RayStandIn, machines: list[dict[str, float]], cpus: float, gpus: float, expected: float
) -> None:
    dead = {"Alive": False, "Resources": {"CPU": 99, "GPU": 99}}
    ray.nodes = lambda: [dead, *({"Alive": True, "Resources": each} for each in machines)]
    assert room(cpus, gpus) == expected
    if not expected:
        with pytest.raises(ConfigError, match=rf"{cpus:g} CPUs and {gpus:g} GPUs, and no machine .* has both"):
            list(WorkerPool(1, cpus, gpus).map(Squares, range(2)))


def test_without_tasks_no_cluster_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.cluster.worker_pool.ray_session", lambda address: pytest.fail("it connected"))
    assert list(WorkerPool(1).map(Squares, [])) == []


@pytest.mark.parametrize("options", [{"num_cpus": -1}, {"num_cpus": float("nan")}, {"num_gpus": 1.5}])
def test_amounts_that_no_machine_gives_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        WorkerPool(1, **options)
    WorkerPool(1, num_cpus=0.5, num_gpus=2)
