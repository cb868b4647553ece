"""The picture of speculative decoding: a round is a row, a token is a box, with the arithmetic beside it."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.errors import TraceError
from minillm.trace import Trace
from minillm.trace.acceptance_state import AcceptanceState, RequestAcceptance, Round
from minillm.trace.replay import Replay
from minillm.viz.draw.colours import HAIRLINE, INK, ink_on, owner_colour, owner_letter
from minillm.viz.draw.plural import plural
from minillm.viz.draw.svg import BOLD, MARGIN, RIGHT, TITLE, card, element, fit_words, heading, label, rectangle, spans
from minillm.viz.draw.token_text import LINE_HEIGHT, draw_text
from minillm.viz.draw.view import View
from minillm.viz.speculation.acceptance_words import describe, round_words
from minillm.viz.speculation.narrow_rounds import draw_narrow
from minillm.viz.speculation.round_tokens import (
    MORE,
    draw_legend,
    draw_more,
    draw_place,
    draw_share,
    draw_token,
    num_columns,
)

MAX_ROUNDS, MAX_LINES = 6, 3
ROWS_TOP, ROW = 106, 40
DRAFTS, GAP, TARGET = 92, 8, 124
BAR = 46


@dataclass(frozen=True)
class Columns:
    """The positions of the columns: one per draft position, the target's token, and the sum."""

    count: int
    more: int = 0
    """Positions that have no column."""

    @property
    def room(self) -> int:
        """Width that the columns leave for the number of drafts without one."""
        return MORE if self.more else 0

    @property
    def width(self) -> float:
        """Width of a draft's box."""
        return min(128.0, (624 - self.room - (self.count - 1) * GAP) / self.count)

    def left(self, position: int) -> float:
        """Left edge of the draft at `position` (from 0)."""
        return DRAFTS + position * (self.width + GAP)

    @property
    def target(self) -> float:
        """Left edge of the target's own token."""
        return max(self.left(self.count) + self.room, 420) + 12

    @property
    def total(self) -> float:
        """Left edge of the sums."""
        return self.target + TARGET + 22


class AcceptanceStrip(View):
    """The draft tokens of one request, those that the target rejected, and the tokens that the target added.

    Without `request_id` it shows the first request with verified drafts. `narrow`: at half the width, to be shown
    beside another picture."""

    def __init__(self, trace: Trace, request_id: str | None = None, *, narrow: bool = False) -> None:
        super().__init__(trace)
        self.narrow = narrow
        self.request_id = request_id
        self._replay = Replay(trace, AcceptanceState)

    def to_svg(self, step: int | None = None) -> str:
        """The picture after `step`, by default after the last event.

        Raises `TraceError` for a step or a request that the trace does not have."""
        state = self._replay.at(step)
        request = self._request(state)
        if self.narrow:
            return draw_narrow(state, request)
        shown = request.rounds[-MAX_ROUNDS:] if request else []
        gamma = state.engine.num_speculative_tokens if state.engine else 0
        count, positions = num_columns(shown, gamma), len(request.accepted_by_position()) if request else 0
        columns = Columns(count, max(0, positions - count))
        first = len(request.rounds) - len(shown) if request else 0
        bars_top = ROWS_TOP + max(len(shown), 1) * ROW + 26
        legend = bars_top + BAR + 40
        text = _text(request, legend + 56)
        return card(
            "token-acceptance",
            legend + 56 + LINE_HEIGHT * max(len(text) - 1, 0) + 20,
            f"Token acceptance{_whose(request)}",
            describe(state, request, max_rounds=MAX_ROUNDS).replace("\n", " "),
            _header(state, request),
            _headings(columns, first),
            *(_row(judged, first + i + 1, ROWS_TOP + i * ROW, columns) for i, judged in enumerate(shown)),
            "" if shown else _nothing(gamma),
            _bars(request, columns, bars_top),
            element("path", {"d": f"M{MARGIN} {legend - 14}H{RIGHT}", "stroke": HAIRLINE}),
            draw_legend(legend + 8, RIGHT),
            *text,
        )

    def describe(self, step: int | None = None) -> str:
        """The picture in words, with all rounds."""
        state = self._replay.at(step)
        return describe(state, self._request(state))

    def _request(self, state: AcceptanceState) -> RequestAcceptance | None:
        if self.request_id is None:
            requests = list(state.requests.values())
            return next((r for r in requests if r.rounds), requests[0] if requests else None)
        if state.requests and self.request_id not in state.requests:
            known = ", ".join(state.requests)
            raise TraceError(f"request {self.request_id!r} is not in this trace; it has {known}")
        return state.requests.get(self.request_id)


def _whose(request: RequestAcceptance | None) -> str:
    return f", request {owner_letter(request.index)}" if request else ""


def _header(state: AcceptanceState, request: RequestAcceptance | None) -> str:
    title = ("Token acceptance", TITLE)
    if request is None or state.engine is None:
        return spans(MARGIN, 38, title, ("waiting for a request", {"dx": 10}))
    drafter = f" · draft {state.engine.drafter}" if state.engine.drafter else ""
    gamma = f" · γ = {state.engine.num_speculative_tokens}" if state.engine.num_speculative_tokens else ""
    line = spans(MARGIN, 38, title, (fit_words(f"step {state.step}{drafter}{gamma}", 400, 13), {"dx": 10}))
    line += _chip(request)
    if not request.rounds:
        return line
    tau, share = f"{request.tokens_per_forward:.2f}", f"{request.acceptance_rate:.0%}"
    headline = spans(
        RIGHT,
        38,
        (tau, {**BOLD, "font-size": 20, "data-testid": "tau"}),
        (" tokens per target forward · ", {"fill": INK}),
        (share, BOLD),
        (" of drafts accepted", {"fill": INK}),
        anchor="end",
    )
    return line + headline


def _chip(request: RequestAcceptance) -> str:
    """The second line: the request's letter and the result of its latest round."""
    colour, name = owner_colour(request.index), owner_letter(request.index)
    size = 11.5 if len(name) == 1 else 9.5
    chip = rectangle(MARGIN, 50, 20, 20, 5, {"fill": colour})
    chip += label(34, 64, name, size=size, weight=700, fill=ink_on(colour), anchor="middle")
    if not request.rounds:
        return chip + label(52, 64, "no draft has been judged yet", size=12.5)
    latest = fit_words(round_words(request.rounds[-1]), RIGHT - 140, 12.5)
    parts = (f"Round {len(request.rounds)}", {"font-weight": 600}), (latest, {"dx": 8, "fill": INK})
    return chip + spans(52, 64, *parts, size=12.5)


def _headings(columns: Columns, earlier: int) -> str:
    drafts = f"the draft guesses… ({plural(earlier, 'earlier round')} above)" if earlier else "the draft guesses…"
    names = ((MARGIN, "round"), (DRAFTS, drafts), (columns.target, "…the target adds"), (columns.total, "tokens"))
    return "".join(heading(x, ROWS_TOP - 12, name) for x, name in names)


def _nothing(gamma: int) -> str:
    why = "waiting for the first draft" if gamma else "decoded without drafts: every token costs one target forward"
    return label(DRAFTS, ROWS_TOP + 20, why, size=13)


def _row(judged: Round, number: int, top: float, columns: Columns) -> str:
    base = top + 21
    parts = [label(42, base, str(number), size=14, weight=600, fill=INK, anchor="middle")]
    for i, place in enumerate(judged.candidates_by_position[: columns.count]):
        parts += draw_place(judged, place, columns.left(i), top, columns.width)
    parts.append(draw_more(judged, columns.count, columns.left(columns.count), base))
    if judged.target_token is not None:
        parts.append(draw_token(columns.target, top, TARGET, judged.target_token, judged.added_origin or "sampled"))
    added = "1" if judged.target_token is not None else "0"
    total = (str(judged.tokens), BOLD)
    parts.append(spans(columns.total, base, (f"{judged.num_accepted} + {added} = ", {}), total))
    return element("g", {"data-testid": "round"}, *parts)


def _bars(request: RequestAcceptance | None, columns: Columns, top: float) -> str:
    """Below each position, the share of its drafts that were accepted; beside them, the arithmetic of the headline."""
    head = label(MARGIN, top + BAR / 2 - 2, "ACCEPTED", size=9.5, weight=600)
    head += label(MARGIN, top + BAR / 2 + 12, "AT", size=9.5, weight=600)
    positions = request.accepted_by_position() if request else []
    bars = [
        draw_share(columns.left(i), top, columns.width, BAR, i + 1, positions[i] if i < len(positions) else None)
        for i in range(columns.count)
    ]
    more = f"+{columns.more}" if columns.more else ""
    head += label(columns.left(columns.count), top + BAR + 15, more, size=11.5) if more else ""
    return head + "".join(bars) + (_sum(request, columns, top) if request and request.rounds else "")


def _sum(request: RequestAcceptance, columns: Columns, top: float) -> str:
    """Three lines that derive the headline."""
    alone = f" + {request.undrafted_forwards} without a draft" if request.undrafted_forwards else ""
    lines = (
        (f"{request.num_accepted} of {request.drafted} accepted + {request.added} added", ""),
        (f"{alone} = {plural(request.gained, 'token')} in {plural(request.forwards, 'forward')}".lstrip(), ""),
        ("= ", f"{request.tokens_per_forward:.2f} tokens per forward"),
    )
    return "".join(
        spans(columns.target, top + 13 + 19 * i, (plain, {"fill": INK}), (bold, BOLD))
        for i, (plain, bold) in enumerate(lines)
    )


def _text(request: RequestAcceptance | None, top: float) -> list[str]:
    if request is None:
        return []
    return [
        heading(MARGIN, top - 20, "end of the text so far"),
        *draw_text(request.prompt, request.tokens, MARGIN, top, RIGHT - MARGIN, MAX_LINES),
    ]
