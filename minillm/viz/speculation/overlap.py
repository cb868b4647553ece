"""Target and draft over the same tokens: what is accepted, what is rejected, and what the residual must make good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import GREEN, HAIRLINE, INK, MUTED, ORANGE, PAPER, VERMILLION
from minillm.viz.draw.glyphs import visible
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import (
    BOLD,
    MARGIN,
    MONO,
    RIGHT,
    card,
    element,
    fit_mono,
    hatch,
    hatched,
    label,
    number,
    rectangle,
    spans,
)

TOP, HEIGHT, LEGEND = 118, 190, 66
BASE = TOP + HEIGHT


@dataclass(frozen=True)
class OverlapBars(Picture):
    """One bar per token. Acceptance gives min(p, q); the rest of q is rejected, the rest of p recovered.

    Raises `ConfigError` if the columns have different lengths or do not sum to 1.
    """

    tokens: Sequence[str]
    target: Sequence[float]
    draft: Sequence[float]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.target) == len(self.draft) > 0:
            raise ConfigError(
                f"{len(self.tokens)} tokens, {len(self.target)} numbers of the target and {len(self.draft)} of the "
                "draft: give one of each per token"
            )
        for name, row in (("target", self.target), ("draft", self.draft)):
            if not math.isclose(sum(row), 1.0, abs_tol=1e-4):
                raise ConfigError(f"the {name}'s probabilities sum to {sum(row):.6g}, must sum to 1")

    @property
    def accepted(self) -> float:
        """α = Σ min(p, q): the share of drafts that is accepted."""
        return sum(map(min, self.target, self.draft))

    def to_svg(self) -> str:
        """The picture."""
        pitch = min(220.0, (RIGHT - MARGIN) / len(self.tokens))
        most = max(*self.target, *self.draft)
        columns = [
            _column(token, p, q, MARGIN + i * pitch, pitch, most)
            for i, (token, p, q) in enumerate(zip(self.tokens, self.target, self.draft, strict=True))
        ]
        line = element(
            "path", {"d": f"M{MARGIN} {BASE}H{number(MARGIN + pitch * len(self.tokens))}", "stroke": HAIRLINE}
        )
        headline = spans(
            RIGHT,
            36,
            (f"{self.accepted:.0%}", BOLD),
            (" of drafts accepted; rejected and recovered are equal: ", {"fill": INK}),
            (f"{1 - self.accepted:.0%}", BOLD),
            anchor="end",
        )
        return card(
            "overlap",
            BASE + 64,
            "Target and draft over the same tokens",
            self.describe(),
            element("defs", {}, hatch("rejected", VERMILLION)),
            label(MARGIN, 36, "p over q", size=17, weight=650, fill=INK),
            headline,
            *_legend(),
            line,
            *columns,
        )

    def describe(self) -> str:
        """The picture in words."""
        rows = zip(self.tokens, self.target, self.draft, strict=True)
        words = ", ".join(f"“{visible(token)}” target {p:.1%}, draft {q:.1%}" for token, p, q in rows)
        return f"{self.accepted:.1%} of drafts are accepted. {words}."

    def __repr__(self) -> str:
        return "<OverlapBars>"


def _legend() -> list[str]:
    shown = (
        ({"fill": GREEN, "fill-opacity": 0.8}, "✓ min(p, q): drafted and accepted"),
        (
            {"fill": hatched("rejected"), "stroke": VERMILLION, "stroke-dasharray": "4 3"},
            "✗ q − p: drafted and rejected",
        ),
        ({"fill": ORANGE}, "↻ p − q: recovered from the residual"),
    )
    parts, x = [], float(MARGIN)
    for look, text in shown:
        parts += [rectangle(x, LEGEND - 10, 16, 12, 2, look), label(x + 24, LEGEND, text, size=12, fill=INK)]
        x += 60 + 6.6 * len(text)
    return parts


def _column(token: str, p: float, q: float, left: float, pitch: float, most: float) -> str:
    width, x, middle = min(110.0, pitch - 16), left + (pitch - min(110.0, pitch - 16)) / 2, left + pitch / 2
    common, rest = min(p, q) / most * HEIGHT, abs(p - q) / most * HEIGHT
    parts = [
        rectangle(x, BASE - common, width, common, 2, {"fill": GREEN, "fill-opacity": 0.8, "data-part": "accepted"})
    ]
    parts += _share(middle, BASE - common / 2, f"✓ {min(p, q):.1%}", common, width)
    if rest:
        thrown = {"fill": hatched("rejected"), "stroke": VERMILLION, "stroke-dasharray": "4 3", "data-part": "rejected"}
        look = thrown if q > p else {"fill": ORANGE, "data-part": "recovered"}
        parts.append(rectangle(x, BASE - common - rest, width, rest, 2, look))
        sign = "✗" if q > p else "↻"
        parts += _share(middle, BASE - common - rest / 2, f"{sign} {abs(p - q):.1%}", rest, width, paper=q > p)
    size = 13 if pitch >= 90 else 11
    parts.append(
        label(
            middle,
            BASE + 20,
            fit_mono(visible(token), pitch - 8, size),
            size=size,
            anchor="middle",
            fill=INK,
            family=MONO,
        )
    )
    parts.append(
        label(
            middle,
            BASE + 40,
            f"p {p:.1%} · q {q:.1%}" if pitch >= 130 else f"p {p:.0%} q {q:.0%}",
            size=11.5 if pitch >= 90 else 10,
            anchor="middle",
            fill=MUTED,
        )
    )
    return element("g", {"data-testid": "token"}, *parts)


def _share(x: float, y: float, text: str, height: float, width: float, paper: bool = False) -> list[str]:
    """A label inside a part of a bar, if there is room; on white where the part is hatched."""
    if height < 18 or width < 62:
        return []
    back = rectangle(x - 31, y - 8, 62, 16, 3, {"fill": PAPER}) if paper else ""
    return [back, label(x, y + 4, text, size=12, anchor="middle", fill=INK, weight=600)]
