"""What a step changed in the block pool, in words."""

from __future__ import annotations

from collections.abc import Callable

from minillm.viz.cache_state import CacheState
from minillm.viz.colours import owner_letter
from minillm.viz.request_state import RequestState

Clause = Callable[[list[RequestState]], str]


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def letter(request: RequestState) -> str:
    """The request's letter."""
    return owner_letter(request.index)


def changes(state: CacheState) -> list[str]:
    """What this step did, the most remarkable first; one clause each. Many requests doing the same share a clause."""
    requests = list(state.requests.values())
    kinds: tuple[tuple[list[RequestState], Clause, Clause], ...] = (
        ([r for r in requests if r.marks.preempted_tokens is not None], _preempted, _all_preempted),
        ([r for r in requests if r.marks.rolled_back], _rolled_back, _all_rolled_back),
        ([r for r in requests if r.marks.finished], _finished, _all_finished),
        ([r for r in requests if _kept_all(r)], _kept, _all_kept),
        ([r for r in requests if r.status == "prefill" and r.marks.written], _prefilled, _all_prefilled),
        ([r for r in requests if r.status == "decode" and r.marks.written], _decoded, _decoded),
        ([r for r in requests if r.status in ("decode", "verify") and _new_blocks(r)], _grew, _all_grew),
    )
    clauses: list[str] = []
    for members, one, many in kinds:
        alone = len(members) <= 2 and one is not many
        clauses += [one([r]) for r in members] if alone else [many(members)] if members else []
    return clauses


def _preempted(requests: list[RequestState]) -> str:
    return f"{letter(requests[0])} preempted, {plural(requests[0].marks.preempted_tokens or 0, 'token')} to redo"


def _all_preempted(requests: list[RequestState]) -> str:
    lost = sum(r.marks.preempted_tokens or 0 for r in requests)
    return f"{len(requests)} requests preempted, {plural(lost, 'token')} to redo"


def _rolled_back(requests: list[RequestState]) -> str:
    request = requests[0]
    blocks = 0 if request.marks.finished else request.marks.gave_back
    clause = f"{letter(request)} rolled back {plural(len(request.marks.rolled_back), 'slot')}"
    return f"{clause} and {plural(blocks, 'block')}" if blocks else clause


def _all_rolled_back(requests: list[RequestState]) -> str:
    slots = sum(len(r.marks.rolled_back) for r in requests)
    return f"{len(requests)} requests rolled back {plural(slots, 'slot')}"


def _finished(requests: list[RequestState]) -> str:
    return f"{letter(requests[0])} finished, {plural(requests[0].marks.gave_back, 'block')} back"


def _all_finished(requests: list[RequestState]) -> str:
    blocks = sum(r.marks.gave_back for r in requests)
    return f"{len(requests)} requests finished, {plural(blocks, 'block')} back"


def _kept_all(request: RequestState) -> bool:
    return 0 < request.marks.num_drafts == request.marks.num_accepted and not request.marks.finished


def _kept(requests: list[RequestState]) -> str:
    return f"{letter(requests[0])} kept all {plural(requests[0].marks.num_drafts, 'draft')}"


def _all_kept(requests: list[RequestState]) -> str:
    return f"{len(requests)} requests kept all their drafts"


def _prefilled(requests: list[RequestState]) -> str:
    return f"{letter(requests[0])} prefilled {plural(len(requests[0].marks.written), 'token')}"


def _all_prefilled(requests: list[RequestState]) -> str:
    tokens = sum(len(r.marks.written) for r in requests)
    return f"{len(requests)} requests prefilled {plural(tokens, 'token')}"


def _decoded(requests: list[RequestState]) -> str:
    slots = sum(len(r.marks.written) for r in requests)
    who = ", ".join(map(letter, requests)) if len(requests) <= 4 else f"{len(requests)} requests"
    return f"{who} wrote {plural(slots, 'slot')}"


def _new_blocks(request: RequestState) -> list[int]:
    """Blocks that the request took in this step and still has."""
    return [block_id for block_id in request.marks.took if block_id in request.block_table]


def _grew(requests: list[RequestState]) -> str:
    return f"{letter(requests[0])} took block {', '.join(map(str, _new_blocks(requests[0])))}"


def _all_grew(requests: list[RequestState]) -> str:
    return f"{len(requests)} requests took {sum(len(_new_blocks(r)) for r in requests)} blocks"
