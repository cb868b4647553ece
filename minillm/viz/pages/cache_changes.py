"""What a step changed in the block pool, in words."""

from __future__ import annotations

from collections.abc import Callable

from minillm.trace.cache_state import CacheState
from minillm.trace.request_state import RequestState
from minillm.viz.draw.colours import owner_letter
from minillm.viz.draw.plural import plural

Clause = Callable[[list[RequestState]], str]


def letter(request: RequestState) -> str:
    """The request's letter."""
    return owner_letter(request.index)


def changes(state: CacheState) -> list[str]:
    """What this step changed, one clause each, the most important first. Many requests with the same change share a
    clause."""
    requests = list(state.requests.values())
    kinds: tuple[tuple[list[RequestState], Clause, Clause], ...] = (
        ([r for r in requests if r.marks.reused and r.marks.forked_from is None], _found, _all_found),
        ([r for r in requests if r.marks.forked_from is not None], _forked, _all_forked),
        ([r for r in requests if r.marks.copied], _copied, _all_copied),
        ([r for r in requests if r.marks.preempted_tokens is not None], _preempted, _all_preempted),
        ([r for r in requests if r.marks.rolled_back], _rolled_back, _all_rolled_back),
        ([r for r in requests if r.marks.finished], _finished, _all_finished),
        ([r for r in requests if _kept_all(r)], _kept, _all_kept),
        (
            [r for r in requests if r.status == "prefill" and r.marks.written and not r.marks.reused],
            _prefilled,
            _all_prefilled,
        ),
        ([r for r in requests if r.status == "decode" and r.marks.written], _decoded, _decoded),
        ([r for r in requests if r.status in ("decode", "verify") and _new_blocks(r)], _grew, _all_grew),
    )
    clauses = _evicted(state)
    for members, one, many in kinds:
        alone = len(members) <= 2 and one is not many
        clauses += [one([r]) for r in members] if alone else [many(members)] if members else []
    return clauses + _newly_findable(requests)


def _evicted(state: CacheState) -> list[str]:
    if not state.evicted:
        return []
    blocks = ", ".join(map(str, sorted(state.evicted))) if len(state.evicted) <= 3 else str(len(state.evicted))
    return [f"cached block {blocks} evicted" if len(state.evicted) == 1 else f"cached blocks evicted: {blocks}"]


def _newly_findable(requests: list[RequestState]) -> list[str]:
    count = sum(len(r.marks.newly_cached_blocks) for r in requests)
    return [f"{plural(count, 'full block')} added to the prefix cache"] if count else []


def _copied(requests: list[RequestState]) -> str:
    request = requests[0]
    return f"{letter(request)} copied block " + ", ".join(f"{a} to {b}" for a, b in request.marks.copied)


def _all_copied(requests: list[RequestState]) -> str:
    return f"{len(requests)} requests copied {plural(sum(len(r.marks.copied) for r in requests), 'shared block')}"


def _found(requests: list[RequestState]) -> str:
    reused, computed = _reuse(requests[0])
    return f"{letter(requests[0])} found {plural(reused, 'token')}, computed {computed}"


def _all_found(requests: list[RequestState]) -> str:
    found, computed = (sum(counts) for counts in zip(*map(_reuse, requests), strict=True))
    return f"{len(requests)} requests found {found} tokens, computed {computed}"


def _reuse(request: RequestState) -> tuple[int, int]:
    return request.marks.reused, len(request.marks.written)


def _forked(requests: list[RequestState]) -> str:
    reused, computed = _reuse(requests[0])
    first = owner_letter(requests[0].marks.forked_from or 0)
    return f"{letter(requests[0])} forked from {first}: {plural(reused, 'token')} shared, computed {computed}"


def _all_forked(requests: list[RequestState]) -> str:
    shared, computed = (sum(counts) for counts in zip(*map(_reuse, requests), strict=True))
    return f"{len(requests)} requests forked, {shared} tokens shared, computed {computed}"


def _preempted(requests: list[RequestState]) -> str:
    request = requests[0]
    cached = (
        f", {plural(request.marks.num_freed_cached, 'block')} still cached" if request.marks.num_freed_cached else ""
    )
    return f"{letter(request)} preempted, {plural(request.marks.preempted_tokens or 0, 'token')} lost{cached}"


def _all_preempted(requests: list[RequestState]) -> str:
    lost = sum(r.marks.preempted_tokens or 0 for r in requests)
    return f"{len(requests)} requests preempted, {plural(lost, 'token')} lost"


def _rolled_back(requests: list[RequestState]) -> str:
    request = requests[0]
    blocks = 0 if request.marks.finished else request.marks.num_freed
    clause = f"{letter(request)} rolled back {plural(len(request.marks.rolled_back), 'slot')}"
    return f"{clause} and {plural(blocks, 'block')}" if blocks else clause


def _all_rolled_back(requests: list[RequestState]) -> str:
    slots = sum(len(r.marks.rolled_back) for r in requests)
    return f"{len(requests)} requests rolled back {plural(slots, 'slot')}"


def _finished(requests: list[RequestState]) -> str:
    return f"{letter(requests[0])} finished, {_given_back(requests)}"


def _all_finished(requests: list[RequestState]) -> str:
    return f"{len(requests)} requests finished, {_given_back(requests)}"


def _given_back(requests: list[RequestState]) -> str:
    """`4 blocks back (3 cached, 1 in use by others)`."""
    cached, shared = (
        sum(getattr(r.marks, name) for r in requests) for name in ("num_freed_cached", "num_freed_shared")
    )
    notes = [f"{cached} cached"] if cached else []
    notes += [f"{shared} in use by others"] if shared else []
    blocks = f"{plural(sum(r.marks.num_freed for r in requests), 'block')} back"
    return f"{blocks} ({', '.join(notes)})" if notes else blocks


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
    """Blocks that were allocated to the request in this step, and that it still has."""
    return [block_id for block_id in request.marks.allocated_blocks if block_id in request.block_table]


def _grew(requests: list[RequestState]) -> str:
    return f"{letter(requests[0])} took block {', '.join(map(str, _new_blocks(requests[0])))}"


def _all_grew(requests: list[RequestState]) -> str:
    return f"{len(requests)} requests took {sum(len(_new_blocks(r)) for r in requests)} blocks"
