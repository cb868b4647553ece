"""The usage of the block pool, now and at the end of each step so far."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace.cache_state import CacheState, PoolSnapshot
from minillm.viz.draw.colours import BLUE, DISCARDED, FAINT, HAIRLINE, INK, PAPER
from minillm.viz.draw.svg import RIGHT, SANS_EM, element, fit_words, hatched, heading, label, number, rectangle
from minillm.viz.pages.cache_words import blocks_share, savings, unit, waste_share

SIDE = 660
"""Left edge of the column."""


def draw_usage(state: CacheState, left: float = SIDE, right: float = RIGHT, top: float = 26) -> str:
    """The usage bar: filled slots, empty slots of used blocks, cached blocks, free blocks; below it, the numbers."""
    width = right - left
    per_slot = width / max(state.num_blocks * state.block_size, 1)
    used, waste = state.used_slots * per_slot, state.waste_slots * per_slot
    cached = state.cached_blocks * state.block_size * per_slot
    bar = rectangle(left, top, width, 12, 3, {"fill": FAINT, "stroke": HAIRLINE})
    if cached:
        look = {"fill": hatched("cached"), "stroke": DISCARDED, "data-testid": "usage-cached"}
        bar += rectangle(left + used, top, cached, 12, 3, look)
    if used:
        bar += rectangle(left, top, used, 12, 3, {"fill": PAPER, "stroke": INK})
        bar += rectangle(left, top, used - waste, 12, 3, {"fill": INK})
    blocks, wasted = blocks_share(state), waste_share(state)
    if (len(blocks) + len(wasted) + 2) * SANS_EM * 11.5 > width:
        wasted = wasted.replace(" slots", "").replace(" slot", "")
    numbers = label(left, top + 30, blocks, size=11.5) + label(right, top + 30, wasted, size=11.5, anchor="end")
    saved = fit_words(savings(state), width, 11.5)
    return bar + numbers + (label(left, top + 48, saved, size=11.5, fill=INK) if saved else "")


def draw_history(state: CacheState, top: float, bottom: float, left: float = SIDE, right: float = RIGHT) -> str:
    """Blocks at the end of each step so far: filled slots in blue, waste in light blue, cached blocks hatched."""
    history = [PoolSnapshot(0, 0, 0), *_thinned(state.history)]
    peak = state.totals.peak_blocks
    head = heading(left, top - 14, f"used {unit(state)}s, step by step")
    base = element("path", {"d": f"M{number(left)} {number(bottom)}H{number(right)}", "stroke": HAIRLINE})
    if len(history) < 2 or not peak:
        return head + base
    bottom -= 0.5
    highest = max(peak, *(f.used_blocks + f.cached_blocks for f in history))
    across, up = (right - left - 4) / (len(history) - 1), (bottom - top - 4) / highest
    used = [(left + i * across, bottom - f.used_blocks * up) for i, f in enumerate(history)]
    filled = [(x, y + f.waste_slots / state.block_size * up) for (x, y), f in zip(used, history, strict=True)]
    cached = [(x, y - f.cached_blocks * up) for (x, y), f in zip(used, history, strict=True)]
    cached_area = {"d": _between(cached, used), "fill": hatched("cached"), "stroke": DISCARDED, "stroke-width": 0.7}
    now_x, now_y = used[-1]
    return "".join(
        [
            head,
            label(right, top - 14, f"peak {peak} of {state.num_blocks}", size=11.5, anchor="end"),
            element("path", cached_area) if any(f.cached_blocks for f in history) else "",
            element("path", {"d": _area(used, bottom), "fill": BLUE, "fill-opacity": 0.18}),
            element("path", {"d": _area(filled, bottom), "fill": BLUE, "fill-opacity": 0.55}),
            base,
            element("circle", {"cx": now_x, "cy": now_y, "r": 3.5, "fill": INK}),
        ]
    )


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
