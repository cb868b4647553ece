"""The loss curve of a run as a deterministic SVG, drawn from its log with only the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from minillm.training.record import LogRow

BLUE, INK, GREY, HAIRLINE = "#0072B2", "#1f2430", "#6b7280", "#d5d9e0"
SANS = "ui-sans-serif,system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
WIDTH, TOP, HEIGHT, MARGIN, GAP = 980, 112, 250, 64, 84
POINTS = 160
"""Most buckets that a curve is averaged into, so that the file stays small for a long run."""


@dataclass(frozen=True)
class Curve:
    """One panel: the loss of one run."""

    name: str
    unit: str
    """Unit of the loss, e.g. `nats per token`."""
    log: Sequence[LogRow]
    cycle: int = 1
    """Steps after which the row lengths repeat. Their losses differ, so a point is the mean of whole cycles: steps
    outside them are left out, such as those that a GPU logs when it saves its state."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive steps as one point."""

    tokens: float
    """Millions of tokens at the last of the steps."""
    mean: float
    low: float
    high: float


def loss_svg(title: str, curves: Sequence[Curve]) -> str:
    """A picture with one panel per curve: the mean loss as a line, the range of its steps as a band."""
    last = [buckets(curve)[-1] for curve in curves]
    words = "; ".join(
        f"{c.name}: {b.mean:.2f} {c.unit} after {b.tokens:.1f} million tokens"
        for c, b in zip(curves, last, strict=True)
    )
    width = (WIDTH - MARGIN - 32 - GAP * (len(curves) - 1)) / len(curves)
    panels = [_panel(curve, MARGIN + i * (width + GAP), width) for i, curve in enumerate(curves)]
    total = TOP + HEIGHT + 64
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" viewBox="0 0 {WIDTH} {total}" '
            f'role="img" aria-labelledby="loss-title loss-desc" font-family="{SANS}">',
            f'<title id="loss-title">{escape(title)}</title><desc id="loss-desc">{escape(words)}.</desc>',
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{total - 1}" rx="10" fill="#fff" stroke="{HAIRLINE}"/>',
            _text(24, 36, title, 17, INK, weight=650),
            _text(24, 60, "line: mean of neighbouring steps · band: their lowest and highest", 13, GREY),
            *panels,
            "</svg>\n",
        ]
    )


def buckets(curve: Curve) -> list[Bucket]:
    """Group the log into at most `POINTS` buckets of neighbouring steps, in whole cycles (if it has any)."""
    log = _whole_cycles(curve.log, curve.cycle) or curve.log
    size = curve.cycle * math.ceil(len(log) / POINTS / curve.cycle)
    found = []
    for start in range(0, len(log), size):
        rows = log[start : start + size]
        losses = [row.loss for row in rows]
        found.append(Bucket(rows[-1].tokens / 1e6, sum(losses) / len(losses), min(losses), max(losses)))
    return found


def _whole_cycles(log: Sequence[LogRow], cycle: int) -> list[LogRow]:
    """The log without the steps that are over at the beginning of each stretch of consecutive ones."""
    stretches: list[list[LogRow]] = []
    for row in log:
        if not stretches or row.step != stretches[-1][-1].step + 1:
            stretches.append([])
        stretches[-1].append(row)
    return [row for stretch in stretches for row in stretch[len(stretch) % cycle :]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) inside `low … high`, about `count` of them."""
    rough = max(high - low, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 10) for i in range(math.floor(high / step + 1e-9) - first + 1)]


def _panel(curve: Curve, left: float, width: float) -> str:
    points = buckets(curve)
    low, high = min(p.low for p in points), max(p.high for p in points)
    span = (high - low) * 1.04 or 1.0
    least, most = curve.log[0].tokens / 1e6, points[-1].tokens

    def x(tokens: float) -> str:
        return f"{left + (tokens - least) / ((most - least) or 1.0) * width:.1f}"

    def y(loss: float) -> str:
        return f"{TOP + HEIGHT - (loss - low) / span * HEIGHT:.1f}"

    parts = [_text(left, TOP - 18, f"{curve.name} · {curve.unit}", 13, INK, weight=600)]
    for tick in ticks(low, high):
        parts.append(f'<path d="M{left:.1f} {y(tick)}h{width:.1f}" stroke="{HAIRLINE}"/>')
        parts.append(_text(left - 8, float(y(tick)) + 4, f"{tick:g}", 11.5, GREY, anchor="end"))
    for tick in ticks(least, most):
        parts.append(_text(float(x(tick)), TOP + HEIGHT + 20, f"{tick:g}", 11.5, GREY, anchor="middle"))
    parts.append(_text(left + width / 2, TOP + HEIGHT + 42, "million tokens", 11.5, GREY, anchor="middle"))
    band = [f"{x(p.tokens)} {y(p.high)}" for p in points] + [f"{x(p.tokens)} {y(p.low)}" for p in reversed(points)]
    parts.append(f'<path d="M{" ".join(band)}Z" fill="{BLUE}" fill-opacity=".13"/>')
    line = " ".join(f"{x(p.tokens)},{y(p.mean)}" for p in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.8" data-testid="loss"/>')
    end = points[-1]
    parts.append(f'<circle cx="{x(end.tokens)}" cy="{y(end.mean)}" r="3.5" fill="{BLUE}"/>')
    parts.append(_text(left + width - 4, float(y(end.high)) - 10, f"{end.mean:.2f}", 13, INK, weight=700, anchor="end"))
    return "\n".join(parts)


def _text(x: float, y: float, words: str, size: float, fill: str, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )
