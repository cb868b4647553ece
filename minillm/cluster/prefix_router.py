"""`PrefixRouter`: Ray Serve asks it which replica gets a request; it asks `PrefixTable`.

Serve makes one router in every process that sends requests to the replicas, which here is each gateway. The table is
its own: a second gateway learns its prefixes itself.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from minillm.cluster.prefix_table import PrefixTable
from minillm.cluster.replica import HttpCall

UNREACHABLE = 1 << 30
"""The load of a replica that does not answer: it comes last."""


class PrefixRouter(RequestRouter):
    """Ranks all replicas for every request; Serve takes the first one that has room."""

    def initialize_state(self, **limits: Any) -> None:
        """Called by Serve with the limits of `PrefixTable`."""
        self.table: PrefixTable[ReplicaID] = PrefixTable(**limits)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas for one request, each a rank of its own, the best one first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full, wait a little before the next try
        if not candidate_replicas:
            return []
        loads = await self._loads(candidate_replicas)
        args = pending_request.args if pending_request is not None else ()
        call = next((arg for arg in args if isinstance(arg, HttpCall)), None)
        hashes = call.block_hashes if call else ()
        order = self.table.rank(hashes, loads)
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        # Noted now: of several requests with one new prefix, the others find the first one's choice.
        self.table.note(order[0], hashes)
        return [[replicas[replica]] for replica in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has taken a request; it may be another one if the first choice was full."""
        for call in pending_request.args:
            if isinstance(call, HttpCall):
                self.table.note(replica_id, call.block_hashes)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas have been started or lost."""
        super().update_replicas(replicas)
        self.table.keep_only([replica.replica_id for replica in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a request has found that its replica is lost."""
        super().on_replica_actor_died(replica_id)
        self.table.keep_only(list(self.curr_replicas))

    async def _loads(self, replicas: list[RunningReplica]) -> dict[ReplicaID, int]:
        """Requests that each replica has, as this router knows; it asks those of which it has heard nothing lately."""
        loads = {replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) for replica in replicas}
        unknown = [replica for replica in replicas if loads[replica.replica_id] is None]
        if unknown:
            for replica, length in await self._probe_queue_lens(unknown, 0):
                loads[replica.replica_id] = length
        return {name: UNREACHABLE if length is None else length for name, length in loads.items()}
