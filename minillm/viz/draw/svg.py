"""The SVG building blocks of all pictures: elements, text, and the white card around them.

Only presentation attributes are used, no style sheets: every notebook front end keeps the attributes, and pictures on
one page cannot restyle each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape

from minillm.viz.draw.colours import HAIRLINE, INK, MUTED, PAPER
from minillm.viz.draw.glyphs import PLACEHOLDER, cells, printable, shorten

SANS = "ui-sans-serif,system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
WIDTH = 980
MARGIN = 24
RIGHT = WIDTH - MARGIN
MONO_EM = 0.605
"""Width of a monospaced cell in em, of the widest font in `MONO`."""
SANS_EM = 0.54
"""Average width of a character of running text in em, of the widest usual system font."""
UID = PLACEHOLDER
"""Placeholder in ids and references for the part that makes them unique; `card` replaces it. No text can hold it."""

Attributes = Mapping[str, "str | float | None"]
TITLE: Attributes = {"font-size": 17, "font-weight": 650, "fill": INK}
"""Of a picture's title in `spans`."""
BOLD: Attributes = {"font-weight": 700, "fill": INK}
"""Of a number to notice in `spans`."""


def number(value: float) -> str:
    """`value` with at most one decimal and no trailing zero."""
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, attributes: Attributes, *children: str) -> str:
    """An XML element. `children` are already XML. Attribute values are escaped; those that are `None` are left out."""
    pairs = "".join(f' {key}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    return f"<{name}{pairs}>{''.join(children)}</{name}>" if children else f"<{name}{pairs}/>"


def _value(value: str | float) -> str:
    if not isinstance(value, str):
        return number(value)
    return escape("".join(char if char == UID else printable(char) for char in value))


def characters(text: str) -> str:
    """`text` as XML character data; its spaces do not collapse."""
    return escape("".join(map(printable, text)).replace(" ", "\u00a0"), quote=False)


def words(text: str) -> str:
    """Like `characters`, for running text: spaces stay spaces."""
    return escape("".join(map(printable, text)), quote=False)


def paragraph(text: str) -> str:
    """The lines of `text` as sentences of one paragraph: a full stop between each and the next."""
    return re.sub(r"\.?\n", ". ", text)


def label(
    x: float,
    y: float,
    text: str,
    *,
    size: float | None = 12,
    fill: str | None = MUTED,
    weight: int | None = None,
    anchor: str | None = None,
    family: str | None = None,
) -> str:
    """One line of text with its baseline at `y`. `anchor` is SVG's `text-anchor`; the rest is inherited if `None`."""
    attributes = {"x": x, "y": y, "font-size": size, "fill": fill, "font-weight": weight}
    attributes |= {"text-anchor": anchor, "font-family": family}
    return element("text", attributes, characters(text) if family == MONO else words(text))


def spans(x: float, y: float, *parts: tuple[str, Attributes], anchor: str | None = None, size: float = 13) -> str:
    """One line of differently styled parts, placed one after the other so that their widths need not be known."""
    children = [element("tspan", attributes, words(text)) for text, attributes in parts]
    return element("text", {"x": x, "y": y, "font-size": size, "fill": MUTED, "text-anchor": anchor}, *children)


def heading(x: float, y: float, text: str) -> str:
    """A small headline inside a picture."""
    return label(x, y, text.upper(), size=11.5, weight=600)


def rectangle(x: float, y: float, width: float, height: float, radius: float, attributes: Attributes) -> str:
    """A rectangle with round corners."""
    return element("rect", {"x": x, "y": y, "width": width, "height": height, "rx": radius, **attributes})


def hatch(name: str, colour: str, spacing: float = 5, stroke: float = 1.6) -> str:
    """A pattern of diagonal lines, to be used as `fill=hatched(name)`."""
    box = {"width": spacing, "height": spacing, "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    paper = element("rect", {"width": spacing, "height": spacing, "fill": PAPER})
    line = element("rect", {"width": stroke, "height": spacing, "fill": colour})
    return element("pattern", {"id": f"{name}-{UID}", **box}, paper, line)


def hatched(name: str) -> str:
    """The fill that refers to `hatch(name, …)`."""
    return f"url(#{name}-{UID})"


def fit_words(text: str, width: float, size: float) -> str:
    """`text` shortened so that it fits into `width` pixels of the sans font at `size`."""
    return shorten(text, int(width / (SANS_EM * size)))


def fit_clauses(clauses: Sequence[str], width: float, size: float) -> str:
    """As many whole `clauses` as fit into `width` pixels, joined by dots, with the number of those left out."""
    for shown in range(len(clauses), 0, -1):
        left = len(clauses) - shown
        line = " · ".join([*clauses[:shown], *([f"{left} more"] if left else [])])
        if cells(line) * SANS_EM * size <= width:
            return line
    return fit_words(clauses[0], width, size) if clauses else ""


def fit_mono(text: str, width: float, size: float) -> str:
    """`text` shortened so that it fits into `width` pixels of the monospaced font at `size`."""
    return shorten(text, max(1, int(width / (MONO_EM * size))))


def mono_width(text: str, size: float) -> float:
    """Pixels that `text` takes in the monospaced font at `size`."""
    return cells(text) * MONO_EM * size


def card(name: str, height: float, title: str, description: str, *body: str, width: float = WIDTH) -> str:
    """The picture: a white card with a hairline border, and `title` and `description` for screen readers.

    Ids are made from the content, so they are the same for the same picture and differ between pictures on one page.
    """
    border = {"fill": PAPER, "stroke": HAIRLINE}
    root = {
        "xmlns": "http://www.w3.org/2000/svg",
        "width": width,
        "height": height,
        "viewBox": f"0 0 {number(width)} {number(height)}",
        "role": "img",
        "aria-labelledby": f"t-{UID} d-{UID}",
        "data-testid": name,
        "font-family": SANS,
        "fill": INK,
        "style": "max-width:100%;height:auto",
    }
    picture = element(
        "svg",
        root,
        element("title", {"id": f"t-{UID}"}, words(title)),
        element("desc", {"id": f"d-{UID}"}, words(description)),
        rectangle(0.5, 0.5, width - 1, height - 1, 10, border),
        *body,
    )
    return picture.replace(UID, sha256(picture.encode()).hexdigest()[:8])
