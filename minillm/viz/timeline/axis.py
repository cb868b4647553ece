"""Milliseconds in pictures: as text, and as an axis with round ticks."""

from __future__ import annotations

from minillm.viz.draw.colours import MUTED
from minillm.viz.draw.svg import element, label, number


def ms_text(seconds: float) -> str:
    """`seconds` in milliseconds, with fewer decimals for longer times: `0.25 ms`, `2.5 ms`, `250 ms`."""
    ms = 1000 * seconds
    return f"{ms:,.0f} ms" if ms >= 20 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def milliseconds_axis(
    left: float, end: float, scale: float, bottom: float, max_ticks: int, smallest_step: float = 1.0
) -> list[str]:
    """A line from x = `left` to `end` at y = `bottom`, with at most `max_ticks` steps of 1, 2 or 5 times a power of
    ten. `scale`: pixels per second; `smallest_step`: a power of ten, in milliseconds."""
    total = (end - left) / scale * 1000
    steps = (digit * smallest_step * 10.0**power for power in range(12) for digit in (1, 2, 5))
    step = next(step for step in steps if total / step <= max_ticks + 1e-9)
    parts = [element("path", {"d": f"M{left} {bottom}H{end}", "stroke": MUTED})]
    for i in range(int(total / step + 1e-9) + 1):
        x = left + i * step / 1000 * scale
        parts.append(element("path", {"d": f"M{number(x)} {bottom}v5", "stroke": MUTED}))
        parts.append(label(x, bottom + 19, f"{i * step:g}", size=11.5, anchor="middle"))
    parts.append(label((left + end) / 2, bottom + 38, "milliseconds", size=12, anchor="middle"))
    return parts
