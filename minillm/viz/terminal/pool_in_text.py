"""The block pool in a terminal: one cell per page, with its owner's letter and its fill.

A████  A████  B██▓·  B╳···  AA██·  ─────
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from string import ascii_uppercase
from textwrap import wrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from minillm.trace.cache_state import CacheState
from minillm.trace.page import Page, SlotState
from minillm.viz.draw.colours import ink_on, owner_colour, owner_letter
from minillm.viz.draw.glyphs import cells, one_line, shorten
from minillm.viz.pages.block_tables import rows_to_show
from minillm.viz.pages.cache_changes import changes, letter
from minillm.viz.pages.cache_words import request_work, unit, waste_share
from minillm.viz.pages.page_grid import blocks_to_draw
from minillm.viz.terminal.signs import Glyphs, glyphs, plain

PAGE = 5
"""Signs of a page: the name of its owner, or the number of its owners, and then its fill. Each sign of the fill stands
for an equal part of the slots, so the fill is coarser after a longer name."""
CELL = PAGE + 1
PRECEDENCE: tuple[SlotState, ...] = ("rolled_back", "fresh", "written", "empty", "cached", "free")
"""A sign that stands for several slots shows the most remarkable one."""


class CacheBlocks:
    """Renderable of a `CacheState`; `max_rows` limits the rows of pages and the requests listed."""

    def __init__(self, state: CacheState, max_rows: int = 6) -> None:
        self.state, self.max_rows = state, max_rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        signs, width = glyphs(ascii_only=options.ascii_only), options.max_width
        lines = [self._facts(signs), *self._requests(width), *self._pages(width, signs), self._changes(signs)]
        for line in lines:
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis" if not options.ascii_only else "crop")
            yield Text(plain(line.plain, ascii_only=True)) if options.ascii_only else line

    def _facts(self, signs: Glyphs) -> Text:
        state = self.state
        used = f"{state.used_blocks} of {state.num_blocks} {unit(state)}s"
        used += f"{signs.dot}{state.cached_blocks} cached" if state.cached_blocks else ""
        return Text.assemble(("KV cache", "bold"), f"  {used}{signs.dot}{waste_share(state)}")

    def _requests(self, width: int) -> list[Text]:
        shown, hidden = rows_to_show(self.state, self.max_rows)
        room = max(width - 46, 6)
        longest = max((len(letter(request)) for request in shown), default=1)
        lines = []
        for request in shown:
            colour = owner_colour(request.index)
            prompt = shorten(one_line(request.prompt), room)
            count = "–" if request.status == "finished" else f"{request.num_computed} of {request.num_tokens}"
            parts = f"  {prompt}{' ' * (room - cells(prompt))}{count:>12}  ", (request_work(request), "dim")
            name = f" {letter(request).ljust(longest)} "
            lines.append(Text.assemble((name, f"bold {ink_on(colour)} on {colour}"), *parts))
        return [*lines, Text(f"  and {hidden} more", "dim")] if hidden else lines

    def _pages(self, width: int, signs: Glyphs) -> list[Text]:
        state, per_row = self.state, max(width // CELL, 1)
        room = per_row * self.max_rows
        order = blocks_to_draw(state)
        if len(order) > room:
            first = [b for b in order if b in state.owners or b in state.freed or b in state.in_prefix_cache]
            order = sorted([*first, *(b for b in order if b not in {*first})][:room])
        pages = [self._cell(state.page(block_id), signs) for block_id in order]
        rows = [Text(" ").join(pages[i : i + per_row]) for i in range(0, len(pages), per_row)]
        left = state.num_blocks - len(order)
        return [*rows, Text(f"and {left} more blocks", "dim")] if left else rows

    def _cell(self, page: Page, signs: Glyphs) -> Text:
        if not page.owners:
            return Text(signs.slots[page.slots[0][0]] * PAGE, "dim")
        index = self.state.requests[page.owners[0]].index
        name = owner_letter(index) if page.state != "shared" else str(len(page.owners))
        fill = Text()
        for state in _parts(page.slots, max(PAGE - len(name), 1)):
            style = {"rolled_back": "bold red", "fresh": "bold bright_white"}.get(state, owner_colour(index))
            fill.append(signs.slots[state], "dim" if state in ("free", "cached") else style)
        chip = f"bold {owner_colour(index)}" if page.state in ("used", "shared") else "dim"
        return Text.assemble((name, chip), fill)

    def _changes(self, signs: Glyphs) -> Text:
        done = signs.dot.join(changes(self.state))
        return Text.assemble((f"step {self.state.step}  ", "bold"), done or "nothing changed")


def _parts(slots: Sequence[tuple[SlotState, int]], count: int) -> list[SlotState]:
    """The slots of a page (see `Page`) as `count` parts, each in the state of its most remarkable slot."""
    ends = list(accumulate(length for _, length in slots))
    bounds = [round(i * ends[-1] / count) for i in range(count + 1)]
    parts = []
    for first, end in pairwise(bounds):
        first = min(first, ends[-1] - 1)
        held = {
            state
            for (state, length), stop in zip(slots, ends, strict=True)
            if stop - length < max(end, first + 1) and first < stop
        }
        parts.append(next(state for state in PRECEDENCE if state in held))
    return parts


def legend(signs: Glyphs, states: Collection[CacheState], width: int) -> Text:
    """What the signs of a page mean, in lines of `width` columns. Those of the prefix cache and names of two letters
    are explained only if one of `states` needs them."""
    names = {"written": "written", "fresh": "written this step", "rolled_back": "rolled back", "empty": "empty (waste)"}
    entries = [f"{signs.slots[state]} {name}" for state, name in names.items()]
    if any(state.cached_blocks for state in states):
        entries.append(f"{signs.slots['cached']} cached")
    entries += [f"{signs.slots['free']} free", "2 shared"]
    letters = len(ascii_uppercase)
    if any(len(state.requests) > letters for state in states):
        entries.append(f"{owner_letter(letters)} request {letters + 1}")
    # A line may end between two entries, but not inside one: `wrap` does not break at no-break spaces.
    lines = wrap("  ".join(entry.replace(" ", "\u00a0") for entry in entries), width)
    return Text("\n".join(lines).replace("\u00a0", " "), "dim", no_wrap=True)
