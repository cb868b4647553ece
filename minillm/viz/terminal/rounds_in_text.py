"""Rounds of speculative decoding in a terminal: a round is a line, a token a coloured word with its sign."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from minillm.trace.acceptance_state import RequestAcceptance, Round
from minillm.viz.draw.colours import owner_letter
from minillm.viz.draw.glyphs import cells, shorten, visible
from minillm.viz.terminal.signs import Glyphs, glyphs, plain

STYLES = {
    "accepted": "green",
    "rejected": "red strike",
    "discarded": "dim strike",
    "recovered": "bold yellow",
    "bonus": "bold cyan",
    "sampled": "",
    "prompt": "dim",
}


class AcceptanceRounds:
    """Renderable of a request's headline, its last `max_rounds` rounds, and the text so far."""

    def __init__(self, request: RequestAcceptance, max_rounds: int = 5, text_lines: int = 2) -> None:
        self.request, self.max_rounds, self.text_lines = request, max_rounds, text_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        signs, width = glyphs(ascii_only=options.ascii_only), options.max_width
        lines = [self._headline()] if self.request.rounds else []
        first = max(len(self.request.rounds) - self.max_rounds, 0)
        shown = enumerate(self.request.rounds[first:], start=first + 1)
        lines += [_round(number, judged, width, signs) for number, judged in shown]
        lines += [self._positions()] if self.request.rounds else []
        lines += self._text(width) if self.text_lines else []
        for line in lines:
            line.no_wrap = True
            line.truncate(width, overflow="crop")
            yield Text(plain(line.plain, ascii_only=True)) if options.ascii_only else line

    def _headline(self) -> Text:
        tau, share = f"{self.request.tokens_per_forward:.2f}", f"{self.request.acceptance_rate:.0%}"
        name = f"Drafts of {owner_letter(self.request.index)}"
        return Text.assemble((name, "bold"), "  ", (tau, "bold"), f" tokens per forward, {share} accepted")

    def _positions(self) -> Text:
        counts = enumerate(self.request.accepted_by_position(), start=1)
        return Text(
            "accepted at " + "  ".join(f"{i}: {accepted / judged:.0%}" for i, (accepted, judged) in counts), "dim"
        )

    def _text(self, width: int) -> list[Text]:
        """The tail of the text, coloured by origin; line ends are signs, so that the height is constant."""
        text = Text.assemble((visible_line(self.request.prompt[-width * self.text_lines :]), STYLES["prompt"]))
        for token in self.request.tokens[-width * self.text_lines :]:
            text.append(visible_line(token.text), STYLES[token.origin])
        widths = list(map(cells, text.plain))
        from_end = _line_starts(widths[::-1], width)
        first = len(text) - from_end[self.text_lines] if len(from_end) > self.text_lines else 0
        while first < len(text) and not widths[first]:  # a combining mark whose character is cut off
            first += 1
        return list(text[first:].divide(_line_starts(widths[first:], width)[1:])) if text else []


def _line_starts(widths: Sequence[int], columns: int) -> list[int]:
    """The first character of each line of at most `columns` columns, from the width of each character."""
    starts, used = [0], 0
    for i, width in enumerate(widths):
        if used + width > columns:
            starts.append(i)
            used = 0
        used += width
    return starts


def visible_line(text: str) -> str:
    """`text` on one line: line ends and control characters as signs, spaces unchanged."""
    return visible(text.replace(" ", "\u00a0")).replace("\u00a0", " ")


def _round(number: int, judged: Round, width: int, signs: Glyphs) -> Text:
    tokens = [(judged.drafts[i], judged.verdicts[i]) for place in judged.candidates_by_position for i in place]
    total = f" {judged.num_accepted}+{judged.tokens - judged.num_accepted}={judged.tokens}"
    room = width - 4 - len(total) - 2
    each = max(room // (len(tokens) + 1) - 1, 2)
    line = Text.assemble((f"{number:>3} ", "bold"))
    for text, verdict in tokens:
        _append(line, signs, text, verdict, each)
    line.append(f"{signs.bar} ", "dim")
    if judged.target_token is not None:
        _append(line, signs, judged.target_token, judged.added_origin or "sampled", each)
    return line.append(total)


def _append(line: Text, signs: Glyphs, text: str, state: str, width: int) -> None:
    word = shorten(visible(text), width - 1)
    sign_style = STYLES[state].replace(" strike", "")
    line.append(signs.signs[state], f"bold {sign_style}").append(word, STYLES[state])
    line.append(" " * max(width - cells(word), 1))
