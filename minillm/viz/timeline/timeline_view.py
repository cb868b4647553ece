"""Requests × steps as a Gantt chart, and a comparison of continuous and static batching of the same requests."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace import Trace
from minillm.trace.replay import Replay
from minillm.trace.static_batching import jobs_of, static_schedule
from minillm.trace.timeline_state import Row, Timeline, TimelineState
from minillm.viz.draw.colours import BLUE, CACHED, DISCARDED, INK, PAPER, VERMILLION, owner_letter
from minillm.viz.draw.glyphs import beginning
from minillm.viz.draw.plural import plural
from minillm.viz.draw.svg import MARGIN, RIGHT, TITLE, card, element, hatch, hatched, label, paragraph, rectangle, spans
from minillm.viz.draw.view import View
from minillm.viz.pages.cache_words import PROMPT
from minillm.viz.timeline.timeline_lanes import BARS, Columns, cell_look, fitted

MAX_COMPARED = 12
"""Rows of each of two compared timelines, so that both fit on one screen."""
NAMES = {
    "waiting": "waiting",
    "prefill": "prefill",
    "cached": "tokens reused, not computed",
    "decode": "decode",
    "verify": "verify",
    "preempted": "preempted",
    "recompute": "recomputed after preemption",
    "idle": "holds its slot, idle",
    "finished": "finished",
    "aborted": "aborted",
}
NUMBERS = {"prefill": ", n tokens", "verify": ", accepted/drafted"}
"""What the numbers in cells are."""


class TimelineView(View):
    """What each request did in each step. `num_steps` fixes the scale in advance, so that the columns of a live picture
    do not shrink as steps are added."""

    def __init__(self, trace: Trace, num_steps: int = 0) -> None:
        super().__init__(trace)
        self.num_steps = num_steps
        self._replay = Replay(trace, TimelineState)

    def to_svg(self, step: int | None = None) -> str:
        """The picture after `step`, by default after the last event. Raises `TraceError` for an unknown step."""
        timeline = self._replay.at(step).timeline
        [lanes] = fitted([timeline], max(timeline.num_steps, self.num_steps), 84)
        legend, height = _legend(lanes.kinds(), lanes.numbered(), 84 + lanes.height + 10)
        body = [_title("Requests × steps", lanes.columns), _facts(timeline, 62), lanes.drawing, legend]
        words = describe(timeline, lanes.shown)
        return _card("timeline", "Timeline", 84 + lanes.height + height + 16, words, body)

    def describe(self, step: int | None = None) -> str:
        """The picture in words, a line per request."""
        return describe(self._replay.at(step).timeline)


class TimelineComparison(View):
    """Above, what the engine did; below, a model of what static batching would have done with the same requests.

    `batch_size` is that of the static batches, by default the engine's `max_num_seqs`. The model gives every request
    as many output tokens as it had steps with new tokens, so speculation favours neither side.
    """

    def __init__(self, trace: Trace, batch_size: int | None = None) -> None:
        super().__init__(trace)
        self.batch_size = batch_size
        self._whole, self._replay = Replay(trace, TimelineState), Replay(trace, TimelineState)
        self._modelled: tuple[int, Timeline] | None = None
        """The number of events that are modelled, and the model."""

    def timelines(self) -> tuple[Timeline, Timeline]:
        """The recorded and the modelled timeline of the whole trace. Raises `ConfigError` for a batch size below 1."""
        num_events = len(self.trace)
        recorded = self._whole.at().timeline
        if self._modelled is None or self._modelled[0] != num_events:
            size = recorded.max_num_seqs or 1 if self.batch_size is None else self.batch_size
            modelled = static_schedule(jobs_of(recorded), size, recorded.max_num_batched_tokens or None)
            self._modelled = num_events, modelled
        else:
            modelled = self._modelled[1]
        return recorded, modelled

    def to_svg(self, step: int | None = None) -> str:
        """The picture of the whole trace; with `step`, both timelines are cut after the same number of steps."""
        whole = self.timelines()
        recorded, modelled = shown = self._cut(whole, step)
        num_steps = max(timeline.num_steps for timeline in whole)
        above, below = fitted([recorded, modelled], num_steps, 112, gap=62, most_rows=MAX_COMPARED)
        low = below.top
        kinds, numbered = above.kinds() | below.kinds(), above.numbered() | below.numbered()
        legend, height = _legend(kinds, numbered, low + below.height + 10)
        body = [
            _title("Continuous and static batching", above.columns),
            spans(MARGIN, 62, (_verdict(*whole), {"fill": INK})),
            _name("continuous", "recorded", 90),
            _facts(recorded, 90, x=MARGIN + 180),
            above.drawing,
            _name("static", "modelled: counted, not run", low - 24),
            _facts(modelled, low - 24, x=MARGIN + 260),
            below.drawing,
            legend,
        ]
        size = low + below.height + height + 16
        words = _describe_both(whole, shown, (above.shown, below.shown))
        return _card("timeline-comparison", "Continuous and static batching", size, words, body)

    def describe(self, step: int | None = None) -> str:
        """Both timelines in words."""
        whole = self.timelines()
        return _describe_both(whole, self._cut(whole, step))

    def _cut(self, whole: tuple[Timeline, Timeline], step: int | None) -> tuple[Timeline, Timeline]:
        recorded, modelled = whole
        if step is None:
            return recorded, modelled
        done = step - recorded.first_step + 1
        return self._replay.at(step).timeline, _until(modelled, done)


def _describe_both(
    whole: tuple[Timeline, Timeline],
    shown: tuple[Timeline, Timeline],
    drawn: tuple[Sequence[Row] | None, Sequence[Row] | None] = (None, None),
) -> str:
    recorded, modelled = map(describe, shown, drawn)
    return f"{_verdict(*whole)}\nContinuous, recorded. {recorded}\nStatic, modelled. {modelled}"


def _verdict(recorded: Timeline, modelled: Timeline) -> str:
    same = f"The same {plural(len(recorded.rows), 'request')} and {plural(recorded.committed_tokens, 'output token')}"
    return f"{same}: {recorded.num_steps} steps continuous, {modelled.num_steps} steps static."


def describe(timeline: Timeline, drawn: Sequence[Row] | None = None) -> str:
    """A timeline in words, a line per request. With `drawn` only those rows, and the number of the others."""
    rows = timeline.rows if drawn is None else drawn
    lines = [f"{plural(timeline.num_steps, 'step')}, {headline(timeline)}.", *map(_row_words, rows)]
    hidden = len(timeline.rows) - len(rows)
    return "\n".join([*lines, f"And {plural(hidden, 'more request')}"] if hidden else lines)


def headline(timeline: Timeline) -> str:
    """`slot utilisation 67% (192 of 288 request-steps), 6.4 tokens per step`."""
    share = f"{timeline.batch_slot_utilisation:.0%} ({timeline.useful_slots} of {timeline.slots} request-steps)"
    return f"slot utilisation {share}, {timeline.tokens_per_step:.1f} tokens per step"


def _row_words(row: Row) -> str:
    counts = row.steps_by_kind()
    shown = ("waiting", "prefill", "decode", "verify", "recompute", "idle")
    facts = [f"{kind} {counts[kind]}" for kind in shown if counts[kind]]
    cached = sum(cell.num_cached for cell in row.cells.values())
    facts += [f"{plural(cached, 'token')} reused, not computed"] if cached else []
    facts += [f"preempted {preempted}×"] if (preempted := counts["preempted"]) else []
    when = f" in step {row.end}" if row.cells else ""  # one that never ran may end before a step begins
    end = f"; ended{when} ({row.reason})" if row.end is not None else ""
    who = f"{owner_letter(row.index)} {beginning(row.prompt, PROMPT)!r} from step {row.arrival}"
    done = f"steps {', '.join(facts)}" if facts else "has not run" if row.end is None else "never ran"
    return f"{who}: {done}{end}"


def _until(timeline: Timeline, num_steps: int) -> Timeline:
    """The first `num_steps` steps of a modelled timeline."""
    kept = max(0, min(num_steps, timeline.num_steps))
    rows = []
    for row in timeline.rows:
        if row.arrival <= kept:
            cells = {step: cell for step, cell in row.cells.items() if step <= kept}
            over = row.end is not None and row.end <= kept
            rows.append(
                Row(
                    row.index,
                    row.prompt,
                    row.arrival,
                    row.num_prompt_tokens,
                    cells,
                    *((row.end, row.reason) if over else ()),
                )
            )
    return Timeline(timeline.max_num_seqs, timeline.max_num_batched_tokens, True, 1, kept, rows)


def _card(name: str, title: str, height: float, description: str, body: Sequence[str]) -> str:
    defs = element("defs", {}, hatch("void", VERMILLION), hatch("cached", CACHED, 4, 1.5))
    return card(name, height, title, paragraph(description), defs, *body)


def _title(text: str, columns: Columns) -> str:
    scale = (
        "a column is a step" if columns.bucket == 1 else f"a column is {columns.bucket} steps, drawn as most of them"
    )
    return spans(MARGIN, 38, (text, TITLE), (scale, {"dx": 10}))


def _name(text: str, source: str, y: float) -> str:
    return spans(
        MARGIN,
        y,
        (text, {"font-weight": 650, "fill": INK, "font-size": 14}),
        (source, {"dx": 8, "font-style": "italic"}),
    )


def _facts(timeline: Timeline, y: float, x: float = MARGIN) -> str:
    """The headline: utilisation in bold, then the numbers behind it."""
    bold = {"font-weight": 650, "fill": INK}
    return spans(
        x,
        y,
        (f"{timeline.batch_slot_utilisation:.0%}", {**bold, "data-testid": "utilisation"}),
        (f" slot utilisation: {timeline.useful_slots} of {timeline.slots} request-steps", {}),
        (f"{timeline.tokens_per_step:.1f}", {"dx": 16, **bold}),
        (" tokens per step", {}),
        (f"{timeline.num_steps}", {"dx": 16, **bold}),
        (" steps", {}),
        size=12.5,
    )


def _legend(present: set[str], numbered: set[str], top: float) -> tuple[str, float]:
    """The legend and its height. `present`: keys of `NAMES`; `numbered`: those whose cells have a number or a sign."""
    parts, x, y = [], float(MARGIN), top
    for kind in (kind for kind in NAMES if kind in present):
        name = NAMES[kind] + (NUMBERS.get(kind, "") if kind in numbered else "")
        width = 26 + len(name) * 6.3
        if x + width > RIGHT:
            x, y = float(MARGIN), y + 22
        parts.append(_swatch(kind, x, y, kind in numbered) + label(x + 26, y + 11.5, name, size=11.5, fill=INK))
        x += width + 18
    bars = "in the bars: dark prefill, light the rest"
    if x + 26 + len(bars) * 6.3 > RIGHT:
        x, y = float(MARGIN), y + 22
    two = rectangle(x, y + 1, 9, 12, 0, {"fill": INK}) + rectangle(x + 10, y + 1, 9, 12, 0, {"fill": BARS["light"]})
    parts.append(two + label(x + 26, y + 11.5, bars, size=11.5, fill=INK))
    return element("g", {"data-testid": "legend"}, *parts), y - top + 14


def _swatch(kind: str, x: float, y: float, numbered: bool) -> str:
    if kind == "waiting":
        return element("path", {"d": f"M{x} {y + 7}h20", "stroke": DISCARDED, "stroke-dasharray": "2 2"})
    if kind == "cached":
        return rectangle(x, y + 5, 20, 6, 0, {"fill": hatched("cached")})
    if kind == "finished":
        return rectangle(x + 8, y, 3, 14, 1, {"fill": INK})
    if kind == "aborted":
        return label(x + 5, y + 12, "×", size=15, weight=700, fill=VERMILLION)
    inset = 3.5 if kind in ("decode", "idle") else 0
    box = rectangle(x, y + inset, 20, 14 - 2 * inset, 0, cell_look(kind, BLUE))
    inside = {"prefill": ("n", PAPER), "verify": ("3/4", INK), "preempted": ("✗", VERMILLION)}.get(kind)
    if not inside or not numbered:
        return box
    return box + label(x + 10, y + 10.5, inside[0], size=9.5, fill=inside[1], anchor="middle")
