"""Acceptance by position under its three names: conditional, marginal, and accepted divided by drafted.

Of the drafts at a position, the *conditional* acceptance counts those whose predecessors were all accepted; the others
were never judged. The *marginal* acceptance divides by all rounds. So a round gives 1 + the sum of the marginal ones in
tokens. If all rounds have equally many drafts, a marginal one is the product of the conditional ones up to its
position.

A round in which the text ended before the last accepted draft or the target's own token gave fewer tokens than that. It
is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError, TraceError
from minillm.trace import TokensCommitted, Trace
from minillm.viz.draw.colours import BLUE, FAINT, HAIRLINE, INK, MUTED, ORANGE
from minillm.viz.draw.output import Picture
from minillm.viz.draw.plural import plural
from minillm.viz.draw.svg import (
    BOLD,
    MARGIN,
    RIGHT,
    TITLE,
    card,
    element,
    hatch,
    hatched,
    label,
    number,
    rectangle,
    spans,
)

TOP, HEIGHT = 122, 170
LEFT = 70
BOTTOM = TOP + HEIGHT


@dataclass(frozen=True)
class PositionAcceptance(Picture):
    """What became of the drafts at each position of a round.

    Raises `ConfigError` for no rounds or positions, or for counts that contradict each other.
    """

    judged: Sequence[int]
    """By position: drafts whose predecessors were all accepted."""
    accepted: Sequence[int]
    """By position: drafts that were accepted, with all before them."""
    rounds: int
    """Rounds with at least one draft, without those that are left out."""
    drafted: int
    """Drafts of these rounds, judged or not."""
    name: str = ""
    left_out: int = 0
    """Rounds without a token of the target's own, because the text ended."""

    def __post_init__(self) -> None:
        judged, accepted = list(self.judged), list(self.accepted)
        if not judged or len(judged) != len(accepted):
            raise ConfigError(f"{len(judged)} judged and {len(accepted)} accepted positions: give one of each, or more")
        # What is judged at a position was accepted at the one before.
        counts = [self.rounds, *(count for pair in zip(judged, accepted, strict=True) for count in pair)]
        if judged[-1] < 1 or accepted[-1] < 0 or counts != sorted(counts, reverse=True) or self.drafted < sum(judged):
            raise ConfigError(
                f"{self.rounds} rounds with {self.drafted} drafts, judged {judged} and accepted {accepted}: at each "
                "position, no more may be accepted than judged, and no more judged than accepted before it"
            )

    @classmethod
    def of(cls, trace: Trace, name: str = "") -> PositionAcceptance:
        """Count the rounds of all requests of `trace`, except those that gave fewer tokens because the text ended.

        Raises `TraceError` if there is no round to count, or for draft trees."""
        found = [event for event in trace.of(TokensCommitted) if event.num_drafts]
        rounds = [event for event in found if len(event.token_ids) > event.num_accepted]
        if not found:
            raise TraceError("this trace has no round with drafts; generate with a speculative_config")
        if any(event.path is not None for event in found):
            raise TraceError("this trace has draft trees, in which a draft has no single position; use another method")
        if not rounds:
            raise TraceError("every round of this trace ended its text; generate more tokens")
        most = max(event.num_drafts for event in rounds)
        judged = [sum(i < min(event.num_drafts, event.num_accepted + 1) for event in rounds) for i in range(most)]
        accepted = [sum(i < event.num_accepted for event in rounds) for i in range(most)]
        known = sum(n > 0 for n in judged)
        drafted = sum(event.num_drafts for event in rounds)
        return cls(judged[:known], accepted[:known], len(rounds), drafted, name, len(found) - len(rounds))

    @property
    def conditional(self) -> list[float]:
        """By position: accepted / judged."""
        return [a / n for a, n in zip(self.accepted, self.judged, strict=True)]

    @property
    def marginal(self) -> list[float]:
        """By position: accepted / rounds."""
        return [a / self.rounds for a in self.accepted]

    @property
    def accepted_share(self) -> float:
        """Accepted / drafted."""
        return sum(self.accepted) / self.drafted

    @property
    def tokens_per_round(self) -> float:
        """τ = 1 + Σ of the marginal acceptances."""
        return 1 + sum(self.marginal)

    def to_svg(self) -> str:
        """The picture: two bars for each position."""
        pitch = (RIGHT - LEFT) / len(self.judged)
        bars = [self._position(i, LEFT + i * pitch, pitch) for i in range(len(self.judged))]
        whose = f" · {self.name}" if self.name else ""
        omitted = f" · {self._left_out_words}" if self.left_out else ""
        return card(
            "position-acceptance",
            BOTTOM + 100,
            "Acceptance by position",
            self.describe(),
            element("defs", {}, hatch("marginal", ORANGE)),
            spans(
                MARGIN,
                38,
                ("Acceptance by position", TITLE),
                (f"{plural(self.rounds, 'round')}{whose}{omitted}", {"dx": 10}),
            ),
            spans(
                MARGIN,
                66,
                (f"{sum(self.accepted)} accepted / {self.drafted} drafted = ", {"fill": INK}),
                (f"{self.accepted_share:.0%}", {**BOLD, "data-testid": "share"}),
                (" · tokens per round: 1 + sum of the marginal = ", {"fill": INK}),
                (f"{self.tokens_per_round:.2f}", {**BOLD, "data-testid": "tau"}),
            ),
            *_grid(),
            *bars,
            _legend(BOTTOM + 78),
        )

    def describe(self) -> str:
        """The picture in words."""
        places = [
            f"position {i + 1}: conditional {c:.0%} ({self.accepted[i]} of {self.judged[i]} judged), marginal {m:.0%}"
            for i, (c, m) in enumerate(zip(self.conditional, self.marginal, strict=True))
        ]
        return (
            f"{plural(self.rounds, 'round')}. {'; '.join(places)}. Accepted / drafted: {self.accepted_share:.0%}. "
            f"{self.tokens_per_round:.2f} tokens per round."
        ) + (f" {self._left_out_words.capitalize()}." if self.left_out else "")

    def __repr__(self) -> str:
        return "<PositionAcceptance>"

    @property
    def _left_out_words(self) -> str:
        return f"left out: {plural(self.left_out, 'round')} cut short by the end of a text"

    def _position(self, i: int, left: float, pitch: float) -> str:
        width, middle = min(58.0, max(1.0, (pitch - 14) / 2)), left + pitch / 2
        about = {"data-testid": "position", "data-judged": self.judged[i], "data-accepted": self.accepted[i]}
        return element(
            "g",
            about,
            _bar(middle - width - 2, width, self.conditional[i], {"fill": BLUE}, "conditional"),
            _bar(middle + 2, width, self.marginal[i], {"fill": hatched("marginal"), "stroke": ORANGE}, "marginal"),
            label(
                middle, BOTTOM + 18, f"draft {i + 1}" if pitch >= 70 else str(i + 1), size=12, fill=INK, anchor="middle"
            ),
            label(middle, BOTTOM + 34, f"{self.accepted[i]} of {self.judged[i]} judged", size=11, anchor="middle")
            if pitch >= 110
            else "",
        )


def _bar(x: float, width: float, share: float, look: dict[str, str | float | None], kind: str) -> str:
    height = HEIGHT * share
    box = rectangle(x, BOTTOM - height, width, height, 2, {**look, "data-kind": kind, "data-share": f"{share:.3f}"})
    return box + label(
        x + width / 2, BOTTOM - height - 5, f"{share:.0%}", size=11.5, weight=600, fill=INK, anchor="middle"
    )


def _grid() -> list[str]:
    parts = [rectangle(LEFT, TOP, RIGHT - LEFT, HEIGHT, 0, {"fill": FAINT})]
    for share in (0.0, 0.5, 1.0):
        y = BOTTOM - HEIGHT * share
        parts.append(element("path", {"d": f"M{LEFT} {number(y)}H{RIGHT}", "stroke": MUTED if not share else HAIRLINE}))
        parts.append(label(LEFT - 8, y + 4, f"{share:.0%}", size=11.5, anchor="end"))
    return parts


def _legend(y: float) -> str:
    return element(
        "g",
        {"data-testid": "legend"},
        rectangle(LEFT, y - 13, 18, 16, 2, {"fill": BLUE}),
        label(LEFT + 26, y, "conditional: of the drafts whose predecessors were accepted", size=12, fill=INK),
        rectangle(LEFT + 430, y - 13, 18, 16, 2, {"fill": hatched("marginal"), "stroke": ORANGE}),
        label(LEFT + 456, y, "marginal: of all rounds", size=12, fill=INK),
    )
