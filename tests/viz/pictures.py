"""Reading a picture back: its elements by test id, its title and its description."""

from __future__ import annotations

from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def parse(svg):
    """Fails if `svg` is not well-formed."""
    return ElementTree.fromstring(svg)


def found(svg, testid):
    return [element for element in parse(svg).iter() if element.get("data-testid") == testid]


def states(svg, testid):
    return [element.get("data-state") for element in found(svg, testid)]


def text_of(element):
    return "".join(element.itertext())


def description(svg):
    return text_of(parse(svg).find(f"{SVG}desc"))
