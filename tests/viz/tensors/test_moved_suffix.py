"""An edit as a picture: tokens by what happens to them, the shift, and the angles of the rotation."""

from __future__ import annotations

import math
import re

import pytest

from minillm.errors import ConfigError
from minillm.viz.tensors.moved_suffix import RADIUS, MovedSuffix
from tests.viz.pictures import description, found, parse, states, text_of

TOKENS = ["def", " f", "(", "x", ")", ":", "\n", " return", " <x>"]
PICTURE = MovedSuffix(TOKENS, 3, 4, ["width", ",", " height"], [1.0, 0.1, 0.001])


def test_tokens_are_told_apart_by_what_happens_to_them() -> None:
    before = ["prefix"] * 3 + ["removed"] + ["suffix"] * 5
    after = ["prefix"] * 3 + ["new"] * 3 + ["suffix"] * 5
    assert states(PICTURE.to_svg(), "token") == before + after
    assert PICTURE.after == ["def", " f", "(", "width", ",", " height", *TOKENS[4:]] and PICTURE.shift == 2


def test_each_pair_turns_by_shift_times_frequency() -> None:
    pairs = found(PICTURE.to_svg(), "pair")
    assert [float(pair.get("data-turn")) for pair in pairs] == pytest.approx([2.0, 0.2, 0.002])
    for pair, frequency in zip(pairs, PICTURE.frequencies, strict=True):
        for hand, position in zip(pair[2:], (4, 6), strict=True):
            x, y, to_x, to_y = map(float, re.findall(r"-?[\d.]+", hand.get("d")))
            assert to_x - x == pytest.approx((RADIUS - 4) * math.cos(position * frequency), abs=0.15)
            assert y - to_y == pytest.approx((RADIUS - 4) * math.sin(position * frequency), abs=0.15)
        assert (pair[2].get("stroke-dasharray"), pair[3].get("stroke-dasharray")) == ("4 3", None)


def test_a_shorter_text_turns_back() -> None:
    back = MovedSuffix(TOKENS, 1, 4, [], [0.5])
    assert back.shift == -3 and "δ = -3" in text_of(parse(back.to_svg())) and "−86°" in back.describe()
    same = MovedSuffix(TOKENS, 1, 2, ["g"], [0.5])
    assert "nothing turns" in text_of(parse(same.to_svg()))
    assert "<circle" in MovedSuffix(TOKENS, 0, 0, ["a"] * 8, [1.0]).to_svg()


def test_the_words() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe()
    assert "3 tokens are kept, 1 removed, 3 computed, and 5 move by +2 positions" in words
    assert "by +115°, +11°, +0.11°" in words
    assert repr(PICTURE) == "<MovedSuffix>" and PICTURE.to_svg() == PICTURE.to_svg()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((TOKENS, 4, 3, [], [1.0]), "span 4:3 of 9 tokens"),
        ((TOKENS, 4, 9, [], [1.0]), "leaves no suffix"),
        ((TOKENS, 0, 1, ["a"] * 40, [1.0]), "48 tokens"),
        ((TOKENS, 0, 1, ["a"], []), "0 pairs"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: tuple, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MovedSuffix(*arguments)
