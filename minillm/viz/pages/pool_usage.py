"""The usage of the block pool, now and at the end of each step so far.

Its fills are those of the pages; `usage_kinds` says which of them the legend must explain.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace.cache_state import CacheState, PoolSnapshot
from minillm.viz.draw.colours import HAIRLINE, INK
from minillm.viz.draw.svg import RIGHT, SANS_EM, element, fit_words, heading, label, number, rectangle
from minillm.viz.pages.cache_words import blocks_share, savings, unit, waste_share
from minillm.viz.pages.page_legend import SWATCHES

SIDE = 660
"""Left edge of the column."""


def usage_kinds(state: CacheState) -> set[str]:
    """The keys of `SWATCHES` for what the usage bar and the history show."""
    kinds = _kinds([_now(state), *_thinned(state.history)], state)
    return kinds | {"free"} if state.free_blocks > state.cached_blocks else kinds


def draw_usage(state: CacheState, left: float = SIDE, right: float = RIGHT, top: float = 26) -> str:
    """The usage bar: filled slots, empty slots of used blocks, cached blocks, free blocks; below it, the numbers."""
    width, kinds = right - left, _kinds([_now(state)], state)
    per_slot = width / max(state.num_blocks * state.block_size, 1)
    used, waste = state.used_slots * per_slot, state.waste_slots * per_slot
    cached = state.cached_blocks * state.block_size * per_slot
    bars = {"cached": (left + used, cached), "empty": (left, used), "written": (left, used - waste)}
    bar = _bar("free", left, width, top) + "".join(_bar(kind, *bars[kind], top) for kind in bars if kind in kinds)
    blocks, wasted = blocks_share(state), waste_share(state)
    if (len(blocks) + len(wasted) + 2) * SANS_EM * 11.5 > width:
        wasted = wasted.replace(" slots", "").replace(" slot", "")
    numbers = label(left, top + 30, blocks, size=11.5) + label(right, top + 30, wasted, size=11.5, anchor="end")
    saved = fit_words(savings(state), width, 11.5)
    return bar + numbers + (label(left, top + 48, saved, size=11.5, fill=INK) if saved else "")


def draw_history(state: CacheState, top: float, bottom: float, left: float = SIDE, right: float = RIGHT) -> str:
    """Blocks at the end of each step so far: filled slots, waste, and cached blocks."""
    cached_before = len(state.engine.cached_blocks) if state.engine else 0
    history = [PoolSnapshot(0, 0, 0, cached_before), *_thinned(state.history)]
    peak = state.totals.peak_blocks
    head = heading(left, top - 14, f"used {unit(state)}s, step by step")
    base = element("path", {"d": f"M{number(left)} {number(bottom)}H{number(right)}", "stroke": HAIRLINE})
    if len(history) < 2 or not peak:
        return head + base
    bottom -= 0.5
    kinds = _kinds(history, state)
    highest = max(peak, *(f.used_blocks + f.cached_blocks for f in history))
    across, up = (right - left - 4) / (len(history) - 1), (bottom - top - 4) / highest
    used = [(left + i * across, bottom - f.used_blocks * up) for i, f in enumerate(history)]
    filled = [(x, y + f.waste_slots / state.block_size * up) for (x, y), f in zip(used, history, strict=True)]
    cached = [(x, y - f.cached_blocks * up) for (x, y), f in zip(used, history, strict=True)]
    ways = {"cached": _between(cached, used), "empty": _area(used, bottom), "written": _area(filled, bottom)}
    now_x, now_y = used[-1]
    return "".join(
        [
            head,
            label(right, top - 14, f"peak {peak} of {state.num_blocks}", size=11.5, anchor="end"),
            *(_shape(kind, ways[kind]) for kind in ways if kind in kinds),
            base,
            element("circle", {"cx": now_x, "cy": now_y, "r": 3.5, "fill": INK}),
        ]
    )


def _now(state: CacheState) -> PoolSnapshot:
    return PoolSnapshot(state.step, state.used_blocks, state.waste_slots, state.cached_blocks)


def _kinds(snapshots: Sequence[PoolSnapshot], state: CacheState) -> set[str]:
    """The kinds of slots in any of these snapshots, other than free ones."""
    kinds: set[str] = set()
    for each in snapshots:
        written = each.used_blocks * state.block_size - each.waste_slots
        counts = {"written": written, "empty": each.waste_slots, "cached": each.cached_blocks}
        kinds.update(kind for kind, count in counts.items() if count)
    return kinds


def _bar(kind: str, left: float, width: float, top: float) -> str:
    """The part of the usage bar for slots of this kind."""
    return rectangle(left, top, width, 12, 3, {**SWATCHES[kind][1], "data-testid": f"usage-{kind}"})


def _shape(kind: str, way: str) -> str:
    """The area of the history for slots of this kind."""
    look = SWATCHES[kind][1]
    return element("path", {"d": way, **look, "stroke-width": 0.7, "data-testid": f"history-{kind}"})


def _thinned(history: Sequence[PoolSnapshot], most: int = 148) -> list[PoolSnapshot]:
    """At most `most` evenly spaced steps, including the last one."""
    stride = -(-len(history) // most)
    return list(history[::-1][:: max(stride, 1)])[::-1]


def _area(points: Sequence[tuple[float, float]], bottom: float) -> str:
    return f"M{number(points[0][0])} {number(bottom)}L{_line(points)}V{number(bottom)}z"


def _between(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    return f"M{_line(upper)}L{_line(lower[::-1])}z"


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{number(x)} {number(y)}" for x, y in points)
