"""The rounds of one request at half a page's width, to be shown beside the block pool (`narrow_pages`)."""

from __future__ import annotations

from minillm.trace.acceptance_state import AcceptanceState, RequestAcceptance, Round
from minillm.viz.draw.colours import INK, owner_letter
from minillm.viz.draw.plural import plural
from minillm.viz.draw.svg import BOLD, MARGIN, TITLE, card, element, heading, label, spans
from minillm.viz.draw.token_text import LINE_HEIGHT, draw_text
from minillm.viz.pages.block_tables import draw_chip
from minillm.viz.speculation.acceptance_words import describe
from minillm.viz.speculation.round_tokens import (
    MORE,
    draw_legend,
    draw_more,
    draw_place,
    draw_share,
    draw_token,
    num_columns,
)

WIDTH = 484
RIGHT = WIDTH - MARGIN
ROWS_TOP, ROW, BOX, MAX_ROUNDS = 118, 30, 25, 8
DRAFTS, TARGET, TARGET_WIDTH = 54, 330, 82
MAX_COLUMNS = 12
GAP, BAR = 5, 40
BARS_TOP = ROWS_TOP + MAX_ROUNDS * ROW + 14
LEGEND_TOP = BARS_TOP + BAR + 44
TEXT_TOP = LEGEND_TOP + 66
MAX_LINES = 4


def draw_narrow(state: AcceptanceState, request: RequestAcceptance | None) -> str:
    """The card: the headline, the last rounds, what was accepted by position, the text so far."""
    shown = request.rounds[-MAX_ROUNDS:] if request else []
    first = len(request.rounds) - len(shown) if request else 0
    gamma = state.engine.num_speculative_tokens if state.engine else 0
    count = num_columns(shown, gamma, MAX_COLUMNS)
    more = max(0, (len(request.accepted_by_position()) if request else 0) - count)
    width = (TARGET - 10 - DRAFTS - (MORE if more else 0) - (count - 1) * GAP) / count
    waiting = "waiting for the first draft" if gamma else "no drafts: every token costs one target forward"
    text = draw_text(request.prompt, request.tokens, MARGIN, TEXT_TOP, RIGHT - MARGIN, MAX_LINES) if request else []
    return card(
        "token-acceptance",
        TEXT_TOP + LINE_HEIGHT * MAX_LINES,
        "Token acceptance" + (f", request {owner_letter(request.index)}" if request else ""),
        describe(state, request, max_rounds=MAX_ROUNDS).replace("\n", " "),
        *_header(state, request, first),
        *(_row(judged, first + i + 1, ROWS_TOP + i * ROW, count, width) for i, judged in enumerate(shown)),
        "" if shown else label(DRAFTS, ROWS_TOP + 17, waiting, size=13),
        *_bars(request, count, more, width),
        draw_legend(LEGEND_TOP, RIGHT),
        heading(MARGIN, TEXT_TOP - 20, "end of the text so far"),
        *text,
        width=WIDTH,
    )


def _header(state: AcceptanceState, request: RequestAcceptance | None, earlier: int) -> list[str]:
    gamma = state.engine.num_speculative_tokens if state.engine else 0
    facts = f"step {state.step}" + (f" · γ = {gamma}" if gamma else "")
    parts = [spans(MARGIN, 36, ("Token acceptance", TITLE), (facts, {"dx": 10}))]
    if request is not None:
        parts.append(draw_chip(request.index, 52))
    if request is not None and request.rounds:
        tau = (f"{request.tokens_per_forward:.2f}", {**BOLD, "font-size": 20, "data-testid": "tau"})
        share = (f"{request.acceptance_rate:.0%}", BOLD)
        rest = (" tokens per target forward · ", {"fill": INK}), share, (" of drafts accepted", {"fill": INK})
        parts.append(spans(56, 69, tau, *rest))
    else:
        parts.append(label(56, 68, "no draft has been judged yet", size=13))
    guesses = f"the draft guesses… ({earlier} above)" if earlier else "the draft guesses…"
    names = ((MARGIN, "no."), (DRAFTS, guesses), (TARGET, "…target adds"))
    return [*parts, *(heading(x, ROWS_TOP - 12, name) for x, name in names)]


def _row(judged: Round, number: int, top: float, count: int, width: float) -> str:
    base = top + 17
    parts = [label(36, base, str(number), size=13, weight=600, fill=INK, anchor="middle")]
    for i, place in enumerate(judged.candidates_by_position[:count]):
        parts += draw_place(judged, place, DRAFTS + i * (width + GAP), top, width, BOX)
    parts.append(draw_more(judged, count, DRAFTS + count * (width + GAP), base))
    if judged.target_token is not None:
        parts.append(draw_token(TARGET, top, TARGET_WIDTH, judged.target_token, judged.added_origin or "sampled", BOX))
    plus = "1" if judged.target_token is not None else "0"
    total = (str(judged.tokens), BOLD)
    end, size = (RIGHT, 12) if judged.tokens < 10 else (RIGHT + 12, 11)
    parts.append(spans(end, base, (f"{judged.num_accepted}+{plus}=", {}), total, anchor="end", size=size))
    return element("g", {"data-testid": "round"}, *parts)


def _bars(request: RequestAcceptance | None, count: int, more: int, width: float) -> list[str]:
    """Below each position, the share of its drafts that were accepted; beside them, the arithmetic of the headline."""
    positions = request.accepted_by_position() if request else []
    parts = [
        label(MARGIN, BARS_TOP + 18, "✓", size=10, weight=600),
        label(MARGIN, BARS_TOP + 30, "AT", size=10, weight=600),
    ]
    for i in range(count):
        counts = positions[i] if i < len(positions) else None
        parts.append(draw_share(DRAFTS + i * (width + GAP), BARS_TOP, width, BAR, i + 1, counts))
    if more:
        parts.append(label(DRAFTS + count * (width + GAP), BARS_TOP + BAR + 15, f"+{more}", size=11))
    if request is not None and request.rounds:
        lines = (
            f"{request.num_accepted} accepted + {request.added + request.undrafted_forwards} added",
            f"= {plural(request.gained, 'token')}",
            f"in {plural(request.forwards, 'forward')}",
        )
        parts += [label(TARGET, BARS_TOP + 12 + 16 * i, line, fill=INK) for i, line in enumerate(lines)]
    return parts
