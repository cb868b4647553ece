"""Why a step may draft so many tokens: chances of the drafts on the left, predicted speed-up on the right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from minillm.trace import DraftReason, DraftsPlanned, RequestAdded, Trace
from minillm.viz.draw.colours import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, owner_letter
from minillm.viz.draw.glyphs import shorten, visible
from minillm.viz.draw.output import Picture
from minillm.viz.draw.plural import plural
from minillm.viz.draw.svg import MARGIN, RIGHT, TITLE, card, element, heading, label, number, rectangle, spans

MAX_REQUESTS, MAX_POSITIONS = 8, 8
TOP, ROW = 120, 34
LEFT, SPLIT, PLOT_LEFT = 58, 500, 566
PLOT_HEIGHT = 200
REASONS: dict[DraftReason, str] = {
    "compared": "a few plain steps are timed, and drafting is compared with them",
    "loss": "drafting has cost more time than it saved and rests, except for requests with their own seed",
    "batch_size": "more requests run and wait than disable_by_batch_size allows",
    "fixed": "the number is fixed",
}
"""Those that are not a prediction."""


@dataclass(frozen=True)
class DraftDecision(Picture):
    """One decision on the number of drafts, from its event. Where nothing was predicted: its reason and numbers."""

    event: DraftsPlanned
    trace: Trace | None = None
    """The trace that the event is from. With it, requests have the letters of the other pictures, else their ids."""

    @property
    def predicts(self) -> bool:
        """Whether there are chances and speed-ups to draw."""
        return bool(self.event.speedups) and any(self.event.survival)

    @property
    def chosen(self) -> int:
        """Drafts of all requests together."""
        return sum(self.event.num_drafts)

    @property
    def best(self) -> int:
        """The number of drafts with the highest predicted speed-up."""
        return max(range(len(self.event.speedups)), key=self.event.speedups.__getitem__)

    @property
    def reason(self) -> str:
        """The decision in one sentence."""
        chosen = plural(self.chosen, "draft") if self.chosen else "no drafts"
        if self.event.reason in REASONS:
            return f"{chosen}: {REASONS[self.event.reason]}"
        if not self.predicts:
            return f"{chosen}: decided without a new prediction"
        speedups = self.event.speedups
        best, most = self.best, f"{speedups[self.best]:.2f}× plain decoding"
        if self.chosen == best and best:
            return f"{chosen}: the most tokens per second, predicted {most}"
        if not self.chosen and not best:
            return f"{chosen}: every number of drafts is predicted to be slower than plain decoding"
        if not self.chosen:
            return f"{chosen}: {plural(best, 'draft')} would give {most}, a gain too small to count on"
        return (
            f"{chosen}: a trial, a request with its own seed, or room for the longer draft of two methods; the fastest "
            f"number is {best}"
        )

    def to_svg(self) -> str:
        """The picture. A filled cell with a tick is a draft that was chosen."""
        height, body = self._predictions() if self.predicts else (110, [label(MARGIN, 90, self._by_request, size=13)])
        return card(
            "draft-decision",
            height,
            "How many drafts this step may have",
            self.describe(),
            spans(MARGIN, 38, ("How many drafts may this step have?", TITLE)),
            label(MARGIN, 64, self.reason, size=13, fill=INK),
            *body,
        )

    def describe(self) -> str:
        """The picture in words."""
        if not self.predicts:
            return f"{self.reason}. {self._by_request}."
        given = ", ".join(
            f"{name} {count} ({_listed([f'{p:.2f}' for p in chances], MAX_POSITIONS)})"
            for name, count, chances in zip(self._names, self.event.num_drafts, self.event.survival, strict=True)
        )
        speeds = _listed([f"{m}: {s:.2f}" for m, s in enumerate(self.event.speedups)], 3 * MAX_POSITIONS + 1)
        return (
            f"{self.reason}. Drafts by request, with their survival: {given}. Predicted speed-up by drafts: {speeds}."
        )

    def __repr__(self) -> str:
        return "<DraftDecision>"

    @cached_property
    def _names(self) -> list[str]:
        """How each request is called. An id may be used again after the decision."""
        before = takewhile(lambda event: event is not self.event, self.trace or ())
        added = [event for event in before if isinstance(event, RequestAdded)]
        letters = {event.request_id: owner_letter(index) for index, event in enumerate(added)}
        return [letters.get(request_id, request_id) for request_id in self.event.request_ids]

    @property
    def _by_request(self) -> str:
        """The number of each request, in one line."""
        names = [shorten(visible(name), 8) for name in self._names]
        pairs = zip(names, self.event.num_drafts, strict=True)
        return f"Drafts by request: {_listed([f'{name} {count}' for name, count in pairs], MAX_REQUESTS)}"

    def _predictions(self) -> tuple[float, list[str]]:
        """The height of the picture and what is below its reason: chances and predicted speed-ups."""
        rows = min(MAX_REQUESTS, len(self.event.request_ids))
        height = max(TOP + ROW * rows + 60, TOP + PLOT_HEIGHT + 84)
        return height, [*self._requests(rows), *self._curve(), self._legend(height - 18)]

    def _requests(self, rows: int) -> list[str]:
        """A row for each request, a cell for each draft."""
        longest = min(MAX_POSITIONS, max(len(chances) for chances in self.event.survival))
        width = min(64.0, (SPLIT - LEFT) / longest)
        parts = [heading(MARGIN, 96, "chance to survive, by position")]
        parts += [
            label(LEFT + (j + 0.5) * width - 2, TOP - 4, str(j + 1), size=11, anchor="middle") for j in range(longest)
        ]
        for i in range(rows):
            y = TOP + 4 + i * ROW
            parts.append(label(MARGIN + 6, y + 19, shorten(visible(self._names[i]), 3), size=13, weight=700, fill=INK))
            for j, chance in enumerate(self.event.survival[i][:longest]):
                parts.append(_cell(LEFT + j * width, y, width - 4, chance, j < self.event.num_drafts[i]))
            if (more := len(self.event.survival[i]) - longest) > 0:
                parts.append(label(LEFT + longest * width, y + 18, f"+{more}", size=11.5))
        hidden = len(self.event.request_ids) - rows
        if hidden:
            parts.append(label(LEFT, TOP + 20 + rows * ROW, f"and {plural(hidden, 'more request')}", size=11.5))
        return parts

    def _curve(self) -> list[str]:
        speedups = self.event.speedups
        low, high = 0.0, max(1.25, *speedups) * 1.08
        span = max(1, len(speedups) - 1)
        bottom = TOP + PLOT_HEIGHT

        def place(m: int, speed: float) -> tuple[float, float]:
            return PLOT_LEFT + m / span * (RIGHT - PLOT_LEFT - 12), bottom - (speed - low) / (high - low) * PLOT_HEIGHT

        points = [(m, *place(m, speed)) for m, speed in enumerate(speedups) if speed > 0]
        one = place(0, 1.0)[1]
        way = "M" + "L".join(f"{number(x)} {number(y)}" for _, x, y in points)
        parts = [heading(PLOT_LEFT - 34, 96, "predicted speed-up")]
        parts.append(rectangle(PLOT_LEFT, TOP, RIGHT - PLOT_LEFT, PLOT_HEIGHT, 0, {"fill": FAINT}))
        parts.append(
            element("path", {"d": f"M{PLOT_LEFT} {number(one)}H{RIGHT}", "stroke": INK, "stroke-dasharray": "5 4"})
        )
        parts += [
            label(PLOT_LEFT - 8, place(0, speed)[1] + 4, f"{speed:g}×", size=11.5, anchor="end")
            for speed in _ticks(high)
        ]
        parts.append(element("path", {"d": way, "fill": "none", "stroke": BLUE, "stroke-width": 2}))
        for m, x, y in points:
            about = {"data-testid": "number", "data-drafts": m, "data-speed": f"{speedups[m]:.2f}"}
            parts.append(element("circle", {"cx": x, "cy": y, "r": 3, "fill": BLUE, **about}))
        if self.chosen < len(speedups):
            parts.append(_ring(*place(self.chosen, speedups[self.chosen])))
        step = max(1, -(-span // 8))
        parts += [
            label(place(m, 0)[0], bottom + 18, str(m), size=11.5, anchor="middle") for m in range(0, span + 1, step)
        ]
        middle = (PLOT_LEFT + RIGHT) / 2
        return [*parts, label(middle, bottom + 38, "drafts of all requests together", size=12, anchor="middle")]

    def _legend(self, y: float) -> str:
        parts = [
            _cell(MARGIN, y - 17, 60, 0.9, True),
            label(MARGIN + 68, y + 2, "may be drafted", size=12, fill=INK),
            _cell(MARGIN + 214, y - 17, 60, 0.4, False),
            label(MARGIN + 282, y + 2, "not to be drafted", size=12, fill=INK),
            element("path", {"d": f"M{PLOT_LEFT + 150} {y - 2}h28", "stroke": INK, "stroke-dasharray": "5 4"}),
            label(PLOT_LEFT + 186, y + 2, "plain decoding", size=12, fill=INK),
        ]
        if self.chosen < len(self.event.speedups):
            parts += [_ring(PLOT_LEFT, y - 2), label(PLOT_LEFT + 16, y + 2, "the chosen number", size=12, fill=INK)]
        return element("g", {"data-testid": "legend"}, *parts)


def _listed(texts: list[str], most: int) -> str:
    """The first `most` of `texts`, and how many there are besides."""
    more = [f"+{len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more])


def _cell(x: float, y: float, width: float, chance: float, chosen: bool) -> str:
    height = ROW - 6
    look = {"fill": GREEN, "fill-opacity": 0.16, "stroke": GREEN, "stroke-width": 1.5} if chosen else {}
    frame = rectangle(x, y, width, height, 5, look or {"fill": "none", "stroke": MUTED, "stroke-dasharray": "3 3"})
    text = f"✓ {chance:.2f}" if chosen and width >= 50 else f"{chance:.2f}"
    about = {"data-testid": "slot", "data-state": "drafted" if chosen else "left out"}
    ink = INK if chosen else MUTED
    return element("g", about, frame, label(x + width / 2, y + 18, text, size=11.5, fill=ink, anchor="middle"))


def _ring(x: float, y: float) -> str:
    look = {"fill": "none", "stroke": ORANGE, "stroke-width": 3, "data-testid": "chosen"}
    return element("circle", {"cx": x, "cy": y, "r": 8, **look})


def _ticks(high: float) -> list[float]:
    step = next(s for s in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 1e9) if high / s <= 6)
    return [step * i for i in range(int(high / step) + 1)]
