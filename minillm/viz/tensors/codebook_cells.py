"""Points on the plane, the centres of a codebook, and each centre's cell: the points that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, FAINT, INK, MUTED, ORANGE, PAPER
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import BOLD, MARGIN, RIGHT, TITLE, card, element, fit_words, label, number, rectangle, spans

Point = tuple[float, float]
SIDE, GAP = 400.0, 40.0
TOP = 112
MOST = 3


@dataclass(frozen=True)
class PointCloud:
    """Points and the centres that stand for them."""

    name: str
    points: Sequence[Point]
    centres: Sequence[Point]

    @property
    def error(self) -> float:
        """The squared distance of points from their nearest centre, as a share of their squared length."""
        size = sum(x * x + y * y for x, y in self.points)
        lost = sum(min((x - a) ** 2 + (y - b) ** 2 for a, b in self.centres) for x, y in self.points)
        return lost / size if size else 0.0


@dataclass(frozen=True)
class CodebookCells(Picture):
    """One square for each cloud, all on the same scale. Raises `ConfigError` if a cloud has no points or no centres."""

    title: str
    clouds: Sequence[PointCloud]

    def __post_init__(self) -> None:
        if not 1 <= len(self.clouds) <= MOST:
            raise ConfigError(f"{len(self.clouds)} clouds; this picture shows 1 to {MOST}")
        for cloud in self.clouds:
            if not cloud.points or not cloud.centres:
                raise ConfigError(
                    f"cloud {cloud.name!r} has {len(cloud.points)} points and {len(cloud.centres)} centres; it needs "
                    "both"
                )

    @property
    def reach(self) -> float:
        """The coordinate at the squares' edges."""
        return 1.05 * max(max(abs(x), abs(y)) for cloud in self.clouds for x, y in cloud.points) or 1.0

    def to_svg(self) -> str:
        """The picture: dots are points, diamonds are centres, lines are the borders of their cells."""
        side = min(SIDE, (RIGHT - MARGIN - GAP * (len(self.clouds) - 1)) / len(self.clouds))
        height = TOP + side + 84
        return card(
            "codebook-cells",
            height,
            self.title,
            self.describe(),
            spans(MARGIN, 38, (fit_words(self.title, RIGHT - MARGIN, 17), TITLE)),
            spans(
                MARGIN, 64, ("all points of a cell are stored as its centre, which takes only the cell's number", {})
            ),
            *(self._square(cloud, MARGIN + i * (side + GAP), side) for i, cloud in enumerate(self.clouds)),
            _legend(height - 24),
        )

    def describe(self) -> str:
        """The picture in words."""
        return " ".join(
            f"{cloud.name}: {len(cloud.points)} points, {len(cloud.centres)} centres; "
            f"{cloud.error:.1%} of the squared length is lost."
            for cloud in self.clouds
        )

    def __repr__(self) -> str:
        return "<CodebookCells>"

    def _square(self, cloud: PointCloud, left: float, side: float) -> str:
        reach = self.reach

        def place(point: Point) -> Point:
            return left + side * (point[0] / reach + 1) / 2, TOP + side * (1 - point[1] / reach) / 2

        cells = []
        for centre in cloud.centres:
            polygon = [place(corner) for corner in cell(centre, cloud.centres, reach)]
            if polygon:
                way = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in polygon) + "Z"
                cells.append(element("path", {"d": way, "fill": FAINT, "stroke": MUTED, "data-testid": "cell"}))
        dots = "".join(f"M{number(x)} {number(y)}h0" for x, y in map(place, cloud.points))
        look = {"d": dots, "stroke": BLUE, "stroke-width": 3.2, "stroke-linecap": "round", "stroke-opacity": ".55"}
        diamonds = [element("g", {"data-testid": "centre"}, _diamond(*place(centre))) for centre in cloud.centres]
        lost = spans(
            left, TOP + side + 22, (f"{cloud.error:.1%}", BOLD), (" of the squared length is lost", {}), size=12.5
        )
        about = {"data-testid": "cloud", "data-name": cloud.name, "data-error": f"{cloud.error:.4f}"}
        return element(
            "g",
            about,
            label(left, TOP - 12, fit_words(cloud.name, side, 13), size=13, weight=600, fill=INK),
            rectangle(left, TOP, side, side, 0, {"fill": PAPER, "stroke": MUTED}),
            *cells,
            element("path", look),
            *diamonds,
            lost,
        )


def cell(centre: Point, centres: Sequence[Point], reach: float) -> list[Point]:
    """The corners of the part of the square from -`reach` to `reach` that is nearer to `centre` than to the others."""
    corners: list[Point] = [(-reach, -reach), (reach, -reach), (reach, reach), (-reach, reach)]
    for other in centres:
        if other == centre:
            continue
        across = (other[0] - centre[0], other[1] - centre[1])
        middle = ((other[0] + centre[0]) / 2, (other[1] + centre[1]) / 2)
        corners = _cut(corners, across, across[0] * middle[0] + across[1] * middle[1])
    return corners


def _cut(corners: Sequence[Point], across: Point, border: float) -> list[Point]:
    """The part of a convex polygon with x · `across` ≤ `border`."""
    found: list[Point] = []
    for (x, y), (u, v) in zip(corners, [*corners[1:], *corners[:1]], strict=True):
        here, there = across[0] * x + across[1] * y - border, across[0] * u + across[1] * v - border
        if here <= 0:
            found.append((x, y))
        if here * there < 0:
            part = here / (here - there)
            found.append((x + part * (u - x), y + part * (v - y)))
    return found


def _diamond(x: float, y: float) -> str:
    way = "M0 -6.5L6.5 0L0 6.5L-6.5 0z"
    place = f"translate({number(x)} {number(y)})"
    look = {"d": way, "fill": ORANGE, "stroke": INK, "transform": place}
    return element("path", look)


def _legend(y: float) -> str:
    dot = {"d": f"M{MARGIN + 6} {number(y - 4)}h0", "stroke": BLUE, "stroke-width": 6, "stroke-linecap": "round"}
    return element(
        "g",
        {"data-testid": "legend"},
        element("path", dot),
        label(MARGIN + 18, y, "a key's pair of channels", size=12, fill=INK),
        _diamond(MARGIN + 208, y - 4),
        label(MARGIN + 222, y, "a centre", size=12, fill=INK),
        rectangle(MARGIN + 310, y - 10, 14, 12, 0, {"fill": FAINT, "stroke": MUTED}),
        label(MARGIN + 332, y, "its cell", size=12, fill=INK),
    )
