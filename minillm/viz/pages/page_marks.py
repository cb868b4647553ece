"""Marks on pages that a step reused, copied or evicted, and on pages that the prefix cache can find."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minillm.trace.page import Page
from minillm.viz.draw.colours import INK, PAPER
from minillm.viz.draw.svg import element, hatched, number
from minillm.viz.pages.page_geometry import Geometry

MAX_ARROWS = 12


class PageMarks:
    """Draws the marks of `pages`, placed by `geometry`."""

    def __init__(self, pages: Sequence[Page], geometry: Geometry) -> None:
        self.pages, self.geometry = pages, geometry

    def bands(self) -> str:
        """A hatched band at the bottom of used pages that the prefix cache can find; vermillion if just evicted."""
        findable = [i for i, page in enumerate(self.pages) if page.in_prefix_cache and page.state != "cached"]
        evicted = [i for i, page in enumerate(self.pages) if page.evicted]
        return self._band("findable", findable, hatched("cached")) + self._band("evicted", evicted, hatched("void"))

    def rings(self) -> str:
        """A dark ring around pages that a request reused in this step instead of computing them."""
        reused = [place for place, page in enumerate(self.pages) if page.reused]
        if not reused:
            return ""
        away = 1.2 if self.geometry.dense else 2.6
        path = "".join(self.geometry.outline(place, away) for place in reused)
        look = {"fill": "none", "stroke": INK, "stroke-width": 1.2 if self.geometry.dense else 1.8}
        about = {"data-testid": "reused", "data-count": len(reused)}
        return element("path", {**about, **look, "stroke-linejoin": "round", "d": path})

    def arrows(self) -> str:
        """An arrow from each copied block to its copy. Arrows from one block do not cross: longer ones lie outside."""
        places = {page.block_id: place for place, page in enumerate(self.pages)}
        copies = [(page.copied_from, page.block_id) for page in self.pages if page.copied_from in places]
        arrows = [(places[source or 0], places[target]) for source, target in copies[:MAX_ARROWS]]
        drawn = []
        for source, target in sorted(arrows, key=lambda ends: -abs(ends[1] - ends[0])):
            ends = [end for start, end in arrows if start == source and (end > source) == (target > source)]
            inside = sum(abs(end - source) < abs(target - source) for end in ends)
            drawn.append(self._arrow(source, target, inside, len(ends)))
        return "".join(drawn)

    def _band(self, state: str, places: Sequence[int], fill: str) -> str:
        if not places:
            return ""
        g = self.geometry
        high = 2.0 if g.dense else 4.0
        path = ""
        for place in places:
            x, y = g.corner(place)
            start, low = f"{number(x + g.pad)} {number(y + g.page_height - g.pad / 2 - high / 2)}", number(high)
            path += f"M{start}h{number(g.page_width - 2 * g.pad)}v{low}h-{number(g.page_width - 2 * g.pad)}z"
        return element(
            "path", {"data-testid": "band", "data-state": state, "data-count": len(places), "fill": fill, "d": path}
        )

    def _arrow(self, source: int, target: int, inside: int, beside: int) -> str:
        """One of `beside` arrows from a block in the same direction, of which `inside` are shorter."""
        g = self.geometry
        (sx, sy), (tx, ty) = (g.corner(place) for place in (source, target))
        sx, tx = sx + g.page_width / 2, tx + g.page_width / 2
        if sy == ty:
            sx += math.copysign(min(6.0, g.page_width / 2 / beside), sx - tx) * inside
            high = sy - min(22.0, g.row_pitch / 4) * (inside + 1) / beside
            way = f"M{number(sx)} {number(sy + 3)}Q{number((sx + tx) / 2)} {number(high)} {number(tx)} {number(ty)}"
            down = 1
        else:
            down = 1 if ty > sy else -1
            start, end = (sy + g.page_height, ty) if down > 0 else (sy, ty + g.page_height)
            middle = number((start + end) / 2)
            way = f"M{number(sx)} {number(start - 3 * down)}C{number(sx)} {middle} {number(tx)} {middle}"
            way += f" {number(tx)} {number(end)}"
        tip_y = ty if down > 0 else ty + g.page_height
        tip = f"M{number(tx)} {number(tip_y + 3 * down)}l-4.5 {-8 * down}h9z"
        halo = element("path", {"d": way, "stroke": PAPER, "stroke-width": 5})
        line = element("path", {"d": way, "stroke": INK, "stroke-width": 1.8})
        head = element("path", {"d": tip, "fill": INK, "stroke": PAPER, "stroke-width": 1})
        return element("g", {"data-testid": "copy", "fill": "none"}, halo, line, head)
