"""The terminal pictures: readable without colour, in 80 columns, in ASCII and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from minillm.errors import ConfigError
from minillm.trace import StepFinished, Trace
from minillm.trace.acceptance_state import AcceptanceState, RequestAcceptance, Token
from minillm.trace.cache_state import CacheState
from minillm.trace.replay import Replay
from minillm.trace.run_metrics import RunMetrics
from minillm.viz.draw.glyphs import cells
from minillm.viz.terminal.pool_in_text import CacheBlocks
from minillm.viz.terminal.rounds_in_text import AcceptanceRounds
from minillm.viz.terminal.signs import plain
from minillm.viz.terminal.two_engines import DemoScreen, final_table, watch
from tests.trace.traces import Script, busy, decode, prefill, sharing, story, verify


class AsciiStream(io.StringIO):
    encoding = "ascii"

    def write(self, text):
        text.encode("ascii")
        return super().write(text)


def printed(renderable, width=80, **options):
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, **options).print(renderable)
    return stream.getvalue()


def until(step):
    trace = Trace()
    for event in story():
        trace.append(event)
        if isinstance(event, StepFinished) and event.step == step:
            return trace
    raise AssertionError(step)


def plain_run():
    s = Script(16, 24, 0)
    s.add("p", "for line", 28)
    s.step(prefill("p", 28))
    for word in ("a", "b", "c"):
        s.step(decode("p", word, finish="length" if word == "c" else None))
    return s.trace


def test_pages_tell_owner_and_fill_without_colour():
    told = printed(CacheBlocks(Replay(story(), CacheState).at(6)))
    assert "7 of 24 blocks · waste 10 of 112 slots (9%)" in told
    assert "A████ A████ B████ B████ A████ A██▓· B╳─── C──── C──── B███╳ ─────" in told
    assert "step 6  C preempted, 46 tokens lost" in told


def test_cached_pages_differ_from_free_ones_without_colour():
    told = printed(CacheBlocks(Replay(sharing(), CacheState).at(8)))
    assert "0 of 16 blocks · 6 cached · waste 0 of 0 slots" in told
    assert "D░░░░ D░░░░ D░░░░ ░░░░░ ░░░░░ D──── C░░░░ ─────" in told
    told = printed(CacheBlocks(Replay(sharing(), CacheState).at(3)))
    assert "4████ 4████ 4████ B█" in told
    screen = DemoScreen({"x": sharing()})
    assert "░ cached" in printed(screen)
    assert "cached" not in printed(DemoScreen({"x": story()}))


def crowd(count, *, shared):
    """Requests of 20 tokens; with `shared`, all have their first block in common."""
    s = Script(num_blocks=64)
    for i in range(count):
        s.add(str(i), "prompt", 20)
    s.step(prefill("0", 20))
    for i in range(1, count):
        if shared:
            s.share(str(i), "0")
    s.step(*(prefill(str(i), 4 if shared else 20) for i in range(1, count)))
    return s.trace


def two_at_a_time(drafts=""):
    """Of four requests, two have finished and two run."""
    s = Script(caching=True)
    for name in "0123":
        s.add(name, f"prompt {name}", 20)
    for pair, end in (("01", "length"), ("23", None)):
        s.step(*(prefill(name, 20) for name in pair))
        for finish in (None, end):
            s.step(*(verify(name, drafts, 0, finish=finish) for name in pair))
    return s.trace


def test_of_too_many_requests_those_that_have_finished_are_left_out_first():
    told = printed(CacheBlocks(Replay(two_at_a_time(), CacheState).at(), max_rows=2)).splitlines()
    assert [line[1:13] for line in told if "prompt" in line] == ["C   prompt 2", "D   prompt 3"]
    assert "  and 2 more" in told
    assert "Drafts of C" in printed(DemoScreen({"x": two_at_a_time("abc")}))


def test_a_finished_request_has_no_tokens_in_the_cache():
    rows = [line for line in printed(CacheBlocks(Replay(story(), CacheState).at())).splitlines() if "done: " in line]
    assert len(rows) == 3 and all(" – " in row and " of " not in row for row in rows)


def test_the_legend_is_on_a_screen_of_24_lines():
    screen = DemoScreen({"plain": two_at_a_time(), "speculative": two_at_a_time("abc")})
    short, tall = (printed(screen, height=height).splitlines() for height in (24, 30))
    assert len(short) <= 24 < len(tall) <= 30
    assert "rolled back" in short[-2] and "░ cached" in short[-2]
    assert any("accepted at" in line for line in short)


def test_requests_after_z_have_names_of_their_own():
    told = printed(CacheBlocks(Replay(crowd(30, shared=False), CacheState).at()), width=120)
    assert "Z▓▓▓▓ Z▓··· AA▓▓▓ AA▓·· AB▓▓▓ AB▓·· AC▓▓▓ AC▓·· AD▓▓▓ AD▓··" in told
    screen = DemoScreen({"x": crowd(27, shared=False)})
    assert printed(screen).splitlines()[-2:] == [
        "█ written  ▓ written this step  ╳ rolled back  · empty (waste)  ─ free  2 shared",
        "AA request 27",
    ]
    assert "AA" not in printed(DemoScreen({"x": crowd(26, shared=False)}))


def test_shared_page_names_the_number_of_its_owners():
    assert "30███ A█··· B▓···" in printed(CacheBlocks(Replay(crowd(30, shared=True), CacheState).at()))
    assert "9████ A█··· B▓···" in printed(CacheBlocks(Replay(crowd(9, shared=True), CacheState).at()))


def test_prompts_are_aligned_whatever_the_length_of_the_names():
    s = Script()
    for i in range(29):
        s.add(str(i), "prompt", 4)
        s.step(prefill(str(i), 4))
        if 5 < i < 24:
            s.step(decode(str(i), finish="stop"))
    told = printed(CacheBlocks(Replay(s.trace, CacheState).at(), max_rows=12)).splitlines()
    rows = [line for line in told if "prompt " in line]
    assert [rows[0][:5], rows[-1][:5]] == [" A   ", " AC  "]
    assert {line.index("prompt") for line in rows} == {6}


def test_legend_is_complete_in_a_narrow_terminal():
    assert printed(DemoScreen({"x": sharing()}), 40).splitlines()[-3:] == [
        "█ written  ▓ written this step",
        "╳ rolled back  · empty (waste)  ░ cached",
        "─ free  2 shared",
    ]


def test_rounds_tell_verdicts_without_colour():
    told = printed(AcceptanceRounds(Replay(story(), AcceptanceState).at(5).requests["req-1"]))
    assert "4.00 tokens per forward, 75% accepted" in told
    assert "accepted at 1: 100%  2: 75%  3: 75%  4: 50%" in told
    line = next(line for line in told.splitlines() if line.startswith("  3 "))
    assert line.split() == ["3", "✓split", "✗(", "·x", "·y", "│", "↻lines", "1+1=2"]


@pytest.mark.parametrize(
    ("prompt", "tokens", "lines"),
    [
        ("x = 1", ["2", "3"], ["x = 123"]),
        ("0123456789", [*"abcdefghijklmn"], ["456789abcd", "efghijklmn"]),
        ("打开文件", ["读", "取每", "一行"], ["打开文件读", "取每一行"]),
        ("打开文件", ["读", "取每", "一行", "文字"], ["开文件读取", "每一行文字"]),
        ("文" * 20, ["a"], ["文" * 5, "文" * 4 + "a"]),
        ("", ["🙂"] * 11, ["🙂" * 5, "🙂" * 5]),
        ("", ["e\u0301"] * 21, ["e\u0301" * 10, "e\u0301" * 10]),
        ("", [], []),
    ],
)
def test_text_so_far_fills_its_lines_and_loses_no_character_in_between(prompt, tokens, lines):
    request = RequestAcceptance(prompt=prompt, tokens=[Token(text, "sampled") for text in tokens])
    assert printed(AcceptanceRounds(request), 10).splitlines() == lines


def test_ascii_replacements_have_the_width_of_what_they_replace():
    assert plain("日本 e\u0301 …·⏎", ascii_only=True) == "???? e ~.$"


@pytest.mark.parametrize("width", [30, 40, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width):
    screen = DemoScreen({"plain": plain_run(), "speculative": busy()})
    assert all(cells(line) <= width for line in printed(screen, width).splitlines())


def test_engines_stand_side_by_side_if_there_is_room():
    screen = DemoScreen({"plain": plain_run(), "speculative": until(5)})
    wide, narrow = printed(screen, 120), printed(screen, 80)
    assert any("plain" in line and "speculative" in line for line in wide.splitlines())
    assert not any("plain" in line and "speculative" in line for line in narrow.splitlines())
    assert len(narrow.splitlines()) <= 30


def test_ascii_terminal_gets_ascii():
    stream = AsciiStream()
    Console(file=stream, width=80).print(DemoScreen({"speculative": until(6)}))
    assert "A#### A#### B#### B#### A#### A##+." in stream.getvalue()


def test_prompt_with_markup_and_controls_is_only_text():
    s = Script()
    s.add("a", "[bold red]\x1b[2J[/nope]", 4)
    s.step(prefill("a", 4, "\x1b[31m"))
    told = printed(DemoScreen({"x": s.trace}))
    assert "[bold red]" in told
    assert "\x1b" not in told


def test_pipe_gets_a_line_per_finished_request_and_no_control_codes():
    traces, stream = {"plain": Trace(), "speculative": Trace()}, io.StringIO()

    def run():
        for event in plain_run():
            traces["plain"].append(event)
        for event in story():
            traces["speculative"].append(event)
        return "done"

    assert watch(traces, run, console=Console(file=stream, width=80)) == "done"
    assert stream.getvalue().splitlines() == [
        "plain: request A finished (length), 4 tokens by step 4",
        "speculative: request B finished (stop), 21 tokens by step 7",
        "speculative: request A finished (length), 7 tokens by step 8",
        "speculative: request C finished (stop), 5 tokens by step 9",
    ]


def test_terminal_shows_the_end_even_if_every_step_was_too_fast_to_see():
    trace, stream = Trace(), io.StringIO()
    console = Console(file=stream, width=80, height=40, force_terminal=True, color_system=None)

    def run():
        for event in story():
            trace.append(event)

    watch({"speculative": trace}, run, console=console, clock=lambda: 0.0)
    assert "step 9  C finished, 3 blocks back" in stream.getvalue()


def test_terminal_pauses_after_each_step_and_stops_watching_at_the_end():
    trace, slept = Trace(), []
    console = Console(file=io.StringIO(), width=80, force_terminal=True)

    def run():
        for event in story():
            trace.append(event)

    watch({"speculative": trace}, run, console=console, pause=0.5, sleep=slept.append)
    run()
    assert slept == [0.5] * 9


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_trace_forgets_its_watcher_even_if_the_run_fails(is_terminal):
    trace, console = Trace(), Console(file=io.StringIO(), width=80, force_terminal=is_terminal)

    def run():
        for event in story():
            trace.append(event)
        assert len(trace._watchers) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch({"x": trace}, run, console=console)
    assert not trace._watchers


def test_figures_of_a_run_agree_with_the_pictures():
    figures = RunMetrics.of(story())
    assert (figures.output_tokens, figures.peak_blocks, figures.num_blocks, figures.preemptions) == (33, 10, 24, 1)
    assert (figures.accepted_drafts, figures.judged_drafts) == (14, 24)
    assert figures.tokens_per_forward == pytest.approx((20 + 9) / (6 + 9))  # 9 forwards had nothing to judge
    assert figures.tokens_per_second == pytest.approx(33 / (9 * 0.02))
    assert RunMetrics.of(plain_run()).tokens_per_forward == 1.0
    assert RunMetrics.of(Trace()).tokens_per_second == 0.0


def test_waste_is_averaged_over_the_ends_of_steps():
    # 28, 29 and 30 tokens in 2 blocks of 16 at the ends of three steps; the fourth ends with none.
    assert RunMetrics.of(plain_run()).waste_share == pytest.approx((4 + 3 + 2) / (3 * 32))


def test_final_table_compares_runs_with_the_first():
    told = printed(final_table({"plain": RunMetrics.of(plain_run()), "speculative": RunMetrics.of(story())}))
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:4]]
        for line in told.splitlines()
        if "│" in line
    }
    assert rows["tokens per second"] == ["50.0", "183.3"]
    assert rows["speed-up"] == ["1.00x", "3.67x"]
    assert rows["tokens per target forward"] == ["1.00", "1.93"]
    assert rows["drafts accepted"] == ["-", "58% (14 of 24)"]
    assert rows["accepted at position 4"] == ["-", "33% (2 of 6)"]
    assert rows["blocks used at peak"] == ["2 of 24", "10 of 24"]
    assert "draft" not in printed(final_table({"plain": RunMetrics.of(plain_run())}))


def test_wrong_calls_are_refused():
    with pytest.raises(ConfigError, match="at least one trace"):
        watch({}, lambda: None)
    with pytest.raises(ConfigError, match="at least one run"):
        final_table({})
