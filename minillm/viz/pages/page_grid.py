"""The physical pages: a grid of blocks, each a grid of slots. The more blocks, the smaller they are drawn.

Pages that look the same are in one group, and all slots of one owner in one state are one path, so that a frame of 256
blocks stays below 50 KB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice

from minillm.trace.cache_state import CacheState
from minillm.trace.page import Page, SlotState
from minillm.viz.draw.colours import DISCARDED, FAINT, HAIRLINE, MUTED, PAPER, owner_colour, owner_letter, tint
from minillm.viz.draw.svg import MONO, Attributes, element, hatched, label, number, rectangle
from minillm.viz.pages.page_geometry import FINE_SLOTS, LARGE, SMALLEST_SLOT, geometry
from minillm.viz.pages.page_marks import PageMarks
from minillm.viz.pages.page_slots import Run, draw_runs, runs_of, slots_look

MAX_PAGES = 256
FINE_TINT, COARSE_TINT = 0.1, 0.26
"""How strongly a page has the colour of its owner, where slots are drawn and where they are too many."""
ONE_LETTER = 20.0
"""A dense page that is narrower has room for one letter or, if it is shared, for the number of its owners."""
MAX_STRIPES = 6
"""The most owners whose colours the outline of a shared page shows; the number of owners is written out."""


def blocks_to_draw(state: CacheState) -> list[int]:
    """The ids of the blocks to draw: all if there are few; else first owned ones, then just freed, cached, free."""
    if state.num_blocks <= MAX_PAGES:
        return list(range(state.num_blocks))
    first = dict.fromkeys(chain(sorted(state.owners), sorted(state.freed), sorted(state.in_prefix_cache)))
    others = (block_id for block_id in range(state.num_blocks) if block_id not in first)
    return sorted(islice(chain(first, others), MAX_PAGES))


def not_drawn(state: CacheState, drawn: Sequence[int], right: float, y: float) -> str:
    """How many blocks `drawn` leaves out, in a line that ends at `right`; empty if it has them all."""
    missing = state.num_blocks - len(drawn)
    if not missing:
        return ""
    used = len(state.owners.keys() - set(drawn))
    text = f"{len(drawn)} of {state.num_blocks} drawn; left out: {used} used, {missing - used} others"
    return label(right, y, text, size=11.5, anchor="end")


class PageGrid:
    """Draws `pages` with their top at `top`. `indices`: each owner's index, which determines its letter and colour."""

    def __init__(
        self, pages: Sequence[Page], block_size: int, indices: dict[str, int], top: float, *, narrow: bool = False
    ) -> None:
        self.pages, self.indices, self.top = pages, indices, top
        self.geometry = geometry(len(pages), block_size, narrow=narrow)
        self.fine = len(pages) * block_size <= FINE_SLOTS and self.geometry.slot >= SMALLEST_SLOT

    @property
    def height(self) -> float:
        """Height of the grid."""
        return self.geometry.height(len(self.pages))

    @property
    def two_owners(self) -> str:
        """How a page says that two requests own it."""
        return "2" if self.geometry.page_width < ONE_LETTER else "×2"

    def draw(self) -> str:
        """The SVG: all pages, then all slots, then all text."""
        groups = defaultdict(list)
        for place, page in enumerate(self.pages):
            groups[(page.state, page.owners[:1])].append((place, page))
        bodies = "".join(self._bodies(members) for _, members in sorted(groups.items()))
        marks = PageMarks(self.pages, self.geometry)
        bodies += marks.bands() + marks.rings() + self._stripes()
        slots = [self._slots(owner, members) for (_, owner), members in sorted(groups.items())]
        filling = element("g", slots_look(self.geometry, fine=self.fine), *slots)
        layers = bodies, filling, self._text(), marks.arrows()
        return element("g", {"transform": f"translate(0 {number(self.top)})"}, *layers)

    def _colour(self, owner: str) -> str:
        return owner_colour(self.indices[owner])

    def _bodies(self, members: list[tuple[int, Page]]) -> str:
        state, owners = members[0][1].state, members[0][1].owners
        look: Attributes = {"fill": FAINT, "stroke": HAIRLINE}
        if state in ("freed", "cached"):
            fill, known = (FAINT, HAIRLINE) if state == "freed" else (hatched("cached"), DISCARDED)
            dashed = {"stroke-width": 1.4, "stroke-dasharray": "4 3"} if owners else {}
            look = {"fill": fill, "stroke": self._colour(owners[0]) if owners else known, **dashed}
        elif owners:
            colour = self._colour(owners[0])
            look = {
                "fill": tint(colour, FINE_TINT if self.fine else COARSE_TINT),
                "stroke": colour,
                "stroke-width": 1.4,
            }
        return element("g", look, *(self._body(place, page) for place, page in members))

    def _body(self, place: int, page: Page) -> str:
        about = {"data-testid": "page", "data-state": page.state}
        if self.geometry.dense:
            return element("path", {**about, "d": self.geometry.outline(place)})
        x, y = self.geometry.corner(place)
        width, height = self.geometry.page_width, self.geometry.page_height
        return rectangle(x, y, width, height, width / 10, {**about, "data-block": page.block_id})

    def _stripes(self) -> str:
        """The outlines of shared pages: alternating dashes in the colours of their owners."""
        outlines: dict[tuple[int, int, str], list[str]] = defaultdict(list)
        for place, page in enumerate(self.pages):
            owners = page.owners[:MAX_STRIPES] if page.state == "shared" else ()
            for turn, owner in enumerate(owners):
                outlines[(len(owners), turn, self._colour(owner))].append(self.geometry.outline(place))
        width, dash = (1.6, 3) if self.geometry.dense else (3, 6)
        stripes = []
        for (count, turn, colour), paths in sorted(outlines.items()):
            pattern = {"stroke-dasharray": f"{dash} {dash * (count - 1)}", "stroke-dashoffset": -turn * dash or None}
            stripes.append(element("path", {"d": "".join(paths), "stroke": colour, **pattern}))
        return element("g", {"fill": "none", "stroke-width": width}, *stripes) if stripes else ""

    def _slots(self, owner: tuple[str, ...], members: list[tuple[int, Page]]) -> str:
        runs: dict[SlotState, list[Run]] = defaultdict(list)
        for place, page in members:
            for state, run in runs_of(page.slots, place, self.geometry.columns):
                runs[state].append(run)
        colour = self._colour(owner[0]) if owner else MUTED
        return "".join(
            draw_runs(state, runs[state], colour, self.geometry, fine=self.fine)
            for state in ("empty", "written", "fresh", "rolled_back")
            if runs[state]
        )

    def _text(self) -> str:
        if self.geometry.dense:
            return self._row_numbers() + self._letters()
        size = 11 if self.geometry.page_width >= 50 else 8.5
        written = "".join(self._head(place, page) for place, page in enumerate(self.pages))
        return element("g", {"font-size": size}, written)

    def _head(self, place: int, page: Page) -> str:
        g = self.geometry
        x, y = g.corner(place)
        base = y + g.head * 0.65
        name = str(page.block_id) if page.copied_from is None else f"{page.block_id}←{page.copied_from}"
        is_free = page.state in ("free", "freed")  # MUTED is too pale on the colour of an owner
        look: Attributes = {"fill": MUTED if is_free else None, "font-family": MONO}
        left = element("text", {"x": x + g.pad - 1, "y": base, **look, **_halo(page)}, name)
        if not page.owners:
            return left
        names = self._names(page, shown=2 if g.page_width == LARGE else 1)
        gone = page.state in ("freed", "cached")
        look = {"font-weight": 700, "text-anchor": "end", "fill": MUTED if gone else None, **_halo(page)}
        return left + element("text", {"x": x + g.page_width - g.pad + 1, "y": base, **look}, names)

    def _names(self, page: Page, shown: int) -> str:
        """`A`, `A B ×2`, `A–D ×4`, `A… ×3`: the owners, and their number if there are several."""
        indices = [self.indices[owner] for owner in page.owners]
        letters = [owner_letter(index) for index in sorted(indices)]
        names = " ".join(letters[:shown])
        if len(letters) > 2 and shown > 1:
            together = max(indices) - min(indices) == len(indices) - 1
            names = f"{letters[0]}–{letters[-1]}" if together else f"{letters[0]}…"
        return f"{names} ×{len(letters)}" if page.state == "shared" else names

    def _row_numbers(self) -> str:
        """The id of each row's first block, and … where blocks between it and the last one are left out."""
        g, written = self.geometry, []
        for place in range(0, len(self.pages), g.per_row):
            ids = [page.block_id for page in self.pages[place : place + g.per_row]]
            text = f"{ids[0]}" if ids[-1] - ids[0] < len(ids) else f"{ids[0]}…"
            y = g.corner(place)[1] + g.head + (g.page_height - g.head) / 2
            written.append(label(g.left - 8, y, text, size=10.5, anchor="end", family=MONO))
        return "".join(written)

    def _letters(self) -> str:
        """The owners' letters, or their number: one text element per row, with a position for each character."""
        rows: dict[float, list[tuple[str, str]]] = defaultdict(list)
        for place, page in enumerate(self.pages):
            x, y = self.geometry.corner(place)
            name = owner_letter(self.indices[page.owners[0]]) if page.owners else ""
            left, advance = x + 3, 7.0
            if self.geometry.page_width < ONE_LETTER:
                # Half a name would be another request's.
                name = str(len(page.owners)) if page.state == "shared" else name if len(name) == 1 else ""
                left, advance = (left, 7.0) if len(name) < 2 else (x + 0.3, 5.2)
            elif page.state == "shared":
                name += f"×{len(page.owners)}"
                advance = 7.0 if len(name) < 4 else 5.5
            rows[y + 9] += [(sign, number(left + advance * i)) for i, sign in enumerate(name)]
        texts = [
            element("text", {"x": " ".join(x for _, x in signs), "y": y}, "".join(sign for sign, _ in signs))
            for y, signs in rows.items()
            if signs
        ]
        return element("g", {"font-size": 9, "font-weight": 700}, *texts)


def _halo(page: Page) -> Attributes:
    """A white outline for text on the hatch of a cached page."""
    if page.state != "cached":
        return {}
    return {"stroke": PAPER, "stroke-width": 4, "stroke-linejoin": "round", "paint-order": "stroke"}
