"""The colours of every picture: Okabe–Ito, plus ink, paper and greys.

Colour is never the only cue: each user of this file adds a letter, a hatch, a dash or a sign.
Masataka Okabe and Kei Ito, "Color Universal Design" (2008).
"""

from __future__ import annotations

from string import ascii_uppercase

INK = "#1f2430"
MUTED = "#6b7280"
HAIRLINE = "#d5d9e0"
FAINT = "#f3f4f6"
PAPER = "#ffffff"

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
PURPLE, SKY, YELLOW, VERMILLION = "#CC79A7", "#56B4E9", "#F0E442", "#D55E00"

OWNERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)
"""Vermillion is missing on purpose: it always means "thrown away"."""

DISCARDED = "#9aa1ac"
CACHED = "#b9bfca"
"""For the hatch of cached blocks: without an owner, but still in the prefix cache."""
TEXT_ON_PAPER = {"accepted": "#00775a", "recovered": "#a35a00", "bonus": "#00639c", "sampled": INK, "prompt": MUTED}
"""Colour by origin of a token; darkened until each has a contrast of at least 4.5 : 1 on white."""


def owner_colour(index: int) -> str:
    """Colour of request number `index` (from 0). Colours repeat; the letters distinguish the requests."""
    return OWNERS[index % len(OWNERS)]


def owner_letter(index: int) -> str:
    """A, B, … Z, AA, AB, … for request number `index` (from 0)."""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, len(ascii_uppercase))
        letters = ascii_uppercase[rest] + letters
    return letters


def ink_on(colour: str) -> str:
    """Ink or paper, whichever is easier to read on `colour`."""
    dark, light = (_luminance(c) + 0.05 for c in (INK, PAPER))
    background = _luminance(colour) + 0.05
    # White letters on saturated colours are more readable than the formula says, hence the factor 1.5.
    return PAPER if light / background * 1.5 > background / dark else INK


def tint(colour: str, strength: float) -> str:
    """`colour` mixed with white; opaque, so that nothing behind it is visible."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - c) * strength):02x}" for c in channels)


def _luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
