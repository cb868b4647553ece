"""A pool for tests that need no cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minillm.cluster.worker_pool import Result, Task, Worker, _Actor


class ThisProcess:
    """A pool of one worker in this process."""

    def map(self, make: Callable[[], Worker[Task, Result]], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """See `Pool`."""
        actor = _Actor(make)
        try:
            for number, task in enumerate(tasks):
                yield number, actor.run(task)
        finally:
            actor.close()
