"""How often drafts were accepted, by their rank among their siblings and by their depth, from the events of a trace.

    rank       0: the draft model's most probable child of a node, 1: the second, …
    depth      0: a child of the last committed token
    judged     the parent was accepted and all siblings of lower rank were rejected
    accepted / judged estimates P(the target chooses this child | its parent was chosen, earlier siblings were not)

Siblings are judged in order of rank. So of the children of an accepted node, those up to the accepted one were judged,
and all if none was accepted. Nodes below a rejected one were not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minillm.errors import TraceError
from minillm.trace.events import DraftProposed, Event, TokensCommitted


@dataclass
class JudgedCount:
    """How many drafts were judged, and how many of them accepted."""

    judged: int = 0
    accepted: int = 0

    def add(self, is_accepted: bool) -> None:
        """Count one verdict."""
        self.judged += 1
        self.accepted += is_accepted


def judged_nodes(parents: Sequence[int], path: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield `(depth, rank, is_accepted)` of each judged node of a draft tree.

    `parents`: the parent of each node, -1 for the last committed token; for a chain `range(-1, n - 1)`. `path`: the
    accepted nodes, from the root down; for a chain `range(num_accepted)`.
    """
    for depth, node in enumerate([-1, *path]):
        accepted = path[depth] if depth < len(path) else None
        for rank, child in enumerate(i for i, parent in enumerate(parents) if parent == node):
            yield depth, rank, child == accepted
            if child == accepted:
                break


def acceptance_by_rank(events: Iterable[Event]) -> dict[tuple[int, int], JudgedCount]:
    """Return the counts by `(depth, rank)` of all rounds in the events, sorted by depth, then rank.

    Raises `TraceError` if drafts were verified that no earlier event proposed, as in a trace that starts mid-step.
    """
    counts: dict[tuple[int, int], JudgedCount] = {}
    proposed: dict[str, DraftProposed] = {}
    for event in events:
        if isinstance(event, DraftProposed):
            proposed[event.request_id] = event
        elif isinstance(event, TokensCommitted) and event.num_drafts:
            draft = proposed.pop(event.request_id, None)
            if draft is None:
                raise TraceError(
                    f"{event.num_drafts} drafts of request {event.request_id} were verified, but none were proposed; "
                    "start the trace before the step"
                )
            if event.num_accepted > event.num_drafts or event.num_drafts > len(draft.token_ids):
                raise TraceError(
                    f"{event.num_accepted} of {event.num_drafts} drafts of request {event.request_id} were accepted, "
                    f"but {len(draft.token_ids)} were proposed; record the trace again"
                )
            is_chain = draft.parents is None
            parents = range(-1, len(draft.token_ids) - 1) if is_chain else draft.parents
            path = range(event.num_accepted) if is_chain else event.path or ()
            for depth, rank, is_accepted in judged_nodes(parents, path):
                counts.setdefault((depth, rank), JudgedCount()).add(is_accepted)
    return dict(sorted(counts.items()))
