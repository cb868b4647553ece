"""The block pool in words: its numbers, and the whole picture for readers who cannot see it."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace.cache_state import CacheState
from minillm.trace.request_state import RequestState
from minillm.viz.draw.glyphs import beginning
from minillm.viz.draw.plural import plural
from minillm.viz.pages.cache_changes import changes, letter

PROMPT = 60
"""Characters of a prompt that a description shows."""


def pool_size(state: CacheState) -> str:
    """Bytes of the whole pool in a unit that keeps the number short."""
    size = float(state.engine.bytes_per_block * state.num_blocks) if state.engine else 0.0
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024 * 0.7:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def waste_share(state: CacheState) -> str:
    """The waste in numbers: `waste 17 of 176 slots (10%)`; in a layout that drops tokens, what a slot stands for."""
    if not state.keeps_every_token:
        return "tokens, not all are kept"
    share = f" ({state.waste_slots / state.used_slots:.0%})" if state.used_slots else ""
    return f"waste {state.waste_slots} of {plural(state.used_slots, 'slot')}{share}"


def request_work(request: RequestState) -> str:
    """The request's current work, in a few words."""
    marks = request.marks
    if marks.reused and request.status != "finished":
        return f"{marks.reused} reused, {len(marks.written)} computed"
    if request.is_recomputed:
        return f"recompute {request.num_computed} of {request.num_tokens}"
    if request.status == "prefill":
        return f"prefill {min(request.num_computed, request.num_tokens)} of {request.num_prompt_tokens}"
    if request.status == "verify" and marks.num_drafts:
        return f"verify {plural(marks.num_drafts, 'draft')}, {marks.num_accepted} right"
    if request.status == "finished":
        return f"done: {plural(request.num_output_tokens, 'token')} ({request.finish_reason})"
    return request.status


def blocks_share(state: CacheState, separator: str = " · ") -> str:
    """How the pool is split: `9 used · 2 cached · 13 free`."""
    cached = [f"{state.cached_blocks} cached"] if state.cached_blocks else []
    free = f"{state.free_blocks - state.cached_blocks} free"
    return separator.join([f"{state.used_blocks} used", *cached, free])


def savings(state: CacheState) -> str:
    """Tokens that sharing has saved so far, empty if none: `203 tokens not computed: 144 found, 59 forked`."""
    found, forked = state.totals.prefix_hit_tokens, state.totals.forked_tokens
    kinds = [f"{count} {kind}" for count, kind in ((found, "found"), (forked, "forked")) if count]
    return f"{plural(found + forked, 'token')} not computed: {', '.join(kinds)}" if kinds else ""


def summary(state: CacheState) -> str:
    """One line: the pool in numbers."""
    if state.engine is None:
        return "The engine has not started yet."
    facts = f"{plural(state.num_blocks, unit(state))} of {plural(state.block_size, 'slot')}"
    shared = sum(len(owners) > 1 for owners in state.owners.values())
    split = blocks_share(state, ", ")
    split = split.replace(" used", f" used, {shared} shared", 1) if shared else split
    saved = savings(state)
    return f"{facts}: {split}; {waste_share(state)}{'; ' if saved else ''}{saved}."


def title(state: CacheState) -> str:
    """The name of the picture."""
    return "KV cache places" if state.whole_sequences else "KV cache pages"


def unit(state: CacheState) -> str:
    """The word for a block: `block`, or `place` if it holds a whole sequence."""
    return "place" if state.whole_sequences else "block"


def describe(state: CacheState, drawn: Sequence[RequestState] | None = None) -> str:
    """The picture in words, one line per request, with prompts and block tables. With `drawn` only those requests,
    without both, and the number of the others."""
    lines = [f"{title(state)}, step {state.step}. {summary(state)}"]
    tables = drawn is None
    for request in state.requests.values() if drawn is None else drawn:
        line = f"{letter(request)} {beginning(request.prompt, PROMPT)!r}" if tables else f"Request {letter(request)}"
        line += f" ({request_work(request)})"
        if request.status != "finished":  # then nothing of it is in the cache
            line += f": {request.num_computed} of {plural(request.num_tokens, 'token')} "
            line += "in the cache" if state.keeps_every_token else "computed"
            line += f", {plural(len(request.block_table), unit(state))}"
        lines.append(f"{line} {request.block_table}" if tables and request.block_table else line)
    if drawn is not None and (hidden := len(state.requests) - len(drawn)):
        lines.append(f"And {plural(hidden, 'more request')}")
    done = "; ".join(changes(state))
    return "\n".join([*lines, f"This step: {done}."] if done else lines)
