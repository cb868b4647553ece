"""`PrefixTable`: which prompt prefixes went to which replica, and which replica should get the next request.

    prompt        │ block 0 │ block 1 │ block 2 │ …          hashes of full blocks, as in `minillm.cache.prefix`
    replica "a"   │    ✓    │    ✓    │    –    │ → 2 blocks match
    replica "b"   │    ✓    │    –    │    –    │ → 1 block matches

A request goes to the replica with the longest match, because that replica's prefix cache most likely holds these keys
and values. A replica that has more than `max_imbalance` requests more than the least loaded one gets no request for
its prefix: then waiting costs more than computing again what the next longest match lacks, or all of the prefix. Ray's
`PrefixCacheAffinityRouter` (`imbalanced_threshold`, `match_rate_threshold`) and SGLang's router weigh prefix and load
in the same way.

The table holds what was sent or was to be sent, not what is cached: a replica may have evicted a block since, and the
router notes its first choice even if that replica has no room and another one takes the request. Like the cache, the
table keeps the most recently used blocks of each replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from minillm.config import at_least
from minillm.errors import ConfigError

Replica = TypeVar("Replica")

MAX_IMBALANCE = 16
"""Requests that a replica may have more than the least loaded one, and still be chosen for its prefix."""
MIN_MATCH = 0.1
"""Share of a prompt's full blocks that must match; Ray's router has the same default."""
BLOCKS_PER_REPLICA = 1 << 16
"""Hashes that are kept for each replica."""


class PrefixTable(Generic[Replica]):
    """The prefixes that each replica was sent or was to be sent. Not thread-safe: one event loop uses it."""

    def __init__(
        self,
        max_imbalance: int = MAX_IMBALANCE,
        min_match: float = MIN_MATCH,
        blocks_per_replica: int = BLOCKS_PER_REPLICA,
    ) -> None:
        """Raises `ConfigError` for a bad limit."""
        at_least("max_imbalance", max_imbalance, 0)
        at_least("blocks_per_replica", blocks_per_replica, 1)
        if not 0.0 <= min_match <= 1.0:
            raise ConfigError(f"min_match={min_match} is a share of a prompt's blocks; it must be from 0 to 1")
        self.max_imbalance = max_imbalance
        self.min_match = min_match
        self.blocks_per_replica = blocks_per_replica
        self._sent: dict[Replica, OrderedDict[bytes, None]] = {}
        """Replica → block hashes, the least recently used first."""

    def match(self, replica: Replica, hashes: Sequence[bytes]) -> int:
        """How many blocks from the beginning of the prompt the replica was sent, or was to be sent, before."""
        sent = self._sent.get(replica, {})
        return next((i for i, block in enumerate(hashes) if block not in sent), len(hashes))

    def rank(self, hashes: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        """All replicas, the one that should get the request first.

        `loads`: requests that each replica has, waiting and running. Order: replicas that may be chosen for their
        prefix, the longest match first; then by load; then by blocks sent so far, so that new prefixes spread.
        """
        if not loads:
            return []
        limit = min(loads.values()) + self.max_imbalance
        enough = max(1, self.min_match * len(hashes))

        def cost(replica: Replica) -> tuple[int, int, int]:
            matched = self.match(replica, hashes) if loads[replica] <= limit else 0
            return (-matched if matched >= enough else 0), loads[replica], len(self._sent.get(replica, ()))

        return sorted(loads, key=cost)

    def note(self, replica: Replica, hashes: Sequence[bytes]) -> None:
        """Remember that a request with this prefix goes to `replica`."""
        sent = self._sent.setdefault(replica, OrderedDict())
        for block in reversed(hashes):  # so that the first block of a prompt is evicted last
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self.blocks_per_replica:
            sent.popitem(last=False)

    def keep_only(self, replicas: Sequence[Replica]) -> None:
        """Forget every replica that is not one of these: its cache is gone with it."""
        for replica in set(self._sent).difference(replicas):
            del self._sent[replica]
