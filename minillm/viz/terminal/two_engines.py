"""Two engines side by side in a terminal: the current step of each, and a table of results at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from minillm.errors import ConfigError
from minillm.trace import Event, RequestFinished, StepFinished, Trace
from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.cache_state import CacheState
from minillm.trace.replay import Replay
from minillm.trace.run_metrics import RunMetrics
from minillm.viz.draw.colours import owner_letter
from minillm.viz.draw.plural import plural
from minillm.viz.terminal.pool_in_text import CacheBlocks, legend
from minillm.viz.terminal.rounds_in_text import AcceptanceRounds
from minillm.viz.terminal.signs import glyphs

Result = TypeVar("Result")
MIN_INTERVAL = 0.1
SIDE_BY_SIDE = 100
"""With at least so many columns, the engines are side by side; with fewer, one below the other."""
WITH_TEXTS = 30
"""With at least so many lines, engines one below the other show their texts; with fewer, the legend needs the room."""


class DemoScreen:
    """Renderable of the current state of one or more named traces."""

    def __init__(self, traces: Mapping[str, Trace]) -> None:
        self._cache = {name: Replay(trace, CacheState) for name, trace in traces.items()}
        self._acceptance = {name: Replay(trace, AcceptanceState) for name, trace in traces.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        side_by_side = options.max_width >= SIDE_BY_SIDE and len(self._cache) > 1
        rule = Rule(characters="-" if options.ascii_only else "─", style="dim")
        compact = not side_by_side and len(self._cache) > 1
        texts = not compact or options.max_height >= WITH_TEXTS
        panels = [self._panel(name, compact, rule if texts else None) for name in self._cache]
        if side_by_side:
            table = Table.grid(expand=True, padding=(0, 1))
            for _ in panels:
                table.add_column(ratio=1)
            table.add_row(*panels)
            yield table
        else:
            yield from panels
        states = [cache.at() for cache in self._cache.values()]
        yield legend(glyphs(ascii_only=options.ascii_only), states, options.max_width)

    def _panel(self, name: str, compact: bool, rule: Rule | None) -> RenderableType:
        """The panel of one engine. Without a `rule` it lacks the text, too."""
        cache, acceptance = self._cache[name].at(), self._acceptance[name].at()
        parts: list[RenderableType] = [CacheBlocks(cache, max_rows=2 if compact else 5)]
        requests = list(acceptance.requests.values())
        if drafted := [r for r in requests if r.rounds] or requests[:1]:
            watched = next((r for r in drafted if not r.finished), drafted[-1])
            rounds = AcceptanceRounds(watched, max_rounds=2 if compact else 5, text_lines=2 if rule else 0)
            parts += [rule, rounds] if rule else [rounds]
        return Panel(Group(*parts), title=Text(name, "bold"), subtitle=Text(_speed(cache)), padding=(0, 1))


def _speed(state: CacheState) -> str:
    totals = state.totals
    if not totals.seconds:
        return "waiting"
    return f"{plural(totals.output_tokens, 'token')}, {totals.output_tokens / totals.seconds:.0f} tokens/s"


def watch(
    traces: Mapping[str, Trace],
    run: Callable[[], Result],
    *,
    console: Console | None = None,
    pause: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Call `run` and show the events that its engines write into `traces` (by name); returns what `run` returns.

    In a terminal the screen is redrawn at most ten times a second, and each step is followed by a pause of `pause`
    seconds. Elsewhere a line is printed when a request finishes, without control codes. Raises `ConfigError` if there
    is no trace.
    """
    if not traces:
        raise ConfigError("watch() needs at least one trace, such as {'plain': trace}")
    console = console or Console()
    if not console.is_terminal or console.is_dumb_terminal:
        return _run_with_lines(traces, run, console)
    screen, next_frame = DemoScreen(traces), 0.0
    with Live(screen, console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def on_event(event: Event) -> None:
            nonlocal next_frame
            if not isinstance(event, StepFinished):
                return
            if clock() >= next_frame:
                live.refresh()
                next_frame = clock() + MIN_INTERVAL
            if pause:
                sleep(pause)

        for trace in traces.values():
            trace.watch(on_event)
        try:
            return run()
        finally:
            for trace in traces.values():
                trace.unwatch(on_event)
            # Leaving `Live` draws once more, so the last state is always shown.


def _run_with_lines(traces: Mapping[str, Trace], run: Callable[[], Result], console: Console) -> Result:
    def line_for(name: str) -> Callable[[Event], None]:
        replay = Replay(traces[name], CacheState)

        def on_event(event: Event) -> None:
            if isinstance(event, RequestFinished):
                state = replay.at()
                who = owner_letter(state.requests[event.request_id].index)
                done = f"{plural(event.num_output_tokens, 'token')} by step {state.step}"
                console.print(f"{name}: request {who} finished ({event.reason}), {done}", markup=False, highlight=False)

        return on_event

    handlers = {name: line_for(name) for name in traces}
    for name, trace in traces.items():
        trace.watch(handlers[name])
    try:
        return run()
    finally:
        for name, trace in traces.items():
            trace.unwatch(handlers[name])


def final_table(runs: Mapping[str, RunMetrics]) -> Table:
    """A table of results with a column per run; the speed-up is relative to the first run.

    Raises `ConfigError` if there is no run."""
    if not runs:
        raise ConfigError("final_table() needs the metrics of at least one run, such as RunMetrics.of(trace)")
    table = Table(title="Results", title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(Text(name), justify="right")
    for label, values in _rows(list(runs.values())):
        table.add_row(label, *values)
    return table


def _rows(runs: list[RunMetrics]) -> list[tuple[str, list[str]]]:
    base = runs[0].tokens_per_second
    rows = [
        ("output tokens", [str(r.output_tokens) for r in runs]),
        ("seconds", [f"{r.seconds:.2f}" for r in runs]),
        ("tokens per second", [f"{r.tokens_per_second:.1f}" for r in runs]),
    ]
    if len(runs) > 1 and base:
        rows.append(("speed-up", [f"{r.tokens_per_second / base:.2f}x" for r in runs]))
    rows.append(("tokens per target forward", [f"{r.tokens_per_forward:.2f}" for r in runs]))
    if any(r.judged_drafts for r in runs):
        rows.append(("drafts accepted", [_share(r.accepted_drafts, r.judged_drafts) for r in runs]))
    for i in range(max(len(r.accepted_by_position) for r in runs)):
        counts = [r.accepted_by_position[i] if i < len(r.accepted_by_position) else (0, 0) for r in runs]
        rows.append((f"  accepted at position {i + 1}", [_share(*pair) for pair in counts]))
    rows.append(("blocks used at peak", [f"{r.peak_blocks} of {r.num_blocks}" for r in runs]))
    rows.append(("waste (mean over steps)", [f"{r.waste_share:.0%}" for r in runs]))
    if any(r.preemptions for r in runs):
        rows.append(("preemptions", [str(r.preemptions) for r in runs]))
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%} ({part} of {whole})" if whole else "-"
